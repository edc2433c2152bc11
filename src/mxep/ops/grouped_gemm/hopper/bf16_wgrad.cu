// Grouped bf16 weight gradients for Hopper: one persistent, warp-specialised kernel. Include after hopper.cuh.
//
//   out[g, n, k] = sum_t grad[t, n] a[t, k]     grad (T, N), a (T, K); group g owns tokens ends[g-1] .. ends[g]
//
// wgmma reads both operands as they lie in memory, token by token, so nothing is transposed.
//
// A block of threads holds 1 producer warp (it fills a ring of shared-memory stages by TMA) and 2 consumer warpgroups (wgmma, sums in
// registers). A tile is two units of 128 x 128, of which consumer c has rows 64 c ..: side by side, or in the last column of tiles when
// K % 256 is 1 .. 128 above each other (tall). A stage is 64 tokens of three blocks of 128 columns: block 0 of the operand that both units
// share (grad in wide tiles, a in tall ones), 1 and 2 of the other. A block is two boxes of 64 tokens x 128 bytes.
// Unit 0 is stored while the last wgmma of unit 1 run, unit 1 while the next tile's first run.
//
// The last stage of a tile may hold tokens of the next group, which may be NaN: the consumers make them zero in both operands.

// Constants that the launcher puts in front.
// FLOAT_OUT: float32 output.  ACCUMULATE: added to what is there.  SKIP: groups without tokens are left as they are, not written as zero.
// STAGES: of the ring.  MOST_GROUPS: places in the order of the groups.

constexpr int TOKENS = 64, BOX = TOKENS * 128, BLOCK = 2 * BOX, STAGE = 3 * BLOCK, UNIT = 128;
constexpr int CONSUMER_WARPS = 8, STAGING_BYTES = 16 * UNIT * 2;         // 16 rows of a unit in bf16
constexpr int STAGING_AT = STAGES * STAGE;
constexpr int ORDER_AT = STAGING_AT + CONSUMER_WARPS * STAGING_BYTES;
constexpr int BARRIERS_AT = ORDER_AT + 2 * MOST_GROUPS;

struct Problem {
  const int* ends;                   // (G,)
  void* out;                         // (G, N, K)
  int groups, tokens, N, K;
};

// ---------------------------------------------------------------- tiles

struct Tile {
  int group, row, column, begin, end, steps;             // steps: stages of its tokens begin .. end
  bool tall, single;                                     // single: there is no unit 1
};

// The groups, largest first: Walk then deals out tiles of falling costs.
__device__ __forceinline__ void sort_groups(const Problem& p, unsigned char* memory) {
  int* sizes = (int*)memory;                                            // where the stages will be
  unsigned short* order = (unsigned short*)(memory + ORDER_AT);
  for (int g = threadIdx.x; g < p.groups; g += blockDim.x)
    sizes[g] = min(__ldg(p.ends + g), p.tokens) - (g ? min(__ldg(p.ends + g - 1), p.tokens) : 0);
  __syncthreads();
  for (int g = threadIdx.x; g < p.groups; g += blockDim.x) {
    const int size = sizes[g];
    int rank = 0;
    for (int i = 0; i < p.groups; ++i) rank += sizes[i] > size || (sizes[i] == size && i < g);
    order[rank] = g;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Block b of n takes tiles b, 2n-1-b, 2n+b, 4n-1-b, ..: a list of falling costs comes out balanced without communication.
struct Walk {
  const Problem& p;
  const unsigned short* order;
  int round = 0;

  __device__ __forceinline__ bool next(Tile& t) {
    const int n = gridDim.x, b = blockIdx.x, tile = round * n + (round & 1 ? n - 1 - b : b);
    ++round;
    const int row_tiles = (p.N + UNIT - 1) / UNIT, wide = (p.K + UNIT - 1) / (2 * UNIT), tall = p.K > 2 * UNIT * wide;
    const int tiles = row_tiles * wide + tall * ((row_tiles + 1) / 2), rank = tile / tiles;
    if (rank >= p.groups) return false;
    const int i = tile - rank * tiles, column = min(i / row_tiles, wide);
    t.tall = column == wide, t.group = order[rank];
    t.row = UNIT * (1 + t.tall) * (i - column * row_tiles), t.column = 2 * UNIT * column, t.single = t.tall && t.row + UNIT >= p.N;
    t.begin = t.group ? min(__ldg(p.ends + t.group - 1), p.tokens) : 0, t.end = min(__ldg(p.ends + t.group), p.tokens);
    t.steps = (t.end - t.begin + TOKENS - 1) / TOKENS;
    return !SKIP || t.steps > 0;
  }
};

struct Ring {                                            // stage and phase of the ring of buffers
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance() { if (++stage == STAGES) stage = 0, phase ^= 1; }
};

// ---------------------------------------------------------------- producer: one thread, which asks the copy engine

__device__ __forceinline__ void produce(Walk walk, const TensorMap* grad_map, const TensorMap* a_map, u32 smem) {
  const u32 full = smem + BARRIERS_AT, empty = full + 8 * STAGES;
  Ring ring;
  for (Tile t; walk.next(t);)
    for (int i = 0; i < t.steps; ++i, ring.advance()) {
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      const u32 barrier = full + 8 * ring.stage, to = smem + ring.stage * STAGE;
      const int token = t.begin + TOKENS * i, more = t.single ? 2 : 4;
      const TensorMap *map_0 = t.tall ? a_map : grad_map, *map_12 = t.tall ? grad_map : a_map;
      const int at_0 = t.tall ? t.column : t.row, at_12 = t.tall ? t.row : t.column;
      barrier_expect(barrier, (2 + more) * BOX);
      for (int j = 0; j < 2; ++j) load_box(to + j * BOX, map_0, at_0 + 64 * j, token, barrier);
      for (int j = 0; j < more; ++j) load_box(to + BLOCK + j * BOX, map_12, at_12 + 64 * j, token, barrier);
    }
}

// ---------------------------------------------------------------- consumers

// d (64 x 128) = or += a (16 x 64)^T b (16 x 128) of bf16. a, b: descriptors' lower words, of boxes of 64 columns in 128-byte swizzle with
// 128 bytes from token to token; b's second box follows its first.
constexpr u32 BOX_TO_BOX = (BOX / 16) << 16;
__device__ __forceinline__ void wgmma_of_tokens(float (&d)[64], u32 a, u32 b, bool add) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b;\n"
      "setp.ne.b32 p, %66, 0; mov.b64 a, {%64, 0x40000040}; mov.b64 b, {%65, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,"
      "%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      "a, b, p, 1, 1, 1, 1; }"
      : REGS_64(d) : "r"(a), "r"(b), "r"((int)add));
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait_for_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A warp's part of a unit, 16 rows x 128 columns, in bf16. A thread holds of row lane / 4 and, in odd words, of row lane / 4 + 8 the
// columns 8 (word / 2) + 2 (lane % 4) + 0..1.
struct Rounded { u32 words[32]; };
__device__ __forceinline__ void round_to(Rounded& r, const float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r.words[i]) : "f"(d[2 * i + 1]), "f"(d[2 * i]));
}
__device__ __forceinline__ void store_rounded(const Rounded& r, const TensorMap* map, int y, int x, u32 staging) {
  const int lane = threadIdx.x % 32;
  const u32 to = (staging + lane % 16 * 128) ^ (((lane / 16) ^ (lane % 8)) << 4);
  if (lane == 0) store_wait<0>();
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 16; j += 2)                        // four 8 x 8 blocks, into two boxes of 16 rows x 64 columns in 128-byte swizzle
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"((to ^ (j % 8 * 16)) + j / 8 * 2048),
                   "r"(r.words[2 * j]), "r"(r.words[2 * j + 1]), "r"(r.words[2 * j + 2]), "r"(r.words[2 * j + 3]) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) {
    store_box(map, x, y, staging);
    store_box(map, x + 64, y, staging + 2048);
    store_commit();
  }
}

// The same in float32, straight to memory.
__device__ __forceinline__ void store_floats(const float (&d)[64], float* out, int row_length, int x) {
  const int lane = threadIdx.x % 32, column = x + 2 * (lane % 4);
  float* row = out + (long long)(lane / 4) * row_length + column;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float* at = row + i % 2 * 8 * row_length + i / 2 * 8;
    if (column + i / 2 * 8 >= row_length) continue;
    if constexpr (ACCUMULATE)                            // one writer per element: no race, and nothing to wait for
      asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(d[2 * i]), "f"(d[2 * i + 1]) : "memory");
    else
      *(float2*)at = float2{d[2 * i], d[2 * i + 1]};
  }
}

// Zeroes what a stage holds of the tokens from `rest` on. Both consumers do it, for what each of them reads.
__device__ __forceinline__ void zero_tokens(u32 stage, int rest, int consumer) {
  for (int i = rest * 8 + threadIdx.x % 128; i < TOKENS * 8; i += 128)
    for (int box = 0; box < STAGE / BOX; ++box)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(stage + box * BOX + 16 * i), "r"(0) : "memory");
  asm volatile("fence.proxy.async.shared::cta; bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
}

template <int VALUE> struct Constant { __device__ constexpr operator int() const { return VALUE; } };

__device__ __forceinline__ void consume(const Problem& p, Walk walk, const TensorMap* out_map, u32 smem, int consumer) {
  const int lane = threadIdx.x % 32, warp_row = uniform(16 * (threadIdx.x / 32));    // 0 .. 127, consumer 1 from 64 on
  const u32 full = smem + BARRIERS_AT, empty = full + 8 * STAGES, staging = smem + STAGING_AT + warp_row / 16 * STAGING_BYTES;
  Ring ring;
  // Unit 1 of the tile before is stored while the next tile's first wgmma run, which hides its way out.
  struct { Rounded values; int y, x; bool wanted; } left = {{}, 0, 0, false};
  auto store_left = [&] {
    if (left.wanted) store_rounded(left.values, out_map, left.y, left.x, staging);
    left.wanted = false;
  };
  for (Tile t; walk.next(t);) {
    auto store = [&](const float (&sum)[64], int unit) {
      const int row = t.row + warp_row + (t.tall ? UNIT * unit : 0), x = t.column + (t.tall ? 0 : UNIT * unit), y = t.group * p.N + row;
      const bool wanted = row < p.N;                     // N is a multiple of 16
      if constexpr (FLOAT_OUT) {
        if (wanted) store_floats(sum, (float*)p.out + (long long)y * p.K, p.K, x);
      } else if (unit == 0) {
        Rounded rounded;
        round_to(rounded, sum);
        if (wanted) store_rounded(rounded, out_map, y, x, staging);
      } else {
        round_to(left.values, sum);
        left.y = y, left.x = x, left.wanted = wanted;
      }
    };

    const u32 a_block = t.tall ? BLOCK / 16 : 0, b_block = BLOCK / 16 - a_block;       // where each operand starts, and from unit 0 to 1
    auto tile = [&](auto single) {
      constexpr bool SINGLE = decltype(single){};
      float sum_0[64], sum_1[64];
      u32 before = 0;                                    // where to release the stage before
      auto step = [&](auto first, bool last) {
        barrier_wait(full + 8 * ring.stage, ring.phase);
        const int rest = (t.end - t.begin) % TOKENS;
        if (last && rest) zero_tokens(smem + ring.stage * STAGE, rest, consumer);
        const u32 at = uniform(ring.stage * (STAGE / 16)) + smem / 16, barrier = empty + 8 * ring.stage;
        const u32 a = at + a_block + consumer * (BOX / 16), b = at + b_block + BOX_TO_BOX;
        ring.advance();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) wgmma_of_tokens(sum_0, a + 128 * k, b + 128 * k, !first || k > 0);
        wgmma_commit();
        if constexpr (first && !FLOAT_OUT) store_left();
        if constexpr (!SINGLE) {
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < TOKENS / 16; ++k) wgmma_of_tokens(sum_1, a + a_block + 128 * k, b + b_block + 128 * k, !first || k > 0);
          wgmma_commit();
        }
        if constexpr (!first) {
          wgmma_wait_for_all_but<SINGLE ? 1 : 2>();
          if (lane == 0) barrier_arrive(before);
        }
        before = barrier;
      };
      step(Constant<1>(), t.steps == 1);
      for (int i = t.steps - 1; i > 0; --i) step(Constant<0>(), i == 1);
      wgmma_wait<SINGLE ? 0 : 1>(sum_0);
      store(sum_0, 0);
      if constexpr (!SINGLE) wgmma_wait<0>(sum_1);
      if (lane == 0) barrier_arrive(before);
      if constexpr (!SINGLE) store(sum_1, 1);
    };

    if (t.steps > 0) {
      if (t.single) tile(Constant<1>());
      else tile(Constant<0>());
    } else if (!ACCUMULATE) {                            // no tokens
      store_left();
      float zeros[64] = {};
      store(zeros, 0);
      if (!t.single) store(zeros, 1);
    }
  }
  store_left();
  if (lane == 0) store_wait<0>();                        // shared memory must outlive the copy engine's reads
}

extern "C" __global__ void __launch_bounds__(384, 1)
grouped_wgrad(const __grid_constant__ TensorMap grad_map, const __grid_constant__ TensorMap a_map,
              const __grid_constant__ TensorMap out_map, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 smem = uniform((u32)__cvta_generic_to_shared(memory));
  if (threadIdx.x < STAGES) {
    barrier_init(smem + BARRIERS_AT + 8 * threadIdx.x, 1);
    barrier_init(smem + BARRIERS_AT + 8 * (STAGES + threadIdx.x), CONSUMER_WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  sort_groups(p, memory);
  __syncthreads();
  const Walk walk = {p, (const unsigned short*)(memory + ORDER_AT)};
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup < 2) consume(p, walk, &out_map, smem, warpgroup);
  else if (threadIdx.x == 256) produce(walk, &grad_map, &a_map, smem);
}
