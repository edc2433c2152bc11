// Grouped FP8 (e4m3) matrix products for Hopper: one persistent, warp-specialised kernel. Behind hopper.cuh.
//
//   forward  out[m, n]    = sum_k A[m, k] B[g, n, k]   A (M, K), B (G, N, K); group g owns rows   ends[g-1] .. ends[g]
//   WGRAD    out[g, n, k] = sum_t A[n, t] B[k, t]      A (N, T), B (K, T);    group g owns tokens ends[g-1] .. ends[g]
//            (below, A's rows are called rows and B's rows columns, as they are of out)
//
// Both operands are contiguous along the summed dimension, which the kernel walks 128 bytes at a time. Rows past the last
// end belong to a group without weights and come out as zero, like a wgrad's groups without tokens.
//
// A block of threads holds 1 producer warp (it fills a ring of shared-memory stages by TMA) and 2 consumer warpgroups (wgmma,
// sums in registers). A tile has 128 x 256 outputs; each consumer owns two units of 64 x 128 of it. Tiles come in two shapes
// of equal cost (a wgrad also splits its last few into their units, one for a block):
//
//     wide  128 rows x 256 columns            tall  256 rows x 128 columns (the last column of tiles when N % 256 is
//                                                   1 .. 128, so that N = 1408 wastes nothing)
//             unit 0    unit 1                        +--------+
//           +---------+---------+                     |        | unit 0 of consumer 0
//           |         |         | consumer 0          |        | unit 0 of consumer 1
//           |         |         | consumer 1          |        | unit 1 of consumer 0
//           +---------+---------+                     |        | unit 1 of consumer 1
//                                                     +--------+
//
// A stage is three blocks of 128 rows x 128 bytes: block 0 of the operand that both units share, 1 and 2 of the other.
//
// ROADS: a row of A has one scale, applied after the sum (the fast road), or, where its scale is negative, one per 128 of K,
// applied while summing (the robust road). A tile with one such row or more takes the robust road. The producer looks.

// ---------------------------------------------------------------- options; the launcher puts its own in front

#ifndef OPTIONS
constexpr bool WGRAD = false, ROADS = true, FLOAT_OUT = false, ACCUMULATE = false;
constexpr int PROMOTE = 128, STAGES = 3, STAGING = 2, BAND = 16, PRODUCER_REGS = 40, CONSUMER_REGS = 232;
#endif
// FLOAT_OUT: float32 output.  ACCUMULATE: added to what is there.
// PROMOTE: the tensor cores' sums (about 14 bits) are added to float32 registers every 128 or 256 of K; 0: never.
// STAGING: output buffers per warp, 1 or 2.  BAND: row tiles walked together, so that A and B stay in L2.

constexpr int STEPS = PROMOTE == 256 ? 2 : 1;            // stages per promotion
constexpr int LEAST_STEPS = STEPS == 2 ? 4 : 3;          // stages per tile at least; those past the end are zeros
constexpr int CONSUMER_WARPS = 8;
static_assert(!ROADS || PROMOTE == 128, "a scale per 128 of K wants a promotion every 128");

// Shared memory, in bytes from its start.
constexpr int BLOCK = 128 * 128, STAGE = 3 * BLOCK;
constexpr int STAGING_BYTES = 16 * 128 * 2;              // 16 rows x 128 columns of bf16
constexpr int STAGING_AT = STAGES * STAGE;
constexpr int COLUMN_SCALES = 256;                       // floats of a tile, two tiles
constexpr int COLUMN_SCALES_AT = STAGING_AT + CONSUMER_WARPS * STAGING * STAGING_BYTES;
constexpr int ROW_SCALES = 132;                          // ROADS, floats: 128 rows from any start, aligned down to 4
constexpr int ROW_SCALES_AT = COLUMN_SCALES_AT + 2 * 4 * COLUMN_SCALES;
constexpr int ROW_SCALES_BYTES = 640;                    // rounded up to the 128 bytes that TMA wants
constexpr int NOTES_AT = ROW_SCALES_AT + (ROADS ? STAGES * 2 * ROW_SCALES_BYTES : 0);   // three tiles, see Note
constexpr int BARRIERS_AT = NOTES_AT + 3 * 16;

// ---------------------------------------------------------------- which tile comes next

struct Problem {
  const float* a_scale;              // forward: (M,)      WGRAD: (G, rows)
  const int* ends;                   // (G,)
  const int* order;                  // WGRAD: (G,) the groups, largest first
  void* out;                         // forward: (M, N)    WGRAD: (G, rows, N)
  int groups, rows, N, K;            // rows: M, or rows of A; K: the summed dimension of the operands
};

struct Tile {
  int a_row, b_row;                  // where its operand rows start
  int out_row, column;               // where its outputs start, in out as a matrix of N columns
  int group, rows;                   // rows: how many of them exist; may exceed the tile
  int k, steps;                      // first element of the summed dimension, number of 128s
  bool tall, half, empty;            // half: unit 0 alone; empty: nothing to sum, zeros are written
};

// What consumers must know of a tile: out_row, column, rows, and 16 x stages + 8 x spans + 4 x half + 2 x empty + tall; 0 at the end.
typedef int4 Note;

// Block b of n takes tiles b, 2n-1-b, 2n+b, 4n-1-b, ...: a list of falling costs comes out balanced without
// communication. Example, n = 3: block 0 takes 0 5 6 11, block 2 takes 2 3 8 9.
struct Walk {
  const Problem& p;
  int round = 0, group = 0, first = 0, begin = 0, end;   // first: tiles before this group; begin .. end: what it owns

  __device__ __forceinline__ explicit Walk(const Problem& p) : p(p), end(end_of(0)) {}

  __device__ __forceinline__ int end_of(int g) const {   // forward: group G owns the rows past the last end
    if constexpr (WGRAD) return p.ends[g];
    return g < p.groups ? min(p.ends[g], p.rows) : p.rows;
  }

  __device__ __forceinline__ bool next(Tile& t) {
    const int n = gridDim.x, b = blockIdx.x;
    int tile = round * n + (round & 1 ? n - 1 - b : b), unit = 0;
    ++round;
    t.half = false;
    const int wide = p.N / 256 + (p.N % 256 > 128), tall = p.N % 256 > 0 && p.N % 256 <= 128;   // columns of tiles
    int rows = p.rows, row_tiles, tiles;
    auto count = [&] { row_tiles = (rows + 127) / 128, tiles = row_tiles * wide + tall * ((row_tiles + 1) / 2); };
    if constexpr (WGRAD) {
      count();
      const int left = p.groups * tiles % n, whole = p.groups * tiles - left;
      if (tile >= whole && 2 * left <= n) {              // so few are left: a unit for a block, not two
        t.half = true, unit = (tile - whole) % 2, tile = whole + (tile - whole) / 2;
      }
      const int rank = tile / tiles;
      if (rank >= p.groups) return false;
      group = p.order[rank], first = rank * tiles, begin = group ? p.ends[group - 1] : 0, end = p.ends[group];
    } else {
      for (;; first += tiles, begin = end, end = end_of(group)) {
        rows = max(end - begin, 0), count();
        if (tile < first + tiles) break;
        if (++group > p.groups) return false;
      }
    }
    const int band_tiles = BAND * wide + tall * (BAND / 2), band = (tile - first) / band_tiles;
    const int i = tile - first - band * band_tiles, band_rows = min(BAND, row_tiles - band * BAND), column = i / band_rows;
    t.tall = column >= wide;
    const int row = 128 * (band * BAND + (t.tall ? 2 * (i - wide * band_rows) + unit : i - column * band_rows));
    t.column = 256 * min(column, wide) + (t.tall ? 0 : 128 * unit);
    t.group = group, t.rows = rows - row;
    t.a_row = WGRAD ? row : begin + row, t.b_row = (WGRAD ? 0 : group * p.N) + t.column;
    t.out_row = WGRAD ? group * rows + row : t.a_row;
    t.empty = WGRAD ? end == begin : group == p.groups;
    t.k = WGRAD ? begin : 0, t.steps = t.empty ? 0 : ((WGRAD ? end - begin : p.K) + 127) / 128;
    return true;
  }
};

struct Ring {                                            // stage and phase of the ring of buffers
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance() { if (++stage == STAGES) stage = 0, phase ^= 1; }
};

// ---------------------------------------------------------------- producer: one warp, of which one thread asks the copy engine

// Why places for three notes and for two tiles' column scales are enough: the producer is at most STAGES stages ahead of
// the slower consumer, and a tile has 3 or more. So when it writes the note of tile t + 3, with that tile's first stage,
// or the scales of tile t + 2, with its last one, every consumer has released a stage of tile t + 1 and is done with t.
static_assert(STAGES <= 5, "with more stages, tile t may still be in use");
__device__ __forceinline__ void produce(Walk walk, const TensorMap* a_map, const TensorMap* b_map, const TensorMap* a_scale_map,
                                        const TensorMap* b_scale_map, unsigned char* memory, u32 smem) {
  const int lane = threadIdx.x % 32;
  const u32 full = smem + BARRIERS_AT, empty = full + 8 * STAGES;
  Note* notes = (Note*)(memory + NOTES_AT);
  Ring ring;
  int count = 0;
  for (Tile t; walk.next(t); ++count) {
    bool spans = false;                                  // a row of this tile has scales per 128 of K
    if constexpr (ROADS) {
      if (!t.empty)
        for (int row = lane; row < min(t.rows, t.tall ? 256 : 128); row += 32) spans |= __ldg(walk.p.a_scale + t.a_row + row) < 0;
      spans = __any_sync(~0u, spans);
    }
    const TensorMap *map_0 = t.tall ? b_map : a_map, *map_12 = t.tall ? a_map : b_map;
    const int row_0 = t.tall ? t.b_row : t.a_row, row_12 = t.tall ? t.a_row : t.b_row;
    const int stages = max(LEAST_STEPS, (t.steps + STEPS - 1) / STEPS * STEPS);
    for (int i = 0; i < stages; ++i, ring.advance()) {
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      if (lane != 0) continue;
      const u32 barrier = full + 8 * ring.stage, to = smem + ring.stage * STAGE;
      const int k = i < t.steps ? t.k + 128 * i : walk.p.K;        // past the end TMA gives zeros
      const bool last = i == stages - 1;
      if (i == 0) notes[count % 3] = Note{t.out_row, t.column, t.rows, 16 * stages + 8 * spans + 4 * t.half + 2 * t.empty + t.tall};
      barrier_expect(barrier, STAGE - t.half * BLOCK + last * 4 * COLUMN_SCALES + spans * (t.tall ? 2 : 1) * 4 * ROW_SCALES);
      load_box(to, map_0, k, row_0, barrier);
      load_box(to + BLOCK, map_12, k, row_12, barrier);
      if (!t.half) load_box(to + 2 * BLOCK, map_12, k, row_12 + 128, barrier);
      if (last) load_box(smem + COLUMN_SCALES_AT + count % 2 * 4 * COLUMN_SCALES, b_scale_map, t.column,
                         t.empty ? walk.p.groups : t.group, barrier);
      if (ROADS && spans) {                              // an unaligned column is an illegal instruction
        const u32 scales = smem + ROW_SCALES_AT + ring.stage * 2 * ROW_SCALES_BYTES;
        load_box(scales, a_scale_map, t.a_row & ~3, i, barrier);
        if (t.tall) load_box(scales + ROW_SCALES_BYTES, a_scale_map, (t.a_row & ~3) + 128, i, barrier);
      }
    }
  }
  barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
  if (lane != 0) return;
  notes[count % 3] = Note{0, 0, 0, 0};
  barrier_arrive(full + 8 * ring.stage);
}

// ---------------------------------------------------------------- consumers

// One warp's part of a unit, 16 rows x 128 columns, to out at row y, column x; `rows` of it exist. A thread holds
// d[4j + 0..1] of row lane / 4 and d[4j + 2..3] of row lane / 4 + 8, at columns 8j + 2 (lane % 4) + 0..1.
__device__ __forceinline__ void store_unit(const float (&d)[64], const Problem& p, const TensorMap* map, int y, int x, int rows,
                                           float scale_0, float scale_8, u32 column_scales, u32 staging) {
  const int lane = threadIdx.x % 32, mine = 2 * (lane % 4);
  const u32 scales = column_scales + 4 * mine;
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
      const float v[4] = {e[0] * scale_0 * s.x, e[1] * scale_0 * s.y, e[2] * scale_8 * s.x, e[3] * scale_8 * s.y};
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
  for (int count = 0;; ++count) {
    if (!ready) barrier_wait(full + 8 * ring.stage, ring.phase);
    ready = true;
    const Note note = load_shared_4(smem + NOTES_AT + count % 3 * 16);
    const int out_row = uniform(note.x), column = uniform(note.y), rows = uniform(note.z), rest = uniform(note.w);
    if (rest == 0) break;
    const bool tall = rest & 1, nothing = rest & 2, half = rest & 4, spans = rest & 8;
    const u32 a_unit = tall ? BLOCK / 16 : 0, b_unit = BLOCK / 16 - a_unit;            // from unit 0 to unit 1
    const u32 a_first = smem / 16 + 64 * 128 / 16 * consumer + a_unit, b_first = smem / 16 + b_unit;
    const int unit_row = tall ? 128 : 0, unit_column = 128 - unit_row;
    float scale[2][2];                                   // [unit][row lane / 4, row lane / 4 + 8]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + i / 2 * unit_row + lane / 4 + i % 2 * 8;
      scale[i / 2][i % 2] = row < rows && !nothing ? __ldg(p.a_scale + out_row + row) : 0;
    }

    auto tile = [&](auto robust) {                       // robust: rows of negative scale take theirs from each stage
      constexpr bool SPAN = robust;
      bool wide[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) wide[i / 2][i % 2] = SPAN && scale[i / 2][i % 2] < 0;

      auto store = [&](int unit) {
        store_unit(sum[unit], p, out_map, out_row + warp_row + unit * unit_row, column + unit * unit_column,
                   rows - warp_row - unit * unit_row, SPAN ? 1 : scale[unit][0], SPAN ? 1 : scale[unit][1],
                   smem + COLUMN_SCALES_AT + 4 * (count % 2 * COLUMN_SCALES + unit * unit_column),
                   staging + unit % STAGING * STAGING_BYTES);
      };
      auto step = [&](auto which) {
        constexpr bool first = which == FIRST, last = which == LAST;
        u32 at[STEPS], barrier[STEPS];
        auto multiply = [&](float (&d)[64], int unit, bool add) {       // d (+)= over the STEPS stages
#pragma unroll
          for (int i = 0; i < STEPS; ++i) {
            if (unit == 0) {
              if (i > 0 || !ready) barrier_wait(full + 8 * ring.stage, ring.phase);
              if constexpr (SPAN) {
                const u32 scales = smem + ROW_SCALES_AT + ring.stage * 2 * ROW_SCALES_BYTES
                                   + 4 * (out_row % 4 + warp_row + lane / 4);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                  load_shared_if(scale[j / 2][j % 2], wide[j / 2][j % 2],
                                 scales + (tall ? j / 2 * ROW_SCALES_BYTES : 0) + j % 2 * 32);
              }
              at[i] = uniform(ring.stage * (STAGE / 16)), barrier[i] = empty + 8 * ring.stage;
              ring.advance();
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
              wgmma(d, at[i] + a_first + unit * a_unit + 2 * k, at[i] + b_first + unit * b_unit + 2 * k, add || i + k > 0);
            wgmma_commit();
          }
        };
        auto release = [&](float (&d)[64]) {
          wgmma_wait<STEPS - 1>(d);
          if (lane == 0) barrier_arrive(barrier[0]);
          if constexpr (STEPS == 2) {
            wgmma_wait<0>(d);
            if (lane == 0) barrier_arrive(barrier[1]);
          }
          ready = barrier_test(full + 8 * ring.stage, ring.phase);      // asked before the additions, which hide it
        };
        auto promote = [&](int unit) {
#pragma unroll
          for (int i = 0; i < 64; ++i)
            sum[unit][i] = SPAN ? fmaf(part[i], scale[unit][i / 2 % 2], sum[unit][i]) : sum[unit][i] + part[i];
        };
        if constexpr (which == HALF) {
          multiply(part, 0, false);
          release(part);
          promote(0);
        } else if constexpr (PROMOTE && !first) {        // one consumer adds beside the other one's wgmma
          multiply(part, 0, false);
          wgmma_wait<0>(part);
          promote(0);
          multiply(part, 1, false);
          if constexpr (last) store(0);                  // hidden behind unit 1's wgmma
          release(part);
          promote(1);
        } else {                                         // straight into the sums
          multiply(sum[0], 0, !first);
          multiply(sum[1], 1, !first);
          wgmma_wait<STEPS>(sum[0]);
          if constexpr (last) store(0);
          release(sum[1]);
          if constexpr (SPAN)
#pragma unroll
            for (int i = 0; i < 128; ++i) sum[i / 64][i % 64] *= scale[i / 64][i / 2 % 2];
        }
        if constexpr (last) store(1);
      };
      int steps = rest / (16 * STEPS);
      if (WGRAD && half) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[0][i] = 0;
        for (; steps > 0; --steps) step(Constant<HALF>());
        store(0);
        return;
      }
      step(Constant<FIRST>());
      for (; steps > 2; --steps) step(Constant<MIDDLE>());
      step(Constant<LAST>());
    };
    if (ROADS && spans) tile(Constant<ROADS>());
    else tile(Constant<0>());
  }
  if (lane == 0) store_wait<0>();                        // shared memory must outlive the copy engine's reads
}

extern "C" __global__ void __launch_bounds__(384, 1)
grouped_mm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap a_scale_map,
           const __grid_constant__ TensorMap b_scale_map, const __grid_constant__ Problem p) {
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
    if (threadIdx.x < 288) produce(Walk(p), &a_map, &b_map, &a_scale_map, &b_scale_map, memory, smem);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
    consume(p, &out_map, smem, warpgroup);
  }
}
