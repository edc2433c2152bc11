// The activation of one gate and one up, and its gradients: the arithmetic of backward.cu, which a test compiles for the host.
// Include after hopper.cuh.  d is h's gradient, p d with a score p of the row.
//
//   SWIGLU      g = min(gate, LIMIT)   u = clamp(up, -LIMIT, LIMIT) + OFFSET   s = 1 / (1 + exp(-(ALPHA g)))   h = (g s) u
//               d_gate = (d u) (s (1 + (ALPHA g) (1 - s))), where an infinite ALPHA g is the largest number; d_up = d (g s); each 0 where
//               it was clamped
//   GEGLU       s = (1 + erf(gate sqrt(1/2))) / 2   h = (gate s) up   d_gate = (d up) (s + gate exp(-gate^2 / 2) / sqrt(2 pi))
//   GEGLU_TANH  s = 1 / (1 + exp(-(gate (A + B gate^2))))   h = (gate s) up   d_gate = (d up) (s (1 + n (A + 3 B n^2) (1 - s)))
//               of n = gate clamped to +-64, beyond which s is 0 or 1
//   RELU2       p = max(gate, 0)   h = p p   d_gate = 2 (d p); there is no up
//   REGLU       g = max(gate, 0)   h = g up   d_gate = d up where gate > 0, else 0   d_up = d g

constexpr int SWIGLU = 0, GEGLU = 1, GEGLU_TANH = 2, RELU2 = 3, REGLU = 4;

// Constants that the launcher puts in front.  ACTIVATION: one of these.
// EXACT: IEEE's division, the library's exp and erf, one rounding per operation.  SCORES: the row has one.  LIMIT, ALPHA, OFFSET: bits of
// float32; infinity, 1 and 0, plain SwiGLU, cost no instruction.

constexpr bool GATED = ACTIVATION != RELU2, CLAMPED = LIMIT != 0x7F800000, SCALED = ALPHA != 0x3F800000;
constexpr float HALF_ROOT = 0.70710678118654752f, NORMAL_DENSITY = 0.39894228040143268f;
constexpr float TANH_REACH = 64.0f, LARGEST = 0x1.fffffep127f;
constexpr double TANH_LINEAR = 1.5957691216057308, TANH_CUBIC = 0.044715 * TANH_LINEAR;

__device__ __forceinline__ float times(float a, float b) { return EXACT ? __fmul_rn(a, b) : a * b; }
__device__ __forceinline__ float plus(float a, float b) { return EXACT ? __fadd_rn(a, b) : a + b; }

__device__ __forceinline__ float within(float a, float most) { return a > most ? most : a < -most ? -most : a; }  // NaN stays

__device__ __forceinline__ float sigmoid(float gate) {
  if (EXACT) return __frcp_rn(__fadd_rn(1.0f, expf(-gate)));
  // Flushed values vanish when added to 1, or are below 2^-126.
  return approx_reciprocal(approx_exp2(gate * -1.44269502f) + 1.0f);
}

// The normal distribution's cumulative function, and its density.
__device__ __forceinline__ float normal_share(float gate, float& density) {
  if (EXACT) {
    density = __fmul_rn(expf(__fmul_rn(__fmul_rn(-0.5f, gate), gate)), NORMAL_DENSITY);
    return __fmul_rn(0.5f, __fadd_rn(1.0f, erff(__fmul_rn(gate, HALF_ROOT))));
  }
  // Abramowitz and Stegun, 7.1.26, less than 1e-6 from erf; its exponential is the density's.
  const float near = approx_reciprocal(1.0f + 0.3275911f * HALF_ROOT * fabsf(gate)), bell = approx_exp2(-0.72134752f * gate * gate);
  constexpr float A1 = 0.254829592 / 2, A2 = -0.284496736 / 2, A3 = 1.421413741 / 2, A4 = -1.453152027 / 2, A5 = 1.061405429 / 2;
  const float beyond = near * (A1 + near * (A2 + near * (A3 + near * (A4 + near * A5)))) * bell;
  density = bell * NORMAL_DENSITY;
  return gate < 0 ? beyond : 1.0f - beyond;
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
  if (ACTIVATION == REGLU) {
    cut_gate = gate <= 0;
    gate = cut_gate ? 0.0f : gate;
  }
  const float alpha = __int_as_float(ALPHA), inside = SCALED ? times(alpha, gate) : gate, square = times(gate, gate);
  constexpr float A = TANH_LINEAR, B = TANH_CUBIC, B3 = 3.0 * TANH_CUBIC;
  float s = 1.0f, density = 0.0f, first;                 // h = first * up
  if (ACTIVATION == SWIGLU) s = sigmoid(inside);
  if (ACTIVATION == GEGLU) s = normal_share(gate, density);
  if (ACTIVATION == GEGLU_TANH) s = sigmoid(times(gate, plus(A, times(B, square))));
  if (GATED) first = times(gate, s);
  else first = up = gate <= 0 ? 0.0f : gate;
  float d = dh[i];
  h = times(first, up);
  if (SCORES) {
    d_score = plus(d_score, times(d, h));
    d = times(score, d);
    h = times(score, h);
  }
  float slope = 1.0f;
  if (ACTIVATION == SWIGLU) {
    // Twice negated, the fused one is -0 where s is 0, as s (1 + g (1 - s)) is: a code of e4m3 has a sign, also that of zero.
    // An infinite product of a finite gate would meet the 0 of 1 - s, or of s.
    const float reach = SCALED ? within(inside, LARGEST) : inside, steep = SCALED ? times(reach, s) : first;
    slope = EXACT ? times(s, plus(1.0f, times(reach, plus(1.0f, -s)))) : -fmaf(-steep, 1.0f - s, -s);
  }
  if (ACTIVATION == GEGLU) slope = plus(s, times(gate, density));
  if (ACTIVATION == GEGLU_TANH) {
    const float near = within(gate, TANH_REACH);
    slope = times(s, plus(1.0f, times(times(near, plus(A, times(B3, times(near, near)))), plus(1.0f, -s))));
  }
  if (GATED) d_gate = cut_gate ? 0.0f : times(times(d, up), slope);
  else d_gate = times(2.0f, times(d, first));
  d_up = cut_up ? 0.0f : times(d, first);
}
