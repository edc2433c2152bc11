// Rows whose MX codes a block of threads has put into its shared memory -> e4m3 rows as rebase_rows.cu writes them.  Include after
// hopper.cuh, mx_bytes.cuh and wide_rows.cuh.
//
// A row's exponent needs all of the row, so the block takes ROWS whole rows, and writes them after it has quantised them.
//   1. find_targets: a warp takes a row: its largest exponent and, in a wide row, the target of each 128 columns
//   2. write_rebased: a thread takes 16 codes at a time: times 2^(own exponent - target), and out

// Constants that the launcher puts in front.  ROWS: that a block holds.  REBASED_WIDTH: of a row, a multiple of 32.  THREADS: of a block.
// BLOCK_SCALES: a row may have one scale per 128 columns.

constexpr int PIECES = REBASED_WIDTH / 16, MX_BLOCKS = REBASED_WIDTH / 32;
constexpr int BLOCKS_128 = (REBASED_WIDTH + 127) / 128, RANGES = (BLOCKS_128 + 31) / 32;
constexpr u32 ZEROS = 254;                               // for the exponent of a block of zeros; a NaN block has 255, others have less

struct RowsInMemory { u8 codes[ROWS * REBASED_WIDTH], exponents[ROWS][4 * BLOCKS_128], targets[ROWS][BLOCKS_128]; };

// What `exponents` holds of an MX block.  counts: it has a code that is neither zero nor NaN.
__device__ __forceinline__ u32 kept_exponent(u32 exponent, bool counts) { return counts || exponent == 255 ? exponent : ZEROS; }

// The exponents of some MX blocks that count: the largest, and in the upper half 255 - the smallest, so that max2 joins two of them.
// 0: none counts.
__device__ __forceinline__ u32 range_of(u32 exponent) { return exponent | (255 - exponent) << 16; }
__device__ __forceinline__ int top_of(u32 range) { return range & 255; }
__device__ __forceinline__ int low_of(u32 range) { return 255 - (range >> 16); }

// scale (T,), block_scale (BLOCKS_128, T) with block_scale_row floats between rows: as in rebase_rows.cu.  The block's rows are row_0 and on.
__device__ __forceinline__ void find_targets(RowsInMemory& memory, u32 row_0, u32 rows, int max_spread, float* __restrict__ scale,
                                             float* __restrict__ block_scale, long long block_scale_row) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u32 i = warp; i < rows; i += THREADS / 32) {
    auto range = [&](int part) {                         // of the lane's 128 columns
      const u32 block = 32 * part + lane;
      if (block >= BLOCKS_128) return 0u;
      const u32 four = *(const u32*)(memory.exponents[i] + 4 * block);
      u32 w = 0;
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const u32 e = four >> 8 * j & 255;
        if (e < ZEROS && (MX_BLOCKS % 4 == 0 || 4 * block + j < MX_BLOCKS)) w = max2(w, range_of(e));
      }
      return w;
    };
    u32 all = 0;
#pragma unroll
    for (int part = 0; part < RANGES; ++part) all = max2(all, range(part));
    const int top = __reduce_max_sync(~0u, all & 255), low = 255 - (int)__reduce_max_sync(~0u, all >> 16);
    const bool wide = BLOCK_SCALES && max(top - low, 0) > max_spread;
    int base = wide ? 127 : top;
    if (wide && top - low <= FAR) {                      // near the lowest block, or near the highest one, where more 128-column blocks lie
      int near_low = 0, near_top = 0, low_base = 0;
#pragma unroll
      for (int part = 0; part < RANGES; ++part) {
        const u32 w = range(part);
        const bool lower = w && top_of(w) <= low + NEAR;
        low_base = lower ? max(low_base, top_of(w)) : low_base;
        near_low += lower, near_top += w && low_of(w) >= top - NEAR;
      }
      near_low = __reduce_add_sync(~0u, near_low), near_top = __reduce_add_sync(~0u, near_top);
      low_base = __reduce_max_sync(~0u, low_base);
      base = near_low > near_top ? low_base : top;
    }
#pragma unroll
    for (int part = 0; part < RANGES; ++part) {
      const u32 block = 32 * part + lane, w = range(part);
      if (block >= BLOCKS_128) continue;
      const bool shares = !wide || !w || top_of(w) <= base && low_of(w) >= base - NEAR;
      const int target = shares ? base : top_of(w);
      memory.targets[i][block] = target;
      if (wide) block_scale[block * block_scale_row + row_0 + i] = power_of_two(target - base + 127);
    }
    if (lane == 0) scale[row_0 + i] = wide ? -power_of_two(base) : power_of_two(top);
  }
}

// out (T, REBASED_WIDTH).
__device__ __forceinline__ void write_rebased(const RowsInMemory& memory, u32 row_0, u32 rows, u8* __restrict__ out) {
  u8* to = out + (u64)row_0 * REBASED_WIDTH;
  for (u32 piece = threadIdx.x; piece < rows * PIECES; piece += THREADS) {
    const u32 row = piece / PIECES, in_row = piece % PIECES;
    const int own = memory.exponents[row][in_row / 2], target = memory.targets[row][in_row / 8];
    *(uint4*)(to + 16 * piece) = rebased(*(const uint4*)(memory.codes + 16 * piece), target - own, own);
  }
}
