// Where the output tokens of a wgrad's operands come from. Behind hopper.cuh; the twin is reference.rebase_tokens.
//
// Every group starts at a multiple of 128 output tokens and is padded with zeros; an empty group has none. Out: where every 128 output
// tokens come from, where groups end, the groups by size; and the tables of maxima that the next kernel fills are cleared.

extern "C" __global__ void __launch_bounds__(1024)
token_plan(const int* __restrict__ offs, int groups, int rows, int tile_count, int4* __restrict__ tiles, int* ends,
           int* __restrict__ order, int* __restrict__ tables, long long table_words) {
  auto end_of = [&](int g) { return g < 0 ? 0 : min(max(offs[g], 0), rows); };
  auto tokens = [&](int g) { return max(end_of(g) - end_of(g - 1), 0); };
  const long long me = (long long)blockIdx.x * 1024 + threadIdx.x, all = (long long)gridDim.x * 1024;
  for (long long i = me; i < table_words; i += all) tables[i] = 0;
  for (long long g = me; g < groups; g += all) {
    const int mine = tokens(g);
    int rank = 0;                                        // groups with more tokens, or with as many and listed before
    for (int o = 0; o < groups; ++o) rank += tokens(o) > mine || (tokens(o) == mine && o < g);
    order[rank] = g;
  }
  if (blockIdx.x) return;
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (groups + 1023) / 1024, first = threadIdx.x * each;
  int sum = 0;
  for (int g = first; g < min(first + each, groups); ++g) sum += (tokens(g) + 127) / 128;
  int before = sum;                                      // inclusive scan over the warp, then over the warps
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  for (int g = first; g < min(first + each, groups); ++g) before += (tokens(g) + 127) / 128, ends[g] = 128 * before;
  __syncthreads();
  for (int tile = threadIdx.x; tile < tile_count; tile += 1024) {     // {first row, rows, group, first tile of its group}; rows < 0: none
    int low = 0, high = groups;                          // the first group that ends behind this tile's start
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > 128 * tile) high = middle;
      else low = middle + 1;
    }
    const int begun = low ? ends[low - 1] : 0, local = 128 * tile - begun;
    tiles[tile] = low == groups ? int4{0, -1, 0, 0} : int4{end_of(low - 1) + local, min(128, tokens(low) - local), low, local == 0};
  }
}
