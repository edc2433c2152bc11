// e4m3 bytes four at a time in 32-bit words, and e8m0 exponents. Include after hopper.cuh.

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

// Four float32 -> four e4m3 bytes, to nearest even; beyond 448 becomes 448, NaN 0x7F.
__device__ __forceinline__ u32 pack4(u32 a, u32 b, u32 c, u32 d) {
  u32 o;
  asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
      : "=r"(o) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)), "f"(__uint_as_float(c)), "f"(__uint_as_float(d)));
  return o;
}

// Four e4m3 bytes -> four float32, exactly.
__device__ __forceinline__ void unpack4(u32 bytes, float* to) {
  asm("{ .reg .b16 a, b; .reg .b32 p, q; mov.b32 {a, b}, %4; cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b;"
      "mov.b32 {a, b}, p; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; mov.b32 {a, b}, q; cvt.f32.f16 %2, a; cvt.f32.f16 %3, b; }"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(bytes));
}

// From the float32 bits of a block's largest magnitude (NaN > Inf > numbers): its e8m0, which is the exponent - 8, RCEIL one more above
// mantissa 1.75, and what brings the block to e4m3's range, as float32 bits: for exponent 0 as in the reference, NaN for a bad block.
// At 1.75 * 2^-119 and one bit the quotient of RCEIL's definition rounds down to a power of two: still exponent 0.
constexpr int FLOOR = 0, RCEIL = 1;                      // option SCALING: as mxep.recipe.ScaleCalculationMode lists them
struct BlockScale { u32 exponent, factor; };
template <int MODE> __device__ __forceinline__ BlockScale block_scale(u32 largest) {
  static_assert(MODE == FLOOR || MODE == RCEIL, "block_scale: no such scaling mode");
  const int exponent = int((largest + (MODE == RCEIL ? 0x1FFFFF : 0)) >> 23) - 8;
  const u32 factor = 0x7F000000 - exponent * 0x800000;   // 2^(127 - exponent)
  const bool bad = largest >= 0x7F800000, least = largest < (MODE == RCEIL ? 0x04600002 : 0x04800000);
  return {u32(bad ? 255 : least ? 0 : exponent), bad ? 0x7FC00000 : least ? (MODE == RCEIL ? 0x3F800000 : 0x7E800000) : factor};
}
