// One parameter's AdamW step in one pass over its memory.  Include after hopper.cuh; see reference.adamw_step.
//
// A warp takes 256 consecutive values at a time, a lane 8 of them: one block of 8-bit moments, two of 4-bit moments.
//
// A moment x of a block, divided by the block's largest magnitude, gets the nearest of its code's values without a search.  The bits of
// a float32 rise with its magnitude.  So the upper 16 bits of |x| (exponent, 7 bits of mantissa) name one of 2945 cells from 2^-23 to 1,
// and no cell has more than one border between codes.  The cell's entry in shared memory is the number that, added to |x|'s bits, gives
// the code in bits 16 to 23: the border's distance from the cell's end is in its lower half, so a carry raises the code.
//
// Constants that the launcher puts in front.  BITS: of a code, 0 for moments in the parameter's dtype.  CODE_VALUES: 2^BITS, or 0.
// PARAMETER_FLOAT, GRADIENT_FLOAT: float32, else bf16.  VECTORS: every address is a multiple of 16.  RUNS: how a shard lies in the whole
// parameter: ONE_RUN of neighbours, runs of WHOLE_LANES (starts, lengths and distances are multiples of 8), or ANY.  THREADS, MIN_BLOCKS:
// of a block, of a multiprocessor.

constexpr int ONE_RUN = 0, WHOLE_LANES = 1, ANY = 2;
constexpr int LANE = 8, WARP = 32 * LANE, BLOCK = BITS == 4 ? 128 : 256;
constexpr int LOWEST_CELL = 0x3400, CELLS = 0x3F80 - LOWEST_CELL + 1;  // the upper halves of 2^-23 and of 1
constexpr u32 LEAST_SCALE = 0x2B8CBCCC, INFINITE = 0x7F800000;         // 1e-12

struct Hyperparameters { float beta1, beta2, weight1, weight2, weight_decay, eps; };  // weight1 is 1 - beta1

__device__ __forceinline__ float approx_square_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 nearest_bf16_pair(float low, float high) {
  u32 o;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o) : "f"(high), "f"(low));
  return o;
}

// Four of the eight bytes of (low, high), by number; 8 more: the byte's upper bit eight times.
template <u32 SELECTED> __device__ __forceinline__ u32 prmt(u32 low, u32 high) {
  u32 o;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(o) : "r"(low), "r"(high), "n"(SELECTED));
  return o;
}

// A finite x / divisor, correctly rounded, with inverse = 1 / divisor.
__device__ __forceinline__ float divided(float x, float divisor, float inverse) {
  const float near = x * inverse;
  return fmaf(fmaf(-near, divisor, x), inverse, near);
}

__device__ __forceinline__ u32 hashed(u32 x) {           // reference._hash
  x = (x ^ (x >> 16)) * 0x21F0AAAD;
  x = (x ^ (x >> 15)) * 0x735A2D97;
  return x ^ (x >> 15);
}

// ---------------------------------------------------------------- the lane's 8 values from i on, of n: whole blocks of quantised moments

// Of float32 a lane takes two quads instead, of the warp's first and second 128 values: an access of the warp is then 512 neighbouring
// bytes, and not the half of each of 32 sectors, which an H200 reads and writes at 80% of a copy's speed instead of 93%.
constexpr bool QUADS = PARAMETER_FLOAT && !BITS && VECTORS;
__device__ __forceinline__ bool in_quads(u64 i, u64 n) { return QUADS && (i | (WARP - 1)) < n; }
__device__ __forceinline__ u64 quad(u64 i, int k) { return (i & ~(u64)(WARP - 1)) + i % WARP / 2 + WARP / 2 * k; }

template <bool FLOAT> __device__ __forceinline__ void load(float (&x)[LANE], const void* from, u64 i, u64 n) {
  if (in_quads(i, n)) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* to = x + 4 * k;
      if (FLOAT) {
        const float4 word = *(const float4*)((const float*)from + quad(i, k));
        to[0] = word.x, to[1] = word.y, to[2] = word.z, to[3] = word.w;
      } else {
        const uint2 word = *(const uint2*)((const unsigned short*)from + quad(i, k));
        to[0] = __uint_as_float(word.x << 16), to[1] = __uint_as_float(word.x & 0xFFFF0000);
        to[2] = __uint_as_float(word.y << 16), to[3] = __uint_as_float(word.y & 0xFFFF0000);
      }
    }
  } else if (VECTORS && (BITS || i + LANE <= n)) {
    if (FLOAT) {
      const float4* words = (const float4*)((const float*)from + i);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float4 word = words[k];
        x[4 * k] = word.x, x[4 * k + 1] = word.y, x[4 * k + 2] = word.z, x[4 * k + 3] = word.w;
      }
    } else {
      const uint4 word = *(const uint4*)((const unsigned short*)from + i);
      const u32 pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) x[2 * k] = __uint_as_float(pairs[k] << 16), x[2 * k + 1] = __uint_as_float(pairs[k] & 0xFFFF0000);
    }
  } else {
#pragma unroll
    for (int k = 0; k < LANE; ++k) {
      x[k] = 0;
      if (i + k < n) x[k] = FLOAT ? ((const float*)from)[i + k] : __uint_as_float((u32)((const unsigned short*)from)[i + k] << 16);
    }
  }
}

// bf16 as pairs in words, rounded already.
__device__ __forceinline__ void store_pairs(const u32 (&pairs)[LANE / 2], void* to, u64 i, u64 n) {
  if (VECTORS && (BITS || i + LANE <= n)) {
    *(uint4*)((unsigned short*)to + i) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
#pragma unroll
    for (int k = 0; k < LANE; ++k)
      if (i + k < n) ((unsigned short*)to)[i + k] = (unsigned short)(pairs[k / 2] >> (k & 1) * 16);
  }
}

template <bool FLOAT> __device__ __forceinline__ void store(const float (&x)[LANE], void* to, u64 i, u64 n) {
  if (!FLOAT) {
    u32 pairs[LANE / 2];
#pragma unroll
    for (int k = 0; k < LANE / 2; ++k) pairs[k] = nearest_bf16_pair(x[2 * k], x[2 * k + 1]);
    store_pairs(pairs, to, i, n);
  } else if (in_quads(i, n)) {
#pragma unroll
    for (int k = 0; k < 2; ++k) *(float4*)((float*)to + quad(i, k)) = make_float4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]);
  } else if (VECTORS && (BITS || i + LANE <= n)) {
    float4* words = (float4*)((float*)to + i);
    words[0] = make_float4(x[0], x[1], x[2], x[3]);
    words[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int k = 0; k < LANE; ++k)
      if (i + k < n) ((float*)to)[i + k] = x[k];
  }
}

// ---------------------------------------------------------------- quantised moments

struct Codes { u32 words[BITS == 8 ? 2 : 1]; };          // of 8 values; of two 4-bit codes in a byte the upper one comes first

__device__ __forceinline__ Codes load_codes(const void* from, u64 i) {
  Codes codes;
  if (BITS == 8) {
    const uint2 word = *(const uint2*)((const u8*)from + i);
    codes.words[0] = word.x, codes.words[BITS == 8] = word.y;
  } else {
    codes.words[0] = *(const u32*)((const u8*)from + i / 2);
  }
  return codes;
}

__device__ __forceinline__ void store_codes(const Codes& codes, void* to, u64 i) {
  if (BITS == 8) *(uint2*)((u8*)to + i) = make_uint2(codes.words[0], codes.words[BITS == 8]);
  else *(u32*)((u8*)to + i / 2) = codes.words[0];
}

__device__ __forceinline__ void dequantize(float (&x)[LANE], const Codes& codes, float scale, const float* values) {
#pragma unroll
  for (int k = 0; k < LANE; ++k) {
    const u32 code = BITS == 8 ? codes.words[k / 4 * (BITS == 8)] >> k % 4 * 8 & 255 : codes.words[0] >> (k ^ 1) * 4 & 15;
    x[k] = values[code] * scale;
  }
}

// The codes of a block, of which this lane has 8 moments, and its scale; x is lost.
template <bool SIGNED> __device__ __forceinline__ Codes quantize(float (&x)[LANE], float& scale, const u32* cells, u32 lanes) {
  u32 most = LEAST_SCALE;
#pragma unroll
  for (int k = 0; k < LANE; ++k) most = max(most, __float_as_uint(x[k]) & 0x7FFFFFFF);
  most = __reduce_max_sync(lanes, most);
  scale = __uint_as_float(most);                         // NaN if a moment is
  float divisor = scale;
  if (most >= INFINITE) {                                // the ratios are zeros and NaN, whose code is 0: that of -1, or of 0 without signs
    divisor = 1;
#pragma unroll
    for (int k = 0; k < LANE; ++k) x[k] = SIGNED && !(fabsf(x[k]) < scale) ? -1 : 0;
  }
  const float inverse = __frcp_rn(divisor);
  u32 ratios[LANE], sums[LANE];
#pragma unroll
  for (int k = 0; k < LANE; ++k) {
    const float ratio = divided(x[k], divisor, inverse);
    const u32 bits = __float_as_uint(fmaxf(fabsf(ratio), 0x1p-23f)), cell = bits >> 16;
    ratios[k] = __float_as_uint(ratio);
    sums[k] = bits + cells[SIGNED ? __funnelshift_l(ratios[k], cell, 1) - 2 * LOWEST_CELL : cell - LOWEST_CELL];
  }
  Codes codes;
  if (BITS == 8) {
#pragma unroll
    for (int k = 0; k < LANE; k += 4) {
      u32 four = prmt<0x5410>(prmt<0x62>(sums[k], sums[k + 1]), prmt<0x62>(sums[k + 2], sums[k + 3]));
      if (SIGNED) four ^= prmt<0x5410>(prmt<0xFB>(ratios[k], ratios[k + 1]), prmt<0xFB>(ratios[k + 2], ratios[k + 3]));
      codes.words[k / 4 * (BITS == 8)] = four;
    }
  } else {
    codes.words[0] = 0;
#pragma unroll
    for (int k = 0; k < LANE; ++k) codes.words[0] |= ((sums[k] >> 16 ^ (SIGNED ? (int)ratios[k] >> 31 : 0)) & 15) << (k ^ 1) * 4;
  }
  return codes;
}

// ---------------------------------------------------------------- stochastic rounding

struct Runs { u64 first, run; u32 skip; };               // of the positions that a shard has: see the launcher

// The upper half of p's bits plus 16 random ones; of a number that is not finite as it is.
__device__ __forceinline__ u32 rounded(float p, u32 random) {
  return __float_as_uint(p) + (fabsf(p) < __uint_as_float(INFINITE) ? random : 0);
}

// One hash has the random bits of two neighbours.
__device__ __forceinline__ void store_stochastically(const float (&p)[LANE], void* to, u64 i, u64 n, const Runs& runs, u32 key) {
  u32 pairs[LANE / 2];
  if (RUNS == ANY) {
    const u64 run = i / runs.run;
    u64 left = (run + 1) * runs.run - i;                 // of this run
    u32 position = (u32)(runs.first + i) + (u32)run * runs.skip, sums[LANE];
#pragma unroll
    for (int k = 0; k < LANE; ++k, ++position) {
      if (left-- == 0) left = runs.run - 1, position += runs.skip;
      sums[k] = rounded(p[k], hashed(hashed(position >> 1) ^ key) >> (position & 1) * 16 & 0xFFFF);
    }
#pragma unroll
    for (int k = 0; k < LANE / 2; ++k) pairs[k] = prmt<0x7632>(sums[2 * k], sums[2 * k + 1]);
  } else {
    const u32 run = RUNS == ONE_RUN ? 0 : (u32)(i / LANE) / (u32)(runs.run / LANE);
    const u32 position = (u32)(runs.first + i) + run * runs.skip;
#pragma unroll
    for (int k = 0; k < LANE / 2; ++k) {
      const u32 random = hashed(hashed((position >> 1) + k) ^ key);
      pairs[k] = prmt<0x7632>(rounded(p[2 * k], random & 0xFFFF), rounded(p[2 * k + 1], random >> 16));
    }
  }
  store_pairs(pairs, to, i, n);
}

// ----------------------------------------------------------------

// parameter, gradient (n,); moments (n,) in the parameter's dtype, or codes and a scale for each block; step, lr, grad_scale, found_inf (),
// the last two also null; values (2, CODE_VALUES) and cells (3 * CELLS,) of codes: of exp_avg at both signs by turns, of exp_avg_sq.
// partial_squares (blocks,) or null: each block's sum of the gradient's squares.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
adamw_step(void* __restrict__ parameter, const void* __restrict__ gradient, void* __restrict__ exp_avg, void* __restrict__ exp_avg_sq,
           float* __restrict__ exp_avg_scale, float* __restrict__ exp_avg_sq_scale, const float* __restrict__ step,
           const float* __restrict__ lr, const float* __restrict__ grad_scale, const float* __restrict__ found_inf,
           const float* __restrict__ values, const u32* __restrict__ cells, u64 n, Runs runs, u32 key, Hyperparameters given,
           float* __restrict__ partial_squares) {
  extern __shared__ u32 tables[];                        // (3 * CELLS,), (2, CODE_VALUES) of float
  __shared__ float corrections[2], warp_squares[THREADS / 32];
  if (found_inf && *found_inf > 0) return;
  const u32 tid = threadIdx.x, lane = tid % 32;
  const float now = *step + 1;
  if (tid < 2) corrections[tid] = 1 - (float)pow((double)(tid ? given.beta2 : given.beta1), (double)now);
  float* const known = (float*)(tables + 3 * CELLS);
  if (BITS) {
    for (int t = tid; t < 3 * CELLS; t += THREADS) tables[t] = cells[t];
    for (int t = tid; t < 2 * CODE_VALUES; t += THREADS) known[t] = values[t];
  }
  __syncthreads();
  const float divisor = grad_scale ? *grad_scale : 1, inverse = __frcp_rn(divisor);
  const float rate = *lr, decay = rate * given.weight_decay, pace = rate / corrections[0], correction = 1 / sqrtf(corrections[1]);
  const u32 step_key = hashed(key + (u32)(long long)now);
  const u32 lanes = BITS == 4 ? 0xFFFFu << (lane & 16) : ~0u;
  float squares = 0;

  for (u64 base = ((u64)blockIdx.x * THREADS + tid - lane) * LANE; base < n; base += (u64)gridDim.x * THREADS * LANE) {
    const u64 i = base + lane * LANE;
    const bool here = BITS != 4 || i < n;                // of a warp's two blocks of 4-bit moments one may be past the end
    const u64 at = here ? i : base, block = at / BLOCK;
    float p[LANE], g[LANE], m[LANE], v[LANE];
    load<PARAMETER_FLOAT>(p, parameter, at, n);
    load<GRADIENT_FLOAT>(g, gradient, at, n);
    if (BITS) {
      const Codes first = load_codes(exp_avg, at), second = load_codes(exp_avg_sq, at);
      const float first_scale = exp_avg_scale[block], second_scale = exp_avg_sq_scale[block];
      dequantize(m, first, first_scale, known);
      dequantize(v, second, second_scale, known + CODE_VALUES);
    } else {
      load<PARAMETER_FLOAT>(m, exp_avg, i, n);
      load<PARAMETER_FLOAT>(v, exp_avg_sq, i, n);
    }
    if (here) {
#pragma unroll
      for (int k = 0; k < LANE; ++k) squares = fmaf(g[k], g[k], squares);
    }
    if (divisor != 1) {
#pragma unroll
      for (int k = 0; k < LANE; ++k)
        if (fabsf(g[k]) < __uint_as_float(INFINITE)) g[k] = divided(g[k], divisor, inverse);
    }
#pragma unroll
    for (int k = 0; k < LANE; ++k) {
      m[k] = fmaf(given.weight1, g[k] - m[k], m[k]);
      v[k] = fmaf(given.weight2, __fmul_rn(g[k], g[k]) - v[k], v[k]);
      const float size = fmaf(approx_square_root(v[k]), correction, given.eps);
      p[k] = fmaf(-pace * m[k], approx_reciprocal(size), fmaf(-decay, p[k], p[k]));
    }
    if (here) {
      if (PARAMETER_FLOAT) store<true>(p, parameter, i, n);
      else store_stochastically(p, parameter, i, n, runs, step_key);
    }
    if (BITS) {
      float first_scale, second_scale;
      const Codes first = quantize<true>(m, first_scale, tables, lanes);
      const Codes second = quantize<false>(v, second_scale, tables + 2 * CELLS, lanes);
      if (here) {
        store_codes(first, exp_avg, i);
        store_codes(second, exp_avg_sq, i);
        if (i % BLOCK == 0) exp_avg_scale[block] = first_scale, exp_avg_sq_scale[block] = second_scale;
      }
    } else {
      store<PARAMETER_FLOAT>(m, exp_avg, i, n);
      store<PARAMETER_FLOAT>(v, exp_avg_sq, i, n);
    }
  }
  if (partial_squares) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    if (lane == 0) warp_squares[tid / 32] = squares;
    __syncthreads();
    if (tid == 0) {
      for (int warp = 1; warp < THREADS / 32; ++warp) squares += warp_squares[warp];
      partial_squares[blockIdx.x] = squares;
    }
  }
}

// After it, on one warp: the blocks of one launch read what this changes.  Adds their squares in a fixed order.
extern "C" __global__ void adamw_count_step(float* __restrict__ step, const float* __restrict__ found_inf,
                                            const float* __restrict__ partial_squares, double* __restrict__ squares, int blocks) {
  if (found_inf && *found_inf > 0) return;
  const int lane = threadIdx.x;
  if (squares) {
    double sum = 0;
    for (int block = lane; block < blocks; block += 32) sum += partial_squares[block];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) *squares += sum;
  }
  if (lane == 0) *step += 1;
}
