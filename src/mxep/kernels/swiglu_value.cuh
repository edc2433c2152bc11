// SwiGLU of one gate and one up, and its gradients: the arithmetic of swiglu_backward.cu, which a test compiles for the host.
//
//   g = min(gate, LIMIT)   u = clamp(up, -LIMIT, LIMIT) + OFFSET   s = 1 / (1 + exp(-(ALPHA g)))   h = (g s) u
//   d_gate = (d u) (s (1 + (ALPHA g) (1 - s)))   d_up = d (g s), each 0 where it was clamped; with a score p of the row, p d for d

#ifndef OPTIONS
constexpr bool EXACT = false, SCORES = false;
constexpr int LIMIT = 0x7F800000, ALPHA = 0x3F800000, OFFSET = 0;
#endif
// EXACT: IEEE's division, the library's exp, one rounding per operation.  SCORES: the row has one.  LIMIT, ALPHA, OFFSET: bits of
// float32; infinity, 1 and 0, plain SwiGLU, cost no instruction.

constexpr bool CLAMPED = LIMIT != 0x7F800000, SCALED = ALPHA != 0x3F800000;

__device__ __forceinline__ float times(float a, float b) { return EXACT ? __fmul_rn(a, b) : a * b; }
__device__ __forceinline__ float plus(float a, float b) { return EXACT ? __fadd_rn(a, b) : a + b; }

__device__ __forceinline__ float sigmoid(float gate) {
  if (EXACT) return __frcp_rn(__fadd_rn(1.0f, expf(-gate)));
  float s;                                               // what is flushed does not show beside 1, or is below 2^-126
  asm("{ .reg .f32 t; mul.f32 t, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 %0, t; }"
      : "=f"(s) : "f"(gate));
  return s;
}

// dh[i]: h's gradient.  d_score: the gradient of the row's score, to which this h adds its part.
template <class Row>
__device__ __forceinline__ void value_of(float gate, float up, const Row& dh, int i, float score, float& h, float& d_gate, float& d_up,
                                         float& d_score) {
  bool cut_gate = false, cut_up = false;                 // NaN is not
  if (CLAMPED) {
    const float limit = __int_as_float(LIMIT);
    cut_gate = gate > limit, cut_up = fabsf(up) > limit;
    gate = cut_gate ? limit : gate;
    up = cut_up ? copysignf(limit, up) : up;
  }
  if (OFFSET != 0) up = plus(up, __int_as_float(OFFSET));
  const float alpha = __int_as_float(ALPHA), inside = SCALED ? times(alpha, gate) : gate;
  const float s = sigmoid(inside), silu = times(gate, s);
  float d = dh[i];
  h = times(silu, up);
  if (SCORES) {
    d_score = plus(d_score, times(d, h));
    d = times(score, d);
    h = times(score, h);
  }
  // Twice negated, the fused one is -0 where s is 0, as s (1 + g (1 - s)) is: a code of e4m3 has a sign, also that of zero.
  const float steep = SCALED ? times(alpha, silu) : silu;
  const float slope = EXACT ? times(s, plus(1.0f, times(inside, plus(1.0f, -s)))) : -fmaf(-steep, 1.0f - s, -s);
  d_gate = cut_gate ? 0.0f : times(times(d, up), slope);
  d_up = cut_up ? 0.0f : times(d, silu);
}
