// e4m3 bytes four at a time in 32-bit words, and e8m0 exponents. Behind hopper.cuh.

// Four e4m3 bytes times f, an f16 twice in a word; rounds to nearest even, NaN becomes 0x7F.
__device__ __forceinline__ u32 shifted(u32 bytes, u32 f) {
  u32 o;
  asm("{ .reg .b16 lo, hi; .reg .b32 p, q; mov.b32 {lo, hi}, %1;"
      "cvt.rn.f16x2.e4m3x2 p, lo; cvt.rn.f16x2.e4m3x2 q, hi; mul.rn.f16x2 p, p, %2; mul.rn.f16x2 q, q, %2;"
      "cvt.rn.satfinite.e4m3x2.f16x2 lo, p; cvt.rn.satfinite.e4m3x2.f16x2 hi, q; mov.b32 %0, {lo, hi}; }"
      : "=r"(o) : "r"(bytes), "r"(f));
  return o;
}

// 2^-shift as f16, twice in a word (subnormal from 15, 0 from 25); below 0 counts as 0; NaN where the block's own exponent is 0xFF.
__device__ __forceinline__ u32 shift_factor(int shift, int exponent) {
  u32 f;
  const u32 bits = exponent == 255 ? 0x7FC00000 : (127 - min(max(shift, 0), 30)) << 23;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(f) : "f"(__uint_as_float(bits)));
  return f;
}

// The larger of two 16-bit lanes each, as signed numbers.
__device__ __forceinline__ u32 max2(u32 a, u32 b) {
  u32 o;
  asm("max.s16x2 %0, %1, %2;" : "=r"(o) : "r"(a), "r"(b));
  return o;
}

// 2^(e - 127) of an e8m0 byte 0 .. 254.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float(e ? e << 23 : 0x00400000); }
