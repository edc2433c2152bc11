// Rows of the experts' buffer for top-k ids: a stable counting sort of small keys.  Include after hopper.cuh; see reference.index_expert_rows.
//
//   count   a block takes TILE ids in their order, a warp 32 * ITEMS of them, and counts each expert's
//   scan    a block for each expert: the tiles' counts become the numbers of ids in earlier tiles, and their sum is the expert's
//   write   the blocks of `count` again: the starts of the experts' groups plus the ids before this warp's give each id its row
//
// Constants that the launcher puts in front.  ITEMS: ids of a thread.  THREADS: of a block.  LONG: int64 experts, else int32.
// SCORES: ids have scores, and each expert row also gets its id's row and score.  This rank's experts begin at `lowest`.
//
// The lanes of a warp that hold equal keys find each other by match.any, so the result does not depend on the order of execution.

constexpr int WARPS = THREADS / 32, WARP_ITEMS = 32 * ITEMS, TILE = WARPS * WARP_ITEMS;

struct Scored {  // what SCORES takes and writes
  const u32* scores;                                     // (rows, columns), bits
  int columns, experts_row, scores_row, lowest;          // values from row to row of experts and of scores
  int* rows;                                             // (num_expert_rows,)
  u32* row_scores;                                       // (num_expert_rows,), bits
};

// Where top-k id `at` is in a matrix whose rows are `row` values apart.
__device__ __forceinline__ long long in_rows(u32 at, u32 columns, int row) {
  return (long long)(at / columns) * row + at % columns;
}

// The expert of top-k id `at`, groups where it is not here (a key wider than 32 bits wraps around and is compared before it is cut).
__device__ __forceinline__ u32 key_at(const void* experts, int at, int count, u32 groups, const Scored& source) {
  if (at >= count) return groups;
  const long long from = SCORES ? in_rows(at, source.columns, source.experts_row) : at;
  const int lowest = SCORES ? source.lowest : 0;
  if (LONG) {
    const long long wide = ((const long long*)experts)[from] - lowest;
    return wide >= 0 && wide < groups ? (u32)wide : groups;
  }
  return min((u32)(((const int*)experts)[from] - lowest), groups);
}

// Top-k ids of each expert in this warp's part of the tile, into mine[groups]; only the warp itself touches it.
__device__ __forceinline__ void count_warp(const u32 (&keys)[ITEMS], u32* mine, u32 groups, u32 lane) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const u32 equals = __match_any_sync(~0u, keys[i]);
    if (keys[i] < groups && lane == __ffs(equals) - 1) mine[keys[i]] += __popc(equals);
    __syncwarp();
  }
}

__device__ __forceinline__ void load_keys(u32 (&keys)[ITEMS], const void* experts, int count, u32 groups, u32 tid, const Scored& source) {
  const int first = blockIdx.x * TILE + tid / 32 * WARP_ITEMS + tid % 32;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) keys[i] = key_at(experts, first + i * 32, count, groups, source);
}

// experts (count,), counts (groups, tiles); topk_ids (num_expert_rows,) and what describes them are cleared on the way.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
expert_rows_count(const void* __restrict__ experts, int count, int groups, u32* __restrict__ counts, int* __restrict__ topk_ids,
                  int num_expert_rows, const u32* __restrict__ scores, int columns, int experts_row, int scores_row, int lowest,
                  int* __restrict__ rows, u32* __restrict__ row_scores) {
  const Scored source{scores, columns, experts_row, scores_row, lowest, rows, row_scores};
  extern __shared__ u32 table[];                         // (WARPS, groups)
  const u32 tid = threadIdx.x;
  for (long long p = (long long)blockIdx.x * THREADS + tid; p < num_expert_rows; p += (long long)gridDim.x * THREADS) {
    topk_ids[p] = -1;
    if (SCORES) {
      rows[p] = -1;
      row_scores[p] = 0;
    }
  }
  for (u32 i = tid; i < WARPS * groups; i += THREADS) table[i] = 0;
  __syncthreads();
  u32 keys[ITEMS];
  load_keys(keys, experts, count, groups, tid, source);
  count_warp(keys, table + tid / 32 * groups, groups, tid % 32);
  __syncthreads();
  for (u32 g = tid; g < groups; g += THREADS) {
    u32 sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += table[w * groups + g];
    counts[(long long)g * gridDim.x + blockIdx.x] = sum;
  }
}

// Exclusive sums over the threads of a block, and the sum of all.
__device__ __forceinline__ u32 scan_block(u32 value, u32& all) {
  __shared__ u32 sums[WARPS];
  const u32 tid = threadIdx.x, lane = tid % 32;
  u32 upto = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0u, upto, step);
    upto += lane >= step ? other : 0;
  }
  if (lane == 31) sums[tid / 32] = upto;
  __syncthreads();
  u32 before = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    before += w < tid / 32 ? sums[w] : 0;
    all += sums[w];
  }
  __syncthreads();
  return before + upto - value;
}

// counts (groups, tiles) -> how many before each tile; totals (groups,).  A block for each group.
extern "C" __global__ void __launch_bounds__(THREADS) expert_rows_scan(u32* __restrict__ counts, u32* __restrict__ totals, int tiles) {
  u32* mine = counts + (long long)blockIdx.x * tiles;
  u32 carry = 0;
  for (int first = 0; first < tiles; first += THREADS) {
    const int t = first + threadIdx.x;
    u32 all;
    const u32 before = scan_block(t < tiles ? mine[t] : 0, all);
    if (t < tiles) mine[t] = carry + before;
    carry += all;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = carry;
}

// counts and totals as expert_rows_scan left them -> expert_rows (count,), ends (groups,), topk_ids (num_expert_rows,).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
expert_rows_write(const void* __restrict__ experts, int count, int groups, const u32* __restrict__ counts, const u32* __restrict__ totals,
            int alignment, int* __restrict__ expert_rows, int* __restrict__ ends, int* __restrict__ topk_ids,
                  int num_expert_rows, const u32* __restrict__ scores, int columns, int experts_row, int scores_row, int lowest,
                  int* __restrict__ rows, u32* __restrict__ row_scores) {
  const Scored source{scores, columns, experts_row, scores_row, lowest, rows, row_scores};
  extern __shared__ u32 table[];                         // (WARPS, groups): counts, then the row of each warp's next id
  const u32 tid = threadIdx.x, lane = tid % 32;
  u32* mine = table + tid / 32 * groups;
  for (u32 i = tid; i < WARPS * groups; i += THREADS) table[i] = 0;
  __syncthreads();
  u32 keys[ITEMS];
  load_keys(keys, experts, count, groups, tid, source);
  count_warp(keys, mine, groups, lane);
  u32 start = 0;
  for (int first = 0; first < groups; first += THREADS) {
    const int g = first + tid;
    u32 padded = g < groups ? totals[g] : 0, all;
    if (alignment && g < groups) padded = (max(padded, (u32)alignment) + alignment - 1) / alignment * alignment;
    const u32 before = start + scan_block(padded, all);  // its barriers also separate the counting from the rest
    start += all;
    if (g >= groups) continue;
    if (blockIdx.x == 0) ends[g] = before + padded;
    u32 next = before + counts[(long long)g * gridDim.x + blockIdx.x];
    for (int w = 0; w < WARPS; ++w) {
      const u32 here = table[w * groups + g];
      table[w * groups + g] = next;
      next += here;
    }
  }
  __syncthreads();
  const int first = blockIdx.x * TILE + tid / 32 * WARP_ITEMS + lane;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const u32 equals = __match_any_sync(~0u, keys[i]), before = __popc(equals & ((1u << lane) - 1));
    const bool here = keys[i] < groups;
    const u32 expert_row = here ? mine[keys[i]] + before : 0;
    __syncwarp();
    if (here && before == 0) mine[keys[i]] = expert_row + __popc(equals);
    __syncwarp();
    const int at = first + i * 32;
    if (at < count) expert_rows[at] = here ? (int)expert_row : -1;
    if (!here || expert_row >= num_expert_rows) continue;
    topk_ids[expert_row] = at;
    if (SCORES) {
      rows[expert_row] = at / columns;
      row_scores[expert_row] = scores[in_rows(at, columns, scores_row)];
    }
  }
}
