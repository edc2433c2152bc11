// Eight neighbouring columns of an activation: loads of x and dh, values and gradients, MX scales that four lanes make together, and
// stores.
// Include after hopper.cuh, mx_bytes.cuh, quantize/eight_columns.cuh and functions.cuh.
//
//   scales    the lanes share the blocks of dx and h among them: each finishes one maximum and makes one scale of it, which
//             costs a third of the exchange and of the arithmetic for all in each

// Constants that the launcher puts in front, besides those of eight_columns.cuh, whose WIDE is of x and dh.
// H: columns of h.  X_FLOAT, DH_FLOAT: float32, else bf16.  X_MX: x is MX, and X_FLOAT says what dx and h are.

// Without a gate x and dx have H columns and one part, and INTERLEAVED is false.
constexpr int ROW_LANES = H / 8, BLOCKS = H / 32, PARTS = GATED ? 2 : 1, WIDTH = PARTS * H, X_BLOCKS = PARTS * BLOCKS;

// ---------------------------------------------------------------- eight columns in memory

// Eight columns of x: gates and ups from one place, or from two; without a gate the second part is the first.
template <bool FLOAT> struct Pairs {
  Eight<FLOAT> part[PARTS];
  __device__ __forceinline__ float gate(int i) const { return INTERLEAVED ? part[i / 4][i % 4 * 2] : part[0][i]; }
  __device__ __forceinline__ float up(int i) const { return INTERLEAVED ? part[i / 4][i % 4 * 2 + 1] : part[PARTS - 1][i]; }
};
constexpr int APART = INTERLEAVED ? 8 : H;               // values between the two parts
template <bool FLOAT> __device__ __forceinline__ Pairs<FLOAT> load_pairs(const u8* at) {
  if constexpr (GATED) return {load<FLOAT>(at), load<FLOAT>(at + APART * (FLOAT ? 4 : 2))};
  else return {load<FLOAT>(at)};
}

// Gates and ups as floats.
struct Floats {
  float gates[8], ups[8];
  __device__ __forceinline__ float gate(int i) const { return gates[i]; }
  __device__ __forceinline__ float up(int i) const { return ups[i]; }
};

// The same columns of an MX x: codes, and the exponents of the blocks that they are in.
struct Codes { uint2 part[PARTS]; u32 exponent[PARTS]; };
__device__ __forceinline__ Codes load_codes(const u8* at, const u8* scales) {
  const u32 first = __ldg(scales);
  if constexpr (GATED)
    return {{__ldg((const uint2*)at), __ldg((const uint2*)(at + APART))}, {first, INTERLEAVED ? first : __ldg(scales + BLOCKS)}};
  else
    return {{__ldg((const uint2*)at)}, {first}};
}
__device__ __forceinline__ Floats values_of(const Codes& x) {
  float v[PARTS][8];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const float scale = x.exponent[i] == 255 ? __uint_as_float(0x7FC00000) : power_of_two(x.exponent[i]);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k % 4 == 0) unpack4(k ? x.part[i].y : x.part[i].x, v[i] + k);
      v[i][k] *= scale;
    }
  }
  Floats o;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    o.gates[i] = INTERLEAVED ? v[i / 4][i % 4 * 2] : v[0][i];
    o.ups[i] = INTERLEAVED ? v[i / 4][i % 4 * 2 + 1] : v[PARTS - 1][i];
  }
  return o;
}
template <bool FLOAT> __device__ __forceinline__ const Pairs<FLOAT>& values_of(const Pairs<FLOAT>& x) { return x; }

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 o;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o) : "f"(high), "f"(low));
  return o;
}
__device__ __forceinline__ void store(u8* at, const float (&v)[8]) {       // in x's dtype
  if (X_FLOAT) {
    ((float4*)at)[0] = float4{v[0], v[1], v[2], v[3]};
    ((float4*)at)[1] = float4{v[4], v[5], v[6], v[7]};
  } else {
    *(uint4*)at = uint4{bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7])};
  }
}

// ---------------------------------------------------------------- scales

// Factors of this lane's blocks; the exponent of the block that this lane stores (`role_of`), and whether the block has a code that is
// neither zero nor NaN.
struct Scales { float first, second, h; u32 exponent; bool counts; };

// From a lane's largest magnitudes of the two parts of dx and of h, four lanes of `quarter` 0 .. 3 together.
// The roles: concatenated gate, up, h, h; interleaved, where two lanes are a block of dx, dx, h, dx, h; without a gate the same, with
// all four lanes for a block of dx.
__device__ __forceinline__ Scales scales_of(float first, float second, float h, u32 quarter) {
  const bool odd = quarter % 2, upper = quarter / 2;
  float mine;
  if (INTERLEAVED || !GATED) {
    const float dx = GATED ? larger(first, second) : first;
    mine = larger(odd ? h : dx, __shfl_xor_sync(ALL, odd ? dx : h, 1));
    const float other = __shfl_xor_sync(ALL, mine, 2);
    mine = odd || !GATED ? larger(mine, other) : mine;
  } else {
    const float a = larger(upper ? h : first, __shfl_xor_sync(ALL, upper ? first : h, 2));
    const float whole = larger(second, __shfl_xor_sync(ALL, second, 2)), b = upper ? a : whole;
    mine = larger(odd ? b : a, __shfl_xor_sync(ALL, odd ? a : b, 1));
  }
  const BlockScale own = block_scale<SCALING>(__float_as_uint(mine));
  const float factor = __uint_as_float(own.factor);
  const bool counts = counts_in(mine, factor);
  if (INTERLEAVED || !GATED) {
    const float other = __shfl_xor_sync(ALL, factor, 1), dx = odd ? other : factor;
    return {dx, dx, odd ? factor : other, own.exponent, counts};
  }
  return {__shfl_sync(ALL, factor, 0, 4), __shfl_sync(ALL, factor, 1, 4), __shfl_sync(ALL, factor, 2, 4), own.exponent, counts};
}

// Of h alone: the same in all four lanes.
__device__ __forceinline__ Scales scale_of_h(float h) {
  const FourLaneScale s = scale_of_block(h);
  return {s.factor, s.factor, s.factor, s.exponent, s.counts};
}

// What the lane of that quarter has the exponent of: `block` of a row of dx or of h; nothing where it is not its own, see above.
struct Role { bool own, of_h; u32 block; };
__device__ __forceinline__ Role role_of(u32 column, u32 quarter) {
  const bool of_h = INTERLEAVED || !GATED ? quarter == 1 : quarter == 2;
  const u32 half = INTERLEAVED || !GATED || quarter != 1 ? 0 : BLOCKS;
  return {quarter != 3 && (GATED || quarter != 2), of_h, (INTERLEAVED && !of_h ? column / 16 : column / 32) + half};
}

// ---------------------------------------------------------------- one row

struct Values { float dx[PARTS][8], h[8], d_score; };    // dx in the layout of x: eight gates and eight ups, or pairs
template <class GateUp> __device__ __forceinline__ Values gradients(const GateUp& pair, const Eight<DH_FLOAT>& dh, float score) {
  Values v;
  v.d_score = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float d_gate, d_up;
    value_of(pair.gate(i), pair.up(i), dh, i, score, v.h[i], d_gate, d_up, v.d_score);
    if (INTERLEAVED) v.dx[i / 4][i % 4 * 2] = d_gate, v.dx[i / 4][i % 4 * 2 + 1] = d_up;
    else if (GATED) v.dx[0][i] = d_gate, v.dx[PARTS - 1][i] = d_up;
    else v.dx[0][i] = d_gate;
  }
  return v;
}
