// Grouped FP8 (e4m3) matrix products for Hopper: one persistent, warp-specialised kernel. Include after hopper.cuh and tiles.cuh.
//
//   forward  out[m, n]    = sum_k A[m, k] B[g, n, k]   A (M, K), B (G, N, K); group g owns rows   ends[g-1] .. ends[g]
//   WGRAD    out[g, n, k] = sum_t A[n, t] B[k, t]      A (N, T), B (K, T);    group g owns tokens ends[g-1] .. ends[g]
//            (below, A's rows are called rows and B's rows columns, as they are of out)
//
// Both operands are contiguous along the summed dimension, which the kernel walks 128 bytes at a time. Rows past the last
// end belong to a group without weights and come out as zero, like a wgrad's groups without tokens.
//
// A block of threads holds 1 producer warp (it fills a ring of shared-memory stages by TMA) and 2 consumer warpgroups (wgmma,
// sums in registers). A stage is three blocks of 128 rows x 128 bytes: block 0 of the operand that both units of a consumer share
// (A in wide tiles, B in tall ones), 1 and 2 of the other.
//
// Sums of 128 products are kept by the tensor cores with about 14 bits and then promoted: added to float32 registers.
//
// BLOCK_SCALES: a row of A has one scale, applied after the sum. Where it is negative, the row also has one scale per 128 of K, applied
// at each promotion; most of these are 1. The producer finds the tiles with at least one such row. In such a tile a warp whose rows all
// have scale 1 in a step adds; other warps multiply and add, which takes more power and, sustained, costs a fifth of the speed.
//
// LORA: out[m, n] += sum_r inner[m, r] lora_b[g, n, r], of RANK bf16 products, before a result is rounded. The producer brings the 256
// rows of lora_b of a tile with its last stage, and a warp multiplies as it stores.

constexpr int MIN_STEPS = LORA ? 4 : 2;                  // stages per tile at least; those past the end are zeros
constexpr int CONSUMER_WARPS = 8;

// Why places for three notes and for two tiles' column scales are enough: the producer is at most STAGES stages ahead of the slower
// consumer. So when it fills the last stage of a tile, every consumer has released the first one of the tile before, and with it has
// stored what was left of the tile before that.
static_assert(STAGES < 2 * MIN_STEPS, "with more stages, column scales may still be in use");
// For the same reason one place for lora_b is enough where a tile has more stages than the ring: when its last stage is filled, all consumers
// have released its first one, and with it have stored all of the tile before.
static_assert(!LORA || STAGES < MIN_STEPS, "lora_b may still be in use");

// Shared memory, in bytes from its start.
constexpr int BLOCK = 128 * 128, STAGE = 3 * BLOCK;
constexpr int STAGING_BYTES = 16 * 128 * 2;              // 16 rows x 128 columns of bf16
constexpr int STAGING_AT = STAGES * STAGE;
constexpr int COLUMN_SCALES = 256;                       // floats of a tile, two tiles
constexpr int COLUMN_SCALES_AT = STAGING_AT + CONSUMER_WARPS * STAGING * STAGING_BYTES;
constexpr int ROW_SCALES = 132;                          // BLOCK_SCALES, floats: 128 rows from any start, aligned down to 4
constexpr int ROW_SCALES_AT = COLUMN_SCALES_AT + 2 * 4 * COLUMN_SCALES;
constexpr int ROW_SCALES_BYTES = 640;                    // rounded up to the 128 bytes that TMA wants
constexpr int RANK = 16, LORA_BYTES = 256 * RANK * 2;    // bf16
static_assert(COLUMN_SCALES_AT % (4 * COLUMN_SCALES) == 0, "a tile's column scales start at a multiple of their size");
constexpr int LORA_AT = ROW_SCALES_AT + (BLOCK_SCALES ? STAGES * 2 * ROW_SCALES_BYTES : 0);
constexpr int NOTES_AT = LORA_AT + (LORA ? LORA_BYTES : 0);      // three tiles, see Note
constexpr int BARRIERS_AT = NOTES_AT + 3 * 16;

// What the consumers need of a tile: out_row, column, rows, and 16 x stages + 8 x block_scales + 4 x half + 2 x empty + tall; 0: the end.
typedef int4 Note;

struct Ring {                                            // stage and phase of the ring of buffers
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance() { if (++stage == STAGES) stage = 0, phase ^= 1; }
};

// ---------------------------------------------------------------- producer: one warp, of which one thread asks the copy engine

__device__ __forceinline__ void produce(Walk walk, const TensorMap* a_map, const TensorMap* b_map, const TensorMap* a_scale_map,
                                        const TensorMap* b_scale_map, const TensorMap* lora_map, unsigned char* memory, u32 smem) {
  const int lane = threadIdx.x % 32;
  const u32 full = smem + BARRIERS_AT, empty = full + 8 * STAGES;
  Note* notes = (Note*)(memory + NOTES_AT);
  Ring ring;
  int count = 0;
  for (Tile t; walk.next(t); ++count) {
    bool block_scales = false;                                  // a row of this tile has scales per 128 of K
    if constexpr (BLOCK_SCALES) {
      if (!t.empty)
        for (int row = lane; row < min(t.rows, t.tall ? 256 : 128); row += 32) block_scales |= __ldg(walk.p.a_scale + t.a_row + row) < 0;
      block_scales = __any_sync(~0u, block_scales);
    }
    const TensorMap *map_0 = t.tall ? b_map : a_map, *map_12 = t.tall ? a_map : b_map;
    const int row_0 = t.tall ? t.b_row : t.a_row, row_12 = t.tall ? t.a_row : t.b_row;
    const int stages = max(MIN_STEPS, t.steps);
    for (int i = 0; i < stages; ++i, ring.advance()) {
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      if (lane != 0) continue;
      const u32 barrier = full + 8 * ring.stage, to = smem + ring.stage * STAGE;
      const int k = i < t.steps ? t.k + 128 * i : walk.p.K;        // past the end TMA gives zeros
      const bool last = i == stages - 1;
      if (i == 0)
        notes[count % 3] = Note{t.out_row, t.column, t.rows, 16 * stages + 8 * block_scales + 4 * t.half + 2 * t.empty + t.tall};
      barrier_expect(barrier, STAGE - t.half * BLOCK + last * (4 * COLUMN_SCALES + LORA * LORA_BYTES) +
                              block_scales * (t.tall ? 2 : 1) * 4 * ROW_SCALES);
      if (BLOCK_SCALES && block_scales) {                              // first: small. An unaligned column is an illegal instruction
        const u32 scales = smem + ROW_SCALES_AT + ring.stage * 2 * ROW_SCALES_BYTES;
        load_box(scales, a_scale_map, t.a_row & ~3, i, barrier);
        if (t.tall) load_box(scales + ROW_SCALES_BYTES, a_scale_map, (t.a_row & ~3) + 128, i, barrier);
      }
      load_box(to, map_0, k, row_0, barrier);
      load_box(to + BLOCK, map_12, k, row_12, barrier);
      if (!t.half) load_box(to + 2 * BLOCK, map_12, k, row_12 + 128, barrier);
      if (last) load_box(smem + COLUMN_SCALES_AT + count % 2 * 4 * COLUMN_SCALES, b_scale_map, t.column,
                         t.empty ? walk.p.groups : t.group, barrier);
      if (LORA && last) load_box(smem + LORA_AT, lora_map, 0, t.b_row, barrier);
    }
  }
  barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
  if (lane != 0) return;
  notes[count % 3] = Note{0, 0, 0, 0};
  barrier_arrive(full + 8 * ring.stage);
}

// ---------------------------------------------------------------- consumers

// A thread's part of two rows of inner, lane / 4 and lane / 4 + 8: elements 4 (lane % 4) + 0..3 of each.
struct Inner { uint2 row_0, row_8; };

__device__ __forceinline__ Inner load_inner(const Problem& p, int row, bool valid_0, bool valid_8) {
  Inner inner = {};
  const uint2* from = (const uint2*)p.inner + (long long)row * (RANK / 4) + threadIdx.x % 4;
  if (LORA && valid_0) inner.row_0 = __ldg(from);
  if (LORA && valid_8) inner.row_8 = __ldg(from + 8 * (RANK / 4));
  return inner;
}

// v += the products of two rows of inner and 8 columns of lora_b, of which a thread reads the same elements of column lane / 4. The tensor
// cores take elements in another order, in which a thread's four are no neighbours; both factors are in that order, so the sum is the same.
__device__ __forceinline__ void add_lora(float (&v)[4], const Inner& inner, u32 columns) {
  u32 b0, b1;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(columns + threadIdx.x % 32 * 8));
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
      : "r"(inner.row_0.x), "r"(inner.row_8.x), "r"(inner.row_0.y), "r"(inner.row_8.y), "r"(b0), "r"(b1));
}

// One warp's part of a unit, 16 rows x 128 columns, to out at row y, column x; `rows` of it exist. A thread holds
// d[4j + 0..1] of row lane / 4 and d[4j + 2..3] of row lane / 4 + 8, at columns 8j + 2 (lane % 4) + 0..1.
__device__ __forceinline__ void store_unit(const float (&d)[64], const Problem& p, const TensorMap* map, int y, int x, int rows,
                                           float scale_0, float scale_8, u32 column_scales, u32 staging, const Inner& inner,
                                           u32 lora_b) {
  const int lane = threadIdx.x % 32, mine = 2 * (lane % 4);
  const u32 scales = column_scales + 4 * mine;
  lora_b += column_scales % (4 * COLUMN_SCALES) * (RANK * 2 / 4);        // of the unit's first column
  const u32 to = (staging + lane % 16 * 128) ^ (((lane / 16) ^ (lane % 8)) << 4);
  float* out = (float*)p.out + ((long long)y + lane / 4) * p.N + x + mine;
  if constexpr (!FLOAT_OUT) {
    if (lane == 0) store_wait<STAGING - 1>();
    __syncwarp();
  }
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 s = load_shared_2(scales + 32 * (j + i));
      const float* e = d + 4 * (j + i);
      float v[4] = {e[0] * scale_0 * s.x, e[1] * scale_0 * s.y, e[2] * scale_8 * s.x, e[3] * scale_8 * s.y};
      if constexpr (LORA) add_lora(v, inner, lora_b + 8 * (j + i) * RANK * 2);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if constexpr (!FLOAT_OUT) {
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[2 * i + h]) : "f"(v[2 * h + 1]), "f"(v[2 * h]));
        } else if (x + mine + 8 * (j + i) < p.N && lane / 4 + 8 * h < rows) {
          float* at = out + (u64)8 * h * p.N + 8 * (j + i);
          if constexpr (ACCUMULATE)                      // one writer per element: no race, and nothing to wait for
            asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};"
                         ::"l"(at), "f"(v[2 * h]), "f"(v[2 * h + 1]) : "memory");
          else
            *(float2*)at = float2{v[2 * h], v[2 * h + 1]};
        }
    }
    if constexpr (!FLOAT_OUT)          // four 8 x 8 blocks, into two boxes of 16 rows x 64 columns in 128-byte swizzle
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"((to ^ (j % 8 * 16)) + j / 8 * 2048),
                     "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3]) : "memory");
  }
  if constexpr (FLOAT_OUT) return;
  if (rows >= 16) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
      store_box(map, x, y, staging);
      store_box(map, x + 64, y, staging + 2048);
      store_commit();
    }
  } else {                                               // the group ends here: the rows after it belong to the next
    __syncwarp();
    for (int i = lane; i < 16 * 16; i += 32) {
      const int r = i / 16, c = i % 16;
      if (r < rows && x + 8 * c < p.N)
        *(int4*)((unsigned short*)p.out + ((long long)y + r) * p.N + x + 8 * c) =
            load_shared_4((staging + r * 128 + c / 8 * 2048) ^ ((c ^ r) % 8 << 4));
    }
    if (lane == 0) store_commit();                       // an empty one: store_wait counts one per unit
    __syncwarp();
  }
}

template <int VALUE> struct Constant { __device__ constexpr operator int() const { return VALUE; } };
constexpr int FIRST = 0, MIDDLE = 1, LAST = 2, HALF = 3;

__device__ __forceinline__ void consume(const Problem& p, const TensorMap* out_map, u32 smem, int consumer) {
  const int lane = threadIdx.x % 32, warp_row = uniform(16 * (threadIdx.x / 32));    // 0 .. 127, consumer 1 from 64 on
  const u32 full = smem + BARRIERS_AT, empty = full + 8 * STAGES;
  const u32 staging = smem + STAGING_AT + warp_row / 16 * STAGING * STAGING_BYTES;
  Ring ring;
  bool ready = false;                                    // the next stage was seen full
  float sum[2][64], part[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[1][i] = 0;
  // Unit 1 of the tile before stays in sum[1] until the next tile's first wgmma of unit 0 runs, which hides its way out.
  struct { int y, x, rows; float scale_0, scale_8; u32 column_scales, staging; Inner inner; } left = {
      0, 0, 0, 0, 0, smem + COLUMN_SCALES_AT, staging, {}};
  auto store_left = [&] {
    store_unit(sum[1], p, out_map, left.y, left.x, left.rows, left.scale_0, left.scale_8, left.column_scales, left.staging, left.inner,
               smem + LORA_AT);
  };
  for (int count = 0;; ++count) {
    if (!ready) barrier_wait(full + 8 * ring.stage, ring.phase);
    ready = true;
    Note note = {};                                      // read by the lane that releases stages, and with them the note's place
    if (lane == 0) note = load_shared_4(smem + NOTES_AT + count % 3 * 16);
    const int out_row = uniform(note.x), column = uniform(note.y), rows = uniform(note.z), rest = uniform(note.w);
    const bool tall = rest & 1, nothing = rest & 2, half = rest & 4, block_scales = rest & 8;
    const bool idle = consumer == 1 && !tall && rows <= 64;             // its rows do not exist
    if (half || idle || rest == 0) store_left();
    if (rest == 0) break;
    if (idle) {
      left.rows = 0, left.staging = staging, ready = false;      // the copy engine may still read the other buffer
      for (int i = rest / 16; i > 0; --i, ring.advance()) {
        barrier_wait(full + 8 * ring.stage, ring.phase);
        if (lane == 0) barrier_arrive(empty + 8 * ring.stage);
      }
      continue;
    }
    const u32 a_block = tall ? BLOCK / 16 : 0, b_block = BLOCK / 16 - a_block;         // where each operand starts
    const u32 a_unit = half ? 0 : a_block, b_unit = half ? 0 : b_block;                // from unit 0 to unit 1; a half tile is a unit 1
    const u32 a_first = smem / 16 + 64 * 128 / 16 * consumer + a_block, b_first = smem / 16 + b_block;
    const int unit_row = tall && !half ? 128 : 0, unit_column = tall || half ? 0 : 128;
    float scale[2][2];                                   // [unit][row lane / 4, row lane / 4 + 8]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + i / 2 * unit_row + lane / 4 + i % 2 * 8;
      scale[i / 2][i % 2] = row < rows && !nothing ? __ldg(p.a_scale + out_row + row) : 0;
    }

    auto inner_of = [&](int unit) {
      const int row = warp_row + unit * unit_row + lane / 4;
      return load_inner(p, out_row + row, row < rows && !nothing, row + 8 < rows && !nothing);
    };
    auto store_0 = [&](float scale_0, float scale_8, const Inner& inner) {
      store_unit(sum[0], p, out_map, out_row + warp_row, column, rows - warp_row, scale_0, scale_8,
                 smem + COLUMN_SCALES_AT + count % 2 * 4 * COLUMN_SCALES, staging, inner, smem + LORA_AT);
    };
    auto tile = [&](auto block_scaled) {                 // rows of negative scale have one more scale in each stage
      constexpr bool BLOCK_SCALED = block_scaled;
      auto scale_of = [&](int unit, int h) { return BLOCK_SCALED ? fabsf(scale[unit][h]) : scale[unit][h]; };

      auto step = [&](auto which) {
        [[maybe_unused]] u32 scales;
        float block_scale[2] = {1, 1};                        // of unit's rows lane / 4 and lane / 4 + 8 in this step
        bool plain = true;                               // 1 in all rows of the warp
        u32 at, barrier;
        auto multiply = [&](float (&d)[64], int unit) {  // d = the products of one stage
#pragma unroll
          for (int once = 0; once < 1; ++once)           // without a loop the compiler orders BLOCK_SCALES otherwise than it was measured
            if (unit == 0 || which == HALF) {            // the first to need this stage
              if (!ready) barrier_wait(full + 8 * ring.stage, ring.phase);
              if constexpr (BLOCK_SCALED)
                scales = smem + ROW_SCALES_AT + ring.stage * 2 * ROW_SCALES_BYTES + 4 * (out_row % 4 + warp_row + lane / 4);
              at = uniform(ring.stage * (STAGE / 16)), barrier = empty + 8 * ring.stage;
              ring.advance();
            }
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k)
            wgmma(d, at + a_first + unit * a_unit + 2 * k, at + b_first + unit * b_unit + 2 * k, k > 0);
          wgmma_commit();
        };
        auto load_scales = [&](int unit) {               // not before the wgmma, which needs none
          if constexpr (BLOCK_SCALED) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              block_scale[j] = 1;
              load_shared_if(block_scale[j], scale[unit][j] < 0, scales + unit * (unit_row ? ROW_SCALES_BYTES : 0) + j * 32);
            }
            plain = __all_sync(~0u, block_scale[0] == 1 && block_scale[1] == 1);
          }
        };
        auto release = [&](float (&d)[64]) {
          wgmma_wait<0>(d);
          if (lane == 0) barrier_arrive(barrier);
          ready = barrier_test(full + 8 * ring.stage, ring.phase);      // asked before the additions, which hide it
        };
        // In this order ptxas keeps a scale in its reuse cache for the second of two neighbours, of which one would read three registers
        // of one bank: 2 conflicts in 128 instead of 50 (bf16 results, CUDA 13.0).
        auto add = [&](int unit, auto scaled) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 32; ++i) {
              const int j = i / 2 * 4 + 2 * h + (i + 1 - h) % 2;
              sum[unit][j] = scaled ? fmaf(part[j], block_scale[h], sum[unit][j]) : sum[unit][j] + part[j];
            }
        };
        auto promote = [&](int unit) {
          if (!BLOCK_SCALED || plain) add(unit, Constant<false>());
          else add(unit, Constant<true>());
        };
        if constexpr (which == HALF) {
          multiply(part, 1);
          load_scales(1);
          release(part);
          promote(1);
        } else if constexpr (which == FIRST) {           // nothing to add to
          multiply(sum[0], 0);
          store_left();
          multiply(part, 1);                             // not into sum[1]: ptxas would wait for unit 0 before store_left reads it
          load_scales(0);
          wgmma_wait<1>(sum[0]);
          if constexpr (BLOCK_SCALED)
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[0][i] *= block_scale[i / 2 % 2];
          load_scales(1);
          release(part);
#pragma unroll
          for (int i = 0; i < 64; ++i) sum[1][i] = BLOCK_SCALED ? part[i] * block_scale[i / 2 % 2] : part[i];
        } else {                                         // one consumer adds while the other one's wgmma runs
          multiply(part, 0);
          const Inner inner = which == LAST ? inner_of(0) : Inner{};
          load_scales(0);
          wgmma_wait<0>(part);
          promote(0);
          multiply(part, 1);
          load_scales(1);
          if constexpr (which == LAST) store_0(scale_of(0, 0), scale_of(0, 1), inner);            // hidden behind unit 1's wgmma
          release(part);
          promote(1);
        }
      };
      int steps = rest / 16;
      if (half) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[1][i] = 0;
        for (; steps > 0; --steps) step(Constant<HALF>());
      } else {
        step(Constant<FIRST>());
        for (; steps > 2; --steps) step(Constant<MIDDLE>());
        step(Constant<LAST>());
      }
      left.scale_0 = scale_of(1, 0), left.scale_8 = scale_of(1, 1);
    };
    if (BLOCK_SCALES && block_scales) tile(Constant<BLOCK_SCALES>());
    else tile(Constant<0>());
    left.inner = inner_of(1);
    left.y = out_row + warp_row + unit_row, left.x = column + unit_column, left.rows = rows - warp_row - unit_row;
    left.column_scales = smem + COLUMN_SCALES_AT + 4 * (count % 2 * COLUMN_SCALES + unit_column);
    left.staging = staging + (half ? 0 : STAGING - 1) * STAGING_BYTES;   // not the buffer of the store before
  }
  if (lane == 0) store_wait<0>();                        // shared memory must outlive the copy engine's reads
}

extern "C" __global__ void __launch_bounds__(384, 1)
grouped_mm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap a_scale_map,
           const __grid_constant__ TensorMap b_scale_map, const __grid_constant__ TensorMap lora_map, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 smem = uniform((u32)__cvta_generic_to_shared(memory));
  if (threadIdx.x < STAGES) {
    barrier_init(smem + BARRIERS_AT + 8 * threadIdx.x, 1);
    barrier_init(smem + BARRIERS_AT + 8 * (STAGES + threadIdx.x), CONSUMER_WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGS));
    if (threadIdx.x < 288) produce(Walk(p), &a_map, &b_map, &a_scale_map, &b_scale_map, &lora_map, memory, smem);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
    consume(p, &out_map, smem, warpgroup);
  }
}
