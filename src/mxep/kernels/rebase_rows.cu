// MX rows -> e4m3 rows with one exponent each (the fast road), or one per 128 columns where a row's exponents spread too far
// (the robust road): what an FP8 GEMM without block scales multiplies. Behind hopper.cuh and mx_bytes.cuh; the twin is
// reference.rebase_rows.
//
// A warp takes a row. Each lane holds pieces of 16 neighbouring bytes: two lanes an MX block of 32, eight lanes a span of 128.
//   1. top and low: the largest and the smallest exponent of the blocks that count (not all zero, not NaN)
//   2. in a row of spread > wide_above: a base that as many spans as possible can share, none of whose blocks moves further than NEAR
//   3. bytes times 2^(own exponent - target): the row's top or, in such a row, the base or the span's own top
//   4. the spans' scales beside the base lie (spans, rows): a block of threads collects those of its rows and writes them side by side
// The arithmetic is free beside the memory: 6 instructions rebase 4 values through f16x2. f16 is enough: e4m3 * 2^-k is exact in it
// down to 2^-24, far under half of e4m3's last bit (2^-10).

#ifndef OPTIONS
constexpr int WIDTH = 7168, WARPS = 4;
constexpr bool SPANS = true, MAP = false, LIVE = false;
#endif
// WIDTH: of a row, a multiple of 32.  WARPS: rows of a block of threads, a multiple of 4.  SPANS: there is a robust road.
// MAP: row p of the output is row row_map[p], -1 a row of zeros.  LIVE: rows from *live on are left alone, and blocks of threads walk.

constexpr int PIECES = WIDTH / 16, PARTS = (PIECES + 31) / 32, SPAN_COUNT = (PIECES + 7) / 8;
constexpr int HOLD_PARTS = 20;                           // more do not fit into registers: such rows are read twice
constexpr bool HOLD = PARTS <= HOLD_PARTS;
constexpr int HELD = HOLD ? PARTS : 1;
constexpr int COUNTS = 256;                              // set beside the exponent of a block that counts
constexpr int NEAR = 8;                                  // how far below a wide row's base a block may lie
constexpr int FAR = 60;                                  // a row of more spread has base 2^0: no scale beside it may overflow

__device__ __forceinline__ uint4 rebased(uint4 v, int shift, int exponent) {   // a block of exponent 0xFF becomes NaN
  const u32 f = shift_factor(shift, exponent);
  return uint4{shifted(v.x, f), shifted(v.y, f), shifted(v.z, f), shifted(v.w, f)};
}

typedef u8 SpanScales[SPANS ? SPAN_COUNT : 1][WARPS];

// A row for each warp, from row_0 on, as far as there are rows.
__device__ __forceinline__ void rebase(SpanScales& span_scales, int row_0, const u8* __restrict__ q, long long q_row,
                                       const u8* __restrict__ s, long long s_row, const int* __restrict__ row_map, int rows,
                                       int wide_above, u8* __restrict__ out, float* __restrict__ scale, float* __restrict__ spans,
                                       long long spans_row, u8* __restrict__ spread) {
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
    if constexpr (HOLD && SPANS) e[i] = m;
    top = m & COUNTS ? max(top, m & 255) : top;
    low = m & COUNTS ? min(low, m & 255) : low;
  }
  top = __reduce_max_sync(~0u, top);
  low = __reduce_min_sync(~0u, low);
  const int distance = max(top - low, 0);
  const bool wide = SPANS && distance > wide_above;

  auto marked_part = [&](int i) { return HOLD ? e[i % HELD] : marked(load(i), exponent_of(i)); };
  auto span_of = [&](int m) {                            // of its blocks that count: largest exponent, and 255 - smallest in the upper half
    u32 w = m & COUNTS ? (m & 255) | (255 - (m & 255)) << 16 : 0;
    w = max2(w, __shfl_xor_sync(~0u, w, 2));
    return max2(w, __shfl_xor_sync(~0u, w, 4));
  };
  int base = 127;
  if (wide && distance <= FAR) {                         // near the lowest block, or near the highest one, where more spans lie
    int near_low = 0, near_top = 0, low_base = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const u32 w = span_of(marked_part(i));
      const int span_top = w & 255, span_low = 255 - (w >> 16);
      const bool lower = w && span_top <= low + NEAR;
      low_base = lower ? max(low_base, span_top) : low_base;
      near_low += lower, near_top += w && span_low >= top - NEAR;
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
      const u32 w = span_of(m);
      const int span_top = w & 255, span_low = 255 - (w >> 16);
      target = !w || span_top <= base && span_low >= base - NEAR ? base : span_top;
      if (lane % 8 == 0 && 32 * i + lane < PIECES) span_scales[4 * i + lane / 8][warp] = target - base + 127;
    }
    if (exists && 32 * i + lane < PIECES) *(uint4*)(to + 512 * i) = rebased(bytes, target - own, own);
  }
  if (exists && lane == 0) {
    scale[row] = wide ? -power_of_two(base) : power_of_two(top);
    spread[row] = distance;
  }
  if constexpr (SPANS) {
    if (!wide)
      for (int i = lane; i < SPAN_COUNT; i += 32) span_scales[i][warp] = 0;
    if (!__syncthreads_or(wide)) return;
    for (int i = threadIdx.x; i < SPAN_COUNT * (WARPS / 4); i += 32 * WARPS) {      // 4 rows at a time; the last ones are padding
      const int span = i / (WARPS / 4), first = i % (WARPS / 4) * 4;
      const uchar4 t = *(const uchar4*)(span_scales[span] + first);
      *(float4*)(spans + span * spans_row + row_0 + first) =
          float4{power_of_two(t.x), power_of_two(t.y), power_of_two(t.z), power_of_two(t.w)};
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, LIVE ? 3 : 0)     // 0: as ptxas likes, which spills in the walk
rebase_rows(const u8* __restrict__ q, long long q_row, const u8* __restrict__ s, long long s_row, const int* __restrict__ row_map,
            int rows, int wide_above, u8* __restrict__ out, float* __restrict__ scale, float* __restrict__ spans, long long spans_row,
            u8* __restrict__ spread, const int* __restrict__ live) {
  __shared__ SpanScales span_scales;
  if constexpr (!LIVE) {
    rebase(span_scales, blockIdx.x * WARPS, q, q_row, s, s_row, row_map, rows, wide_above, out, scale, spans, spans_row, spread);
  } else {
    const int end = min(__ldg(live), rows);
    for (int row_0 = blockIdx.x * WARPS; row_0 < end; row_0 += gridDim.x * WARPS) {
      rebase(span_scales, row_0, q, q_row, s, s_row, row_map, end, wide_above, out, scale, spans, spans_row, spread);
      __syncthreads();
    }
  }
}
