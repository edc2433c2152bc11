// Exponents for the operands of a wgrad sum_t g_t x_t: one per group and 32 columns, found from the scales alone.
// Behind hopper.cuh and mx_bytes.cuh; the twin is reference.rebase_tokens.
//
// The sum runs over tokens t. x_t = X_t 2^a, g_t = G_t 2^b, and only a + b matters: each token's exponent c_t, the largest of x's
// blocks, moves from x to g. Then x's blocks keep own = s - c_t + 254, g's have own = s + c_t (both biased by 254), and the largest
// own of a group's tokens is the group's exponent of those 32 columns. Blocks with scale byte 0 (all zero) or 0xFF (NaN)
// take no part in a maximum; neither do g's blocks of tokens whose x has no block that does.
//
//   token_plan      where every 128 output tokens come from, where groups end, the groups by size; clears the tables
//   token_maxima    scales only: c_t of every token, the tables of maxima (G, D/32) of x and of g
// Output tokens: every group starts at a multiple of 128 and is padded with zeros; an empty group has none.

#ifndef OPTIONS
constexpr int D_X = 7168, D_G = 2048;
constexpr bool WORDS_X = true, WORDS_G = true;
#endif
// D_X, D_G: widths, multiples of 32.  WORDS: a token's scales can be read 4 at a time.

// ---------------------------------------------------------------- token_plan

extern "C" __global__ void __launch_bounds__(1024)
token_plan(const int* __restrict__ offs, int groups, int rows, int tile_count, int4* __restrict__ tiles, int* ends,
           int* __restrict__ order, int* __restrict__ tables, long long table_words) {
  auto end_of = [&](int g) { return g < 0 ? 0 : min(max(offs[g], 0), rows); };
  auto tokens = [&](int g) { return max(end_of(g) - end_of(g - 1), 0); };
  const long long me = (long long)blockIdx.x * 1024 + threadIdx.x, all = (long long)gridDim.x * 1024;
  for (long long i = me; i < table_words; i += all) tables[i] = 0;
  for (long long g = me; g < groups; g += all) {
    const int mine = tokens(g);
    int rank = 0;                                        // groups with more tokens, or with as many and listed before
    for (int o = 0; o < groups; ++o) rank += tokens(o) > mine || (tokens(o) == mine && o < g);
    order[rank] = g;
  }
  if (blockIdx.x) return;
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (groups + 1023) / 1024, first = threadIdx.x * each;
  int sum = 0;
  for (int g = first; g < min(first + each, groups); ++g) sum += (tokens(g) + 127) / 128;
  int before = sum;                                      // inclusive scan over the warp, then over the warps
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  for (int g = first; g < min(first + each, groups); ++g) before += (tokens(g) + 127) / 128, ends[g] = 128 * before;
  __syncthreads();
  for (int tile = threadIdx.x; tile < tile_count; tile += 1024) {     // {first row, rows, group, first tile of its group}; rows < 0: none
    int low = 0, high = groups;                          // the first group that ends behind this tile's start
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > 128 * tile) high = middle;
      else low = middle + 1;
    }
    const int begun = low ? ends[low - 1] : 0, local = 128 * tile - begun;
    tiles[tile] = low == groups ? int4{0, -1, 0, 0} : int4{end_of(low - 1) + local, min(128, tokens(low) - local), low, local == 0};
  }
}

// ---------------------------------------------------------------- token_maxima
// A block of threads per 128 output tokens. Its scales lie in shared memory, each word of 4 as two words of 16-bit lanes in which a
// block that does not count is negative; 4 threads find each token's c, then one thread per word and set of tokens the maxima: one
// addition and one max per two blocks. Wide rows come in chunks of 64 words.

__device__ __forceinline__ u32 max2(u32 a, u32 b) {
  u32 o;
  asm("max.s16x2 %0, %1, %2;" : "=r"(o) : "r"(a), "r"(b));
  return o;
}

__device__ __forceinline__ uint2 as_lanes(u32 w) {       // bytes 0, 2 and bytes 1, 3; bytes 0 and 255 negative
  const u32 a = w & 0x7F7F7F7F, t = a + 0x01010101, u = a + 0x7F7F7F7F;   // top bit of t & w: the byte is 255; of u | w: it is not 0
  const u32 none = (t & w) | ~(u | w);
  return uint2{(w & 0x00FF00FF) | (none << 8 & 0x80008000), __byte_perm(w, 0, 0x4341) | (none & 0x80008000)};
}

constexpr u32 SKIP = 0xFFFFFFFF;
constexpr int MOST_WORDS = 64, THREADS = 512;

template <int D, bool ALIGNED> struct Scales {           // of one operand: (rows, D / 32) bytes
  static constexpr int BLOCKS = D / 32, WORDS = (BLOCKS + 3) / 4, CHUNK = WORDS < MOST_WORDS ? WORDS : MOST_WORDS;
  static constexpr int CHUNKS = (WORDS + CHUNK - 1) / CHUNK, EACH = (128 * CHUNK + THREADS - 1) / THREADS;
  static constexpr int SETS = THREADS / CHUNK;           // threads that share a word, each with its own tokens

  __device__ static __forceinline__ void load(u32 (&w)[EACH], const u8* s, long long s_row, int row, int rows, int chunk) {
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int i = k * THREADS + threadIdx.x, word = chunk * CHUNK + i % CHUNK;
      const u8* at = s + (long long)(row + i / CHUNK) * s_row + 4 * word;
      w[k] = 0;
      if (i / CHUNK >= rows || word >= WORDS) continue;
      if constexpr (ALIGNED) {
        w[k] = __ldg((const u32*)at);
      } else {
#pragma unroll
        for (int b = 0; b < 4; ++b)
          if (4 * word + b < BLOCKS) w[k] |= (u32)__ldg(at + b) << 8 * b;
      }
    }
  }
  __device__ static __forceinline__ void stage(const u32 (&w)[EACH], uint2* z) {
#pragma unroll
    for (int k = 0; k < EACH; ++k)
      if (k * THREADS + (int)threadIdx.x < 128 * CHUNK) z[k * THREADS + threadIdx.x] = as_lanes(w[k]);
  }
  // Maxima over the staged tokens of block exponent + add[token], into best and from there into the table's row.
  __device__ static __forceinline__ void maxima(const uint2* z, const u32* add, int* best, int* table, int chunk) {
    for (int i = threadIdx.x; i < 4 * CHUNK; i += THREADS) best[i] = 0;
    __syncthreads();
    const int word = threadIdx.x % CHUNK, set = threadIdx.x / CHUNK;
    if (set < SETS) {
      u32 even = 0, odd = 0;
#pragma unroll
      for (int k = 0; k < (127 + SETS) / SETS; ++k) {
        const int r = k * SETS + set;
        if (128 % SETS && r >= 128) break;
        const u32 c = add[r];
        const uint2 v = z[r * CHUNK + word];
        if (c == SKIP) continue;
        even = max2(even, v.x + c);
        odd = max2(odd, v.y + c);
      }
      if (even & 0xFFFF) atomicMax(best + word * 4, even & 0xFFFF);
      if (odd & 0xFFFF) atomicMax(best + word * 4 + 1, odd & 0xFFFF);
      if (even >> 16) atomicMax(best + word * 4 + 2, even >> 16);
      if (odd >> 16) atomicMax(best + word * 4 + 3, odd >> 16);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * CHUNK; i += THREADS)
      if (best[i] && chunk * 4 * CHUNK + i < BLOCKS) atomicMax(table + chunk * 4 * CHUNK + i, best[i]);
    __syncthreads();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
token_maxima(const u8* __restrict__ sx, long long sx_row, const u8* __restrict__ sg, long long sg_row, const int4* __restrict__ tiles,
             u8* __restrict__ token_exponent, int* __restrict__ max_x, int* __restrict__ max_g) {
  using X = Scales<D_X, WORDS_X>;
  using G = Scales<D_G, WORDS_G>;
  extern __shared__ uint2 z[];                           // [128][CHUNK] of x, later of g
  __shared__ int best[4 * (X::CHUNK > G::CHUNK ? X::CHUNK : G::CHUNK)];
  __shared__ u32 add_x[128], add_g[128];
  const int4 tile = __ldg(tiles + blockIdx.x);
  const int row = tile.x, rows = tile.y, group = tile.z;
  if (rows < 0) return;
  u32 x[X::EACH], g[G::EACH];
  X::load(x, sx, sx_row, row, rows, 0);
  G::load(g, sg, sg_row, row, rows, 0);                  // early, so that it arrives meanwhile
  const int token = threadIdx.x / 4;
  u32 m = 0;
  for (int chunk = 0; chunk < X::CHUNKS; ++chunk) {
    if (chunk) __syncthreads(), X::load(x, sx, sx_row, row, rows, chunk);
    X::stage(x, z);
    __syncthreads();
    for (int w = threadIdx.x % 4; w < X::CHUNK; w += 4) m = max2(m, max2(z[token * X::CHUNK + w].x, z[token * X::CHUNK + w].y));
  }
  m = max(m & 0xFFFF, m >> 16);
  m = max(m, __shfl_xor_sync(~0u, m, 1));
  m = max(m, __shfl_xor_sync(~0u, m, 2));
  if (threadIdx.x % 4 == 0) {
    token_exponent[blockIdx.x * 128 + token] = m;
    add_x[token] = (254 - m) * 0x10001, add_g[token] = m ? m * 0x10001 : SKIP;
  }
  __syncthreads();
  for (int chunk = 0; chunk < X::CHUNKS; ++chunk) {
    if (X::CHUNKS > 1) {
      X::load(x, sx, sx_row, row, rows, chunk);
      X::stage(x, z);
      __syncthreads();
    }
    X::maxima(z, add_x, best, max_x + (long long)group * X::BLOCKS, chunk);
  }
  for (int chunk = 0; chunk < G::CHUNKS; ++chunk) {
    if (chunk) G::load(g, sg, sg_row, row, rows, chunk);
    G::stage(g, z);
    __syncthreads();
    G::maxima(z, add_g, best, max_g + (long long)group * G::BLOCKS, chunk);
  }
}
