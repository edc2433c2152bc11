// Exponents for the operands of a wgrad sum_t g_t a_t: one per group and 32 columns, found from the scales alone.
// Include after hopper.cuh and mx_bytes.cuh; the reference is reference.rebase_tokens.
//
// The sum runs over tokens t. a_t = A_t 2^i, g_t = G_t 2^j, and only i + j matters: each token's exponent c_t, the largest of a's
// blocks, moves from a to g. Then a's blocks keep own = s - c_t + 254, g's have own = s + c_t (both biased by 254), and the largest
// own of a group's tokens is the group's exponent of those 32 columns. Blocks with scale byte 0 (all zero) or 0xFF (NaN)
// take no part in a maximum; neither do g's blocks of tokens whose a has no block that does. Where g gives (token_plan.cu), the other way
// round.
// Out: what moves the exponents of every output token, the tables of maxima (G, width / 32) of a and of g; token_plan.cu has cleared the
// tables and says where output tokens come from.

// Constants that the launcher puts in front.
// WIDTH_A, WIDTH_G: multiples of 32.  WORDS_A, WORDS_G: a token's scales can be read 4 at a time.  MAP_A, MAP_G: token t is row map[t], -1
// a row of zeros.

// A block of threads per 128 output tokens, all in registers: LANES threads take a token, each of them the words of 4 scales LANES apart
// (of a and of g), as two words of 16-bit lanes in which a block that does not count is negative. Together they find the token's c; then
// each keeps the maxima of its words over its tokens, one instruction for two blocks. While tokens are worked on, the next ones arrive.

__device__ __forceinline__ u32 add_max2(u32 a, u32 b, u32 c) {   // one instruction on Hopper
  u32 o;
  asm("{ .reg .b32 t; add.s16x2 t, %1, %2; max.s16x2 %0, t, %3; }" : "=r"(o) : "r"(a), "r"(b), "r"(c));
  return o;
}

__device__ __forceinline__ uint2 as_lanes(u32 w) {       // bytes 0, 2 and bytes 1, 3; bytes 0 and 255 negative
  const u32 a = w & 0x7F7F7F7F, t = a + 0x01010101, u = a + 0x7F7F7F7F;   // top bit of t & w: the byte is 255; of u | w: it is not 0
  const u32 none = (t & w) | ~(u | w);
  return uint2{(w & 0x00FF00FF) | (none << 8 & 0x80008000), __byte_perm(w, 0, 0x4341) | (none & 0x80008000)};
}

template <int D> constexpr int WORDS_OF = (D / 32 + 3) / 4;
constexpr int lanes_for(int words) { return words > 16 ? 32 : words > 8 ? 16 : 8; }

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int LANES = lanes_for(WORDS_OF<(WIDTH_A > WIDTH_G ? WIDTH_A : WIDTH_G)>);
constexpr int ABREAST = 32 / LANES;                      // tokens that a warp takes at a time
constexpr int EACH_A = (WORDS_OF<WIDTH_A> + LANES - 1) / LANES, EACH_G = (WORDS_OF<WIDTH_G> + LANES - 1) / LANES, EACH = EACH_A + EACH_G;
constexpr int TURNS = 128 / WARPS / ABREAST;
constexpr int BATCH = EACH <= 3 ? 4 : EACH <= 8 ? 2 : 1;                 // turns whose scales are under way at a time
constexpr int BLOCKS_PER_SM = EACH <= 4 ? 8 : EACH <= 8 ? 6 : EACH <= 16 ? 3 : 1;

// Word `word` of a token's scales, `at` its address; 0 where there is none.
template <int D, bool WORDS> __device__ __forceinline__ u32 four_scales(const u8* at, bool valid, int word) {
  if (!valid || word >= WORDS_OF<D>) return 0;
  if constexpr (WORDS) return __ldg((const u32*)at);
  u32 w = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b)
    if (4 * word + b < D / 32) w |= (u32)__ldg(at + b) << 8 * b;
  return w;
}

// The largest over the block's warps, and from there into the table's row: a thread takes the block of 32 columns `of_mine(k)`.
template <int D, int WORDS> struct Table {
  int known[WORDS];                                      // what the table holds already: most tokens bring nothing new

  __device__ static __forceinline__ int of_mine(int k) { return k * 4 * LANES + (int)threadIdx.x; }
  __device__ static __forceinline__ bool mine(int k) { return (int)threadIdx.x < 4 * LANES && of_mine(k) < D / 32; }
  __device__ __forceinline__ void look(const int* table) {
#pragma unroll
    for (int k = 0; k < WORDS; ++k) known[k] = mine(k) ? __ldcg(table + of_mine(k)) : 0;
  }
  __device__ __forceinline__ void raise(const uint2 (&most)[WORDS], uint2* shared, int* table) const {
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
      __syncthreads();
      shared[threadIdx.x] = most[k];                     // LANES words, WARPS * ABREAST times
      __syncthreads();
      if (!mine(k)) continue;
      u32 both = 0;                                      // this block and its neighbour
#pragma unroll
      for (int i = 0; i < THREADS; i += LANES) both = max2(both, ((const u32*)(shared + i + threadIdx.x / 4))[threadIdx.x % 2]);
      const int top = threadIdx.x % 4 / 2 ? both >> 16 : both & 0xFFFF;
      if (top > known[k]) atomicMax(table + of_mine(k), top);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
token_maxima(const u8* __restrict__ sa, long long sa_row, const int* __restrict__ a_map, const u8* __restrict__ sg, long long sg_row,
             const int* __restrict__ g_map, const int4* __restrict__ tiles, u8* __restrict__ moved_a, u8* __restrict__ moved_g,
             int* __restrict__ max_a, int* __restrict__ max_g, const int* __restrict__ g_gives) {
  __shared__ uint2 shared[THREADS];
  const int4 tile = __ldg(tiles + blockIdx.x);
  if (tile.y < 0) return;
  const bool from_g = __ldg(g_gives + tile.z);
  const int lane = threadIdx.x % LANES, first = threadIdx.x / 32 * (TURNS * ABREAST) + threadIdx.x % 32 / LANES;
  uint2 most_a[EACH_A]{}, most_g[EACH_G]{};
  u32 a[BATCH][EACH_A], g[BATCH][EACH_G];
  sa += 4 * lane, sg += 4 * lane;
  const u8 *next_a = sa + (tile.x + first) * sa_row, *next_g = sg + (tile.x + first) * sg_row;
  auto load = [&](int turn) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int token = first + (turn + i) * ABREAST, row_a = MAP_A && token < tile.y ? __ldg(a_map + tile.x + token) : 0,
                row_g = MAP_G && token < tile.y ? __ldg(g_map + tile.x + token) : 0;
      const u8* at_a = MAP_A ? sa + row_a * sa_row : next_a + (long long)(i * ABREAST * (int)sa_row);
      const u8* at_g = MAP_G ? sg + row_g * sg_row : next_g + (long long)(i * ABREAST * (int)sg_row);
#pragma unroll
      for (int k = 0; k < EACH_A; ++k)
        a[i][k] = four_scales<WIDTH_A, WORDS_A>(at_a + 4 * LANES * k, token < tile.y && row_a >= 0, k * LANES + lane);
#pragma unroll
      for (int k = 0; k < EACH_G; ++k)
        g[i][k] = four_scales<WIDTH_G, WORDS_G>(at_g + 4 * LANES * k, token < tile.y && row_g >= 0, k * LANES + lane);
    }
    next_a += BATCH * ABREAST * sa_row, next_g += BATCH * ABREAST * sg_row;
  };
  load(0);
#pragma unroll 2
  for (int turn = 0; turn < TURNS; turn += BATCH) {
    uint2 own_a[BATCH][EACH_A];
    u32 raw_g[BATCH][EACH_G];
    int c[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      u32 m = 0;
#pragma unroll
      for (int k = 0; k < EACH_A; ++k) own_a[i][k] = as_lanes(a[i][k]), m = max2(m, max2(own_a[i][k].x, own_a[i][k].y));
#pragma unroll
      for (int k = 0; k < EACH_G; ++k) raw_g[i][k] = g[i][k];
      if (from_g) {                                      // the same for the whole block
        m = 0;
#pragma unroll
        for (int k = 0; k < EACH_G; ++k) {
          const uint2 own = as_lanes(raw_g[i][k]);
          m = max2(m, max2(own.x, own.y));
        }
      }
      c[i] = max(m & 0xFFFF, m >> 16);
    }
    if (turn + BATCH < TURNS) load(turn + BATCH);        // they arrive meanwhile
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if constexpr (LANES == 32) {
        c[i] = __reduce_max_sync(~0u, c[i]);
      } else {
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) c[i] = max(c[i], __shfl_xor_sync(~0u, c[i], d));
      }
      if (lane == 0) {
        const int token = blockIdx.x * 128 + first + (turn + i) * ABREAST, gives = c[i] + 1, gets = 255 - c[i];
        moved_a[token] = from_g ? gets : gives, moved_g[token] = from_g ? gives : gets;
      }
      const u32 add_a = (from_g ? c[i] : 254 - c[i]) * 0x10001, add_g = (from_g ? 254 - c[i] : c[i]) * 0x10001;
#pragma unroll
      for (int k = 0; k < EACH_A; ++k) {
        if (from_g && !c[i]) break;
        most_a[k].x = add_max2(own_a[i][k].x, add_a, most_a[k].x);
        most_a[k].y = add_max2(own_a[i][k].y, add_a, most_a[k].y);
      }
#pragma unroll
      for (int k = 0; k < EACH_G; ++k) {
        const uint2 own = as_lanes(from_g || c[i] ? raw_g[i][k] : 0);
        most_g[k].x = add_max2(own.x, add_g, most_g[k].x);
        most_g[k].y = add_max2(own.y, add_g, most_g[k].y);
      }
    }
  }
  max_a += (long long)tile.z * (WIDTH_A / 32), max_g += (long long)tile.z * (WIDTH_G / 32);
  Table<WIDTH_A, EACH_A> table_a;
  Table<WIDTH_G, EACH_G> table_g;
  table_a.look(max_a);
  table_g.look(max_g);
  table_a.raise(most_a, shared, max_a);
  table_g.raise(most_g, shared, max_g);
}
