// Where the output tokens of a wgrad's operands come from. Include after hopper.cuh; the reference is reference.rebase_tokens.
//
// Every group starts at a multiple of 128 output tokens and is padded with zeros; an empty group has none. Out: where every 128 output
// tokens come from, where groups end, the groups by size, which operand gives its tokens' exponents to the other one; and the tables of
// maxima that the next kernel fills are cleared.
//
// a gives, unless the exponents inside a token of g lie clearly farther apart than inside one of a, in a sample of the group's tokens:
// the operand that gives keeps its tokens' largest exponent, so its outlying channels keep their small neighbours.

constexpr int SAMPLES = 32, MARGIN = 2;                  // a warp a sample; MARGIN: of the mean spread

struct Scales {                                          // of one operand
  const u8* s;
  const int* row_map;                                    // null: token t is row t; -1 a row of zeros
  long long s_row;
  int blocks;
};

// Largest minus smallest exponent of a token's blocks, without scale bytes 0 and 255; for a whole warp.
__device__ int spread_of(const Scales& o, int token) {
  const int row = o.row_map ? __ldg(o.row_map + token) : token;
  int top = 0, low = 255;
  for (int b = threadIdx.x % 32; row >= 0 && b < o.blocks; b += 32) {
    const int e = __ldg(o.s + row * o.s_row + b);
    if (e > 0 && e < 255) top = max(top, e), low = min(low, e);
  }
  return max(__reduce_max_sync(~0u, top) - __reduce_min_sync(~0u, low), 0);
}

extern "C" __global__ void __launch_bounds__(1024)
token_plan(const int* __restrict__ offs, int groups, int rows, int tile_count, int4* __restrict__ tiles, int* ends,
           int* __restrict__ order, int* __restrict__ tables, long long table_words, const Scales of_a, const Scales of_g,
           int* __restrict__ g_gives) {
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
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int g = gridDim.x - 1 - blockIdx.x; g < groups; g += gridDim.x) {         // the first block has the most else to do
    const int size = tokens(g), token = end_of(g - 1) + (int)((long long)warp * size / SAMPLES);
    const int farther = size ? spread_of(of_g, token) - spread_of(of_a, token) : 0;
    if (lane == 0) warp_sums[warp] = farther;
    __syncthreads();
    const int sum = __reduce_add_sync(~0u, warp_sums[lane]);
    if (threadIdx.x == 0) g_gives[g] = sum > SAMPLES * MARGIN;
    __syncthreads();
  }
  if (blockIdx.x) return;
  const int each = (groups + 1023) / 1024, first = threadIdx.x * each;
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
    int low = 0, high = groups;                          // the first group that ends after this tile's start
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > 128 * tile) high = middle;
      else low = middle + 1;
    }
    const int begun = low ? ends[low - 1] : 0, local = 128 * tile - begun;
    tiles[tile] = low == groups ? int4{0, -1, 0, 0} : int4{end_of(low - 1) + local, min(128, tokens(low) - local), low, local == 0};
  }
}
