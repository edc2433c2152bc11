// Rows of MX bytes on the way to one exponent each or, where their exponents spread too far ("wide"), to one per 128 columns. Include after
// hopper.cuh and mx_bytes.cuh. Reference: rebase_reference.rebase_rows.

constexpr int NEAR = 8;                                  // how far below a wide row's base a block may lie
constexpr int FAR = 60;                                  // a row of more spread has base 2^0: no block scale may overflow

// 16 codes of a block of that exponent, times 2^-shift; a block of exponent 0xFF becomes NaN. 6 instructions rebase 4 values through
// f16x2, which is enough: e4m3 * 2^-k is exact in it down to 2^-24, far under half of e4m3's last bit (2^-10).
__device__ __forceinline__ uint4 rebased(uint4 v, int shift, int exponent) {
  const u32 f = shift_factor(shift, exponent);
  return uint4{shifted(v.x, f), shifted(v.y, f), shifted(v.z, f), shifted(v.w, f)};
}
