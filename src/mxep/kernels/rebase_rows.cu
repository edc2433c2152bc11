// MX rows -> e4m3 rows with one exponent each (the fast road), or one per 128 columns where a row's exponents spread too far
// (the robust road): what an FP8 GEMM without block scales multiplies. Behind hopper.cuh; the twin is reference.rebase_rows.
//
// A warp takes a row. Each lane holds pieces of 16 neighbouring bytes: two lanes an MX block of 32, eight lanes a span of 128.
//   1. top and low: the largest and the smallest exponent of the blocks that count (not all zero, not NaN)
//   2. bytes times 2^(own exponent - top), where top is the row's or, in a row of spread > wide_above, the span's
// The arithmetic is free beside the memory: 6 instructions rebase 4 values through f16x2. f16 is enough: e4m3 * 2^-k is exact in it
// down to 2^-24, far under half of e4m3's last bit (2^-10).

#ifndef OPTIONS
constexpr int WIDTH = 7168;
constexpr bool SPANS = true, MAP = false;
#endif
// WIDTH: of a row, a multiple of 32.  SPANS: there is a robust road.  MAP: row p of the output is row row_map[p], -1 a row of zeros.

constexpr int PIECES = WIDTH / 16, PARTS = (PIECES + 31) / 32;
constexpr int HOLD_PARTS = 20;                           // more do not fit into registers: such rows are read twice
constexpr bool HOLD = PARTS <= HOLD_PARTS;
constexpr int HELD = HOLD ? PARTS : 1;
constexpr int WARPS = 4;

__device__ __forceinline__ uint4 rebased(uint4 v, int shift, int exponent) {   // a block of exponent 0xFF becomes NaN
  const u32 f = shift_factor(shift, exponent);
  return uint4{shifted(v.x, f), shifted(v.y, f), shifted(v.z, f), shifted(v.w, f)};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rebase_rows(const u8* __restrict__ q, long long q_row, const u8* __restrict__ s, long long s_row, const int* __restrict__ row_map,
            int rows, int wide_above, u8* __restrict__ out, float* __restrict__ scale, float* __restrict__ spans, long long spans_row,
            u8* __restrict__ spread) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  const long long from = MAP ? __ldg(row_map + row) : row;
  const u8 *data = q + from * q_row + 16 * lane, *exponents = s + from * s_row + lane / 2;
  const bool live = from >= 0;
  auto there = [&](int i) { return live && 32 * i + lane < PIECES; };
  auto load = [&](int i) { return there(i) ? __ldg((const uint4*)(data + 512 * i)) : uint4{}; };
  auto exponent_of = [&](int i) { return there(i) ? (int)__ldg(exponents + 16 * i) : 0; };
  auto counting = [&](uint4 v, int e) {                  // the exponent of a block that counts, else 0; and whether it does, in bit 8
    u32 any = (v.x | v.y | v.z | v.w) & 0x7F7F7F7F;
    any |= __shfl_xor_sync(~0u, any, 1);
    return any && e != 255 ? e | 256 : 0;
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
    const int c = HOLD ? counting(v[i % HELD], e[i % HELD]) : counting(load(i), exponent_of(i));
    top = max(top, c & 255);
    low = c ? min(low, c & 255) : low;
  }
  top = __reduce_max_sync(~0u, top);
  low = __reduce_min_sync(~0u, low);
  const int distance = max(top - low, 0);
  const bool wide = SPANS && distance > wide_above;

  u8* to = out + (long long)row * WIDTH + 16 * lane;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const uint4 bytes = HOLD ? v[i % HELD] : load(i);
    const int own = HOLD ? e[i % HELD] : exponent_of(i);
    int target = top;
    if (wide) {                                          // the same for the whole warp
      target = counting(bytes, own) & 255;
      target = max(target, __shfl_xor_sync(~0u, target, 2));
      target = max(target, __shfl_xor_sync(~0u, target, 4));
      if (lane % 8 == 0 && 32 * i + lane < PIECES) spans[(4 * i + lane / 8) * spans_row + row] = power_of_two(target);
    }
    if (32 * i + lane < PIECES) *(uint4*)(to + 512 * i) = rebased(bytes, target - own, own);
  }
  if (lane == 0) {
    scale[row] = wide ? -1.0f : power_of_two(top);
    spread[row] = distance;
  }
}
