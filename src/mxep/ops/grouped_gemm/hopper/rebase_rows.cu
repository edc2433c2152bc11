// MX rows -> e4m3 rows with one scale each, or with one scale per 128 columns where a row's exponents spread too far: operands of an
// FP8 GEMM that knows no MX block scales. Include after hopper.cuh, mx_bytes.cuh and wide_rows.cuh. Reference:
// rebase_reference.rebase_rows.
//
// A warp takes a row. Each lane holds pieces of 16 neighbouring bytes: two lanes an MX block of 32, eight lanes 128 columns.
//   1. top and low: the largest and the smallest exponent of the blocks that count (not all zero, not NaN)
//   2. in a row of spread > max_spread: a base that as many 128-column blocks as possible can share, where no MX block moves further
//      than NEAR
//   3. bytes times 2^(own exponent - target): the row's top or, in such a row, the base or the 128-column block's own top
//   4. the block scales, relative to the base, are stored (blocks, rows): a thread block stages those of its rows and writes them together
// Memory bounds the kernel.

// Constants that the launcher puts in front.
// WIDTH: of a row, a multiple of 32.  WARPS: rows of a block of threads, a multiple of 4.  BLOCK_SCALES: a row may have one
// scale per 128 columns.  MAP: row p of the output is row row_map[p], -1 a row of zeros.  NUM_VALID: rows from *num_valid_rows on are not
// written, and thread blocks loop over the others.

constexpr int PIECES = WIDTH / 16, PARTS = (PIECES + 31) / 32, BLOCKS_128 = (PIECES + 7) / 8;
constexpr int HOLD_PARTS = 20;                           // more do not fit into registers: such rows are read twice
constexpr bool HOLD = PARTS <= HOLD_PARTS;
constexpr int HELD = HOLD ? PARTS : 1;
constexpr int COUNTS = 256;                              // flag, added to the exponent of a block that counts

typedef u8 BlockScaleBytes[BLOCK_SCALES ? BLOCKS_128 : 1][WARPS];

// A row for each warp, from row_0 on, as far as there are rows.
__device__ __forceinline__ void rebase(BlockScaleBytes& staged, int row_0, const u8* __restrict__ q, long long q_row,
                                       const u8* __restrict__ s, long long s_row, const int* __restrict__ row_map, int rows,
                                       int max_spread, u8* __restrict__ out, float* __restrict__ scale, float* __restrict__ block_scale,
                                       long long block_scale_row, u8* __restrict__ spread) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = row_0 + warp;
  const bool exists = row < rows;
  const long long from = !exists ? -1 : MAP ? __ldg(row_map + row) : row;
  const u8 *data = q + from * q_row + 16 * lane, *exponents = s + from * s_row + lane / 2;
  auto there = [&](int i) { return from >= 0 && 32 * i + lane < PIECES; };
  auto load = [&](int i) { return there(i) ? __ldg((const uint4*)(data + 512 * i)) : uint4{}; };
  auto exponent_of = [&](int i) { return there(i) ? (int)__ldg(exponents + 16 * i) : 0; };
  auto marked = [&](uint4 v, int e) {                    // the block's exponent, with COUNTS where it counts
    u32 any = (v.x | v.y | v.z | v.w) & 0x7F7F7F7F;
    any |= __shfl_xor_sync(~0u, any, 1);
    return any && e != 255 ? e | COUNTS : e;
  };

  uint4 v[HELD];
  int e[HELD], top = 0, low = 255;
  if constexpr (HOLD) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) v[i] = load(i);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) e[i] = exponent_of(i);
  }
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int m = HOLD ? marked(v[i % HELD], e[i % HELD]) : marked(load(i), exponent_of(i));
    if constexpr (HOLD && BLOCK_SCALES) e[i] = m;
    top = m & COUNTS ? max(top, m & 255) : top;
    low = m & COUNTS ? min(low, m & 255) : low;
  }
  top = __reduce_max_sync(~0u, top);
  low = __reduce_min_sync(~0u, low);
  const int distance = max(top - low, 0);
  const bool wide = BLOCK_SCALES && distance > max_spread;

  auto marked_part = [&](int i) { return HOLD ? e[i % HELD] : marked(load(i), exponent_of(i)); };
  auto block_128_of = [&](int m) {                       // of MX blocks that count: largest exponent; in the upper half 255 - smallest
    u32 w = m & COUNTS ? (m & 255) | (255 - (m & 255)) << 16 : 0;
    w = max2(w, __shfl_xor_sync(~0u, w, 2));
    return max2(w, __shfl_xor_sync(~0u, w, 4));
  };
  int base = 127;
  if (wide && distance <= FAR) {                         // near the lowest block, or near the highest one, where more 128-column blocks lie
    int near_low = 0, near_top = 0, low_base = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const u32 w = block_128_of(marked_part(i));
      const int block_top = w & 255, block_low = 255 - (w >> 16);
      const bool lower = w && block_top <= low + NEAR;
      low_base = lower ? max(low_base, block_top) : low_base;
      near_low += lower, near_top += w && block_low >= top - NEAR;
    }
    near_low = __reduce_add_sync(~0u, near_low), near_top = __reduce_add_sync(~0u, near_top);
    low_base = __reduce_max_sync(~0u, low_base);
    base = near_low > near_top ? low_base : top;
  }

  u8* to = out + (long long)row * WIDTH + 16 * lane;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const uint4 bytes = HOLD ? v[i % HELD] : load(i);
    const int m = HOLD ? e[i % HELD] : wide ? marked(bytes, exponent_of(i)) : exponent_of(i), own = m & 255;
    int target = top;
    if (wide) {                                          // the same for the whole warp
      const u32 w = block_128_of(m);
      const int block_top = w & 255, block_low = 255 - (w >> 16);
      target = !w || block_top <= base && block_low >= base - NEAR ? base : block_top;
      if (lane % 8 == 0 && 32 * i + lane < PIECES) staged[4 * i + lane / 8][warp] = target - base + 127;
    }
    if (exists && 32 * i + lane < PIECES) {
      const uint4 result = rebased(bytes, target - own, own);
      if (MAP) __stcs((uint4*)(to + 512 * i), result);   // L2 keeps rows that are read again
      else *(uint4*)(to + 512 * i) = result;
    }
  }
  if (exists && lane == 0) {
    scale[row] = wide ? -power_of_two(base) : power_of_two(top);
    spread[row] = distance;
  }
  if constexpr (BLOCK_SCALES) {
    if (!wide)
      for (int i = lane; i < BLOCKS_128; i += 32) staged[i][warp] = 0;
    if (!__syncthreads_or(wide)) return;
    for (int i = threadIdx.x; i < BLOCKS_128 * (WARPS / 4); i += 32 * WARPS) {      // 4 rows at a time; the last ones are padding
      const int block = i / (WARPS / 4), first = i % (WARPS / 4) * 4;
      const uchar4 t = *(const uchar4*)(staged[block] + first);
      *(float4*)(block_scale + block * block_scale_row + row_0 + first) =
          float4{power_of_two(t.x), power_of_two(t.y), power_of_two(t.z), power_of_two(t.w)};
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, NUM_VALID ? 3 : 0)     // 0: as ptxas likes, which spills in the loop
rebase_rows(const u8* __restrict__ q, long long q_row, const u8* __restrict__ s, long long s_row, const int* __restrict__ row_map,
            int rows, int max_spread, u8* __restrict__ out, float* __restrict__ scale, float* __restrict__ block_scale,
            long long block_scale_row, u8* __restrict__ spread, const int* __restrict__ num_valid_rows) {
  __shared__ BlockScaleBytes staged;
  if constexpr (!NUM_VALID) {
    rebase(staged, blockIdx.x * WARPS, q, q_row, s, s_row, row_map, rows, max_spread, out, scale, block_scale, block_scale_row, spread);
  } else {
    const int end = min(__ldg(num_valid_rows), rows);
    for (int row_0 = blockIdx.x * WARPS; row_0 < end; row_0 += gridDim.x * WARPS) {
      rebase(staged, row_0, q, q_row, s, s_row, row_map, end, max_spread, out, scale, block_scale, block_scale_row, spread);
      __syncthreads();
    }
  }
}
