// Eight neighbouring columns of a row for each lane, four lanes an MX block: loads, codes, and the scale of the block.
// Include after hopper.cuh and mx_bytes.cuh.
//
// Maxima are those of the values as floats with their signs dropped, NaN above all: half of what integers take.

// Constants that the launcher puts in front.  SCALING: the scaling mode.  WIDE: every row starts at a multiple of 16 bytes.

constexpr u32 ALL = ~0u;

// The larger magnitude, NaN where one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
  float o;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(o) : "f"(fabsf(a)), "f"(fabsf(b)));
  return o;
}
__device__ __forceinline__ float largest(const float (&v)[8]) {
  return larger(larger(larger(v[0], v[1]), larger(v[2], v[3])), larger(larger(v[4], v[5]), larger(v[6], v[7])));
}

template <bool FLOAT> struct Eight {
  u32 words[FLOAT ? 8 : 4];
  __device__ __forceinline__ float operator[](int i) const {
    if (FLOAT) return __uint_as_float(words[i]);
    return __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
  }
};

template <bool FLOAT> __device__ __forceinline__ Eight<FLOAT> load(const u8* at) {
  Eight<FLOAT> v;
#pragma unroll
  for (int i = 0; i < (FLOAT ? 8 : 4); i += WIDE ? 4 : 1) {
    u32* w = v.words + i;
    if (WIDE)
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(at + 4 * i));
    else if (FLOAT)
      *w = __ldg((const u32*)at + i);
    else
      *w = __ldg((const unsigned short*)at + 2 * i) | __ldg((const unsigned short*)at + 2 * i + 1) << 16;
  }
  return v;
}

__device__ __forceinline__ uint2 codes(const float (&v)[8], float factor) {
  u32 w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = __float_as_uint(v[i] * factor);
  return uint2{pack4(w[0], w[1], w[2], w[3]), pack4(w[4], w[5], w[6], w[7])};
}

// Whether the largest magnitude of a block has a code that is neither zero nor NaN: half of e4m3's least number rounds to zero.
__device__ __forceinline__ bool counts_in(float largest, float factor) { return largest * factor > 0x1p-10f; }

// Of a block of 32, by the largest magnitudes of its four lanes: the same in all of them.
struct FourLaneScale { float factor; u32 exponent; bool counts; };
__device__ __forceinline__ FourLaneScale scale_of_block(float largest) {
  const float half = larger(largest, __shfl_xor_sync(ALL, largest, 1)), whole = larger(half, __shfl_xor_sync(ALL, half, 2));
  const BlockScale scale = block_scale<SCALING>(__float_as_uint(whole));
  const float factor = __uint_as_float(scale.factor);
  return {factor, scale.exponent, counts_in(whole, factor)};
}
