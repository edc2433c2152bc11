// A grouped weight, bf16, float32 or MX, to e4m3 with one exponent per row of each group, along its rows (ROWS_TOO) and transposed, along
// its columns (COLUMNS_TOO): what the GEMMs of forward and dgrad read.  Reference: rebase_reference.quantize_weight.
// Include after hopper.cuh, mx_bytes.cuh and quantize/tile.cuh.
//
// The bytes are those of MX blocks that are rebased to the largest exponent of their row or column.  That exponent needs the whole group,
// which no multiprocessor holds, so every tile of 32 ROW_WARPS x COLUMN_WARPS warps is read twice:
//   1. for the exponents: maxima over the tile's blocks, then over the group by atomic maxima of the scales themselves (float32 bits)
//   2. when all tiles of its group have done that: quantised, rebased, transposed, written
// Turns alternate between 1 and 2, and 2 lags behind by a group and LAG tiles, so that it reads what L2 still holds: memory sees one read.
// Blocks of threads draw turns in order, so a turn waits only for turns that other running blocks have drawn.

// Constants that the launcher puts in front, besides those of tile.cuh.
// COLUMNS_TOO: the transposed form is wanted.  ROUND: float32 is rounded to bf16 first.  MX: x is e4m3 with an e8m0 scale per 32 columns,
// which becomes bf16 in registers.  LAG: in tiles.  MIN_BLOCKS: on a multiprocessor.

struct Part { const u8* x; long long group_bytes, row_bytes; };
struct Weight {                                          // weights (G, R, C) concatenated along R; `split` rows of a group are the first's
  Part first, second;
  int split, R, C, G;
};

struct WeightScales { Part first, second; };             // of an MX weight: (G, R, C/32) bytes, concatenated along R as well

struct Results {                                         // contiguous; counters and scales are 0 when the kernel starts
  u8 *q, *qt;                                            // (G, R, C), (G, C, R)
  int *scale, *scale_t;                                  // (G, R), (G, C): bits of float32
  int *turn, *seen;                                      // (1,), and (G,): tiles of a group whose maxima are in its scales
};

struct Tile { int group, row, column; };

template <bool KEEP> __device__ __forceinline__ u64 policy() {                 // of L2
  u64 p;
  if (KEEP) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
  else asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}

__device__ __forceinline__ void load(u32 (&v)[8][4], const u8* at, long long row_bytes, bool valid, u64 policy) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
    if (valid)
      asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3]) : "l"(at + i * row_bytes), "l"(policy));
  }
}

// Of each row 8 bytes of e4m3 into two words, and their block's scale into the third.
__device__ __forceinline__ void load_mx(u32 (&v)[8][4], const u8* at, long long row_bytes, const u8* scale, long long scale_row_bytes,
                                        bool valid, u64 policy) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i][0] = v[i][1] = v[i][2] = 0;
    if (valid) {
      asm volatile("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                   : "=r"(v[i][0]), "=r"(v[i][1]) : "l"(at + i * row_bytes), "l"(policy));
      asm volatile("ld.global.nc.L2::cache_hint.u8 %0, [%1], %2;" : "=r"(v[i][2]) : "l"(scale + i * scale_row_bytes), "l"(policy));
    }
  }
}

__device__ __forceinline__ void load_tile(u32 (&v)[8][4], const Weight& w, const WeightScales& scales, Tile tile, Lane at, u64 policy) {
  const int r = tile.row + at.row, c = tile.column + at.column;
  const Part part = r < w.split ? w.first : w.second;
  const u8* from = part.x + tile.group * part.group_bytes + (r < w.split ? r : r - w.split) * part.row_bytes;
  if constexpr (MX) {
    const Part scale = r < w.split ? scales.first : scales.second;
    const u8* scale_from = scale.x + tile.group * scale.group_bytes + (r < w.split ? r : r - w.split) * scale.row_bytes;
    load_mx(v, from + c, part.row_bytes, scale_from + c / 32, scale.row_bytes, r < w.R && c < w.C, policy);
  } else {
    load(v, from + c * (16 / LANE_COLUMNS), part.row_bytes, r < w.R && c < w.C, policy);
  }
}

// What `load_mx` loaded, as pairs of bf16: e4m3 values, which bf16 holds, times their scale, rounded once.
__device__ __forceinline__ void dequantise(u32 (&v)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 codes[2] = {v[i][0], v[i][1]}, e = v[i][2];
    const u32 scale = e << 7 | ((e + 1) % 256 < 2 ? 0x40 : 0);                 // bf16 of 2^(e - 127): subnormal for 0, NaN for 255
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x[4];
      unpack4(codes[j], x);
      auto pair = [&](int k) { return __byte_perm(__float_as_uint(x[k]), __float_as_uint(x[k + 1]), 0x7632); };
      v[i][2 * j] = mul2(pair(0), scale | scale << 16), v[i][2 * j + 1] = mul2(pair(2), scale | scale << 16);
    }
  }
}

__device__ __forceinline__ void round_to_bf16(u32 (&v)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      u32 pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(__uint_as_float(v[i][j + 1])), "f"(__uint_as_float(v[i][j])));
      v[i][j] = low(pair), v[i][j + 1] = high(pair);
    }
}

__device__ __forceinline__ int bits_of(u32 exponent) { return exponent ? exponent << 23 : 0x00400000; }      // of 2^(exponent - 127)

// N words of each lane -> one: the maximum of word k over the lanes that differ in STEP, 2 STEP .. comes to the lane whose bits from
// STEP N/2 down to STEP say k.
template <int N, int STEP> __device__ __forceinline__ u32 fold(u32* words) {
  if constexpr (N > 1) {
    const bool upper = threadIdx.x & (STEP * N / 2);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const u32 mine = upper ? words[i + N / 2] : words[i], other = upper ? words[i] : words[i + N / 2];
      words[i] = larger(mine, __shfl_xor_sync(~0u, other, STEP * N / 2));
    }
    return fold<N / 2, STEP>(words);
  } else {
    return words[0];
  }
}

// A lane computes the factors of OWN row blocks and OWN column blocks; shuffles bring them to the other lanes that have a part of these.
// Of its 8 rows they are those from OWN * (lane % ROW_LANES) on, of its LANE_COLUMNS columns those from OWN * quarter on.
constexpr int OWN = FLOAT ? 1 : 2, ROW_LANES = 8 / OWN;

// Largest magnitudes of these blocks, as float32 bits.
__device__ __forceinline__ void own_maxima(const u32 (&v)[8][4], u32 (&rows)[OWN], u32 (&columns)[OWN]) {
  u32 of_rows[8], of_columns[4];
  lane_maxima(v, of_rows, of_columns);
  if (FLOAT) {
    rows[0] = fold<8, 1>(of_rows);
    columns[0] = fold<4, 8>(of_columns);
  } else {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = row_pair(of_rows[2 * i], of_rows[2 * i + 1]);
    const u32 row = fold<4, 1>(pairs), column = fold<4, 8>(of_columns);
    rows[0] = low(row), rows[OWN - 1] = high(row), columns[0] = low(column), columns[OWN - 1] = high(column);
  }
}

// The largest exponents of the tile's rows and columns, added to the group's; a block with a NaN or Inf takes no part.
__device__ __forceinline__ void find_exponents(const u32 (&v)[8][4], int* tops, const Weight& w, const Results& out, Tile tile, u32 tid) {
  const Lane at = lane_of(tid);
  u32 rows[OWN], columns[OWN];
  own_maxima(v, rows, columns);
  auto exponent = [](u32 largest) { return largest < 0x7F800000 ? block_scale<SCALING>(largest).exponent : 0; };
  auto add = [&](int place, u32 e) { atomicMax(tops + place, (int)e); };
  if (ROWS_TOO) {
    if (FLOAT) {
      add(at.row + at.group, exponent(rows[0]));
    } else {                                             // of the two blocks of the warp's rows
      u32 e = exponent(rows[0]) | exponent(rows[OWN - 1]) << 16;
      e = max2(e, __shfl_xor_sync(~0u, e, 4));
      add(at.row + at.group % 4 * 2 + at.group / 4, at.group / 4 ? e >> 16 : e & 0xFFFF);
    }
  }
  if (COLUMNS_TOO)
#pragma unroll
    for (int i = 0; i < OWN; ++i) add(ROWS + at.column + at.quarter * OWN + i, exponent(columns[i]));
  __syncthreads();
  if (ROWS_TOO)
    for (int i = tid; i < min(ROWS, w.R - tile.row); i += THREADS)
      atomicMax(out.scale + (long long)tile.group * w.R + tile.row + i, bits_of(tops[i]));
  if (COLUMNS_TOO)
    for (int i = tid; i < min(COLUMNS, w.C - tile.column); i += THREADS)
      atomicMax(out.scale_t + (long long)tile.group * w.C + tile.column + i, bits_of(tops[ROWS + i]));
  __threadfence();
}

// What a lane's own blocks are multiplied with: bits of a bf16, which brings a block to e4m3's range, above those of an f16, which brings
// it to the exponent of the row or column.
__device__ __forceinline__ void own_factors(u32 (&words)[OWN], const int* scale, bool valid) {
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int top = valid ? __ldcg(scale + i) >> 23 : 0;
    const auto [e, f] = block_scale<SCALING>(words[i]);
    words[i] = __byte_perm(shift_factor(top - int(e), e), f, 0x7610);
  }
}
// From the lane that computed it: the factor of `block`, one of this lane's rows or columns, for tile.cuh, and the whole word for `rebased`.
// The exponent is 0: the e8m0 bytes that tile.cuh makes of it are not used.
__device__ __forceinline__ BlockScale from_owner(const u32 (&words)[OWN], int block, u32 lane, u32& word) {
  word = __shfl_sync(~0u, words[block % OWN], lane);
  return BlockScale{0, FLOAT ? high(word) : word};
}
__device__ __forceinline__ u32 rebased(u32 packed, u32 word) { return shifted(packed, __byte_perm(word, word, 0x1010)); }

// Both forms of the tile, in shared memory.
__device__ __forceinline__ void quantise(const u32 (&v)[8][4], uint4* row_tile, uint4* column_tile, const Weight& w, const Results& out,
                                         Tile tile, u32 tid) {
  const Lane at = lane_of(tid);
  u32 rows[OWN], columns[OWN], word[2];
  own_maxima(v, rows, columns);
  const int r = tile.row + at.row + tid % ROW_LANES * OWN, c = tile.column + at.column + at.quarter * OWN;
  if (ROWS_TOO) own_factors(rows, out.scale + (long long)tile.group * w.R + r, r < w.R);
  if (COLUMNS_TOO) own_factors(columns, out.scale_t + (long long)tile.group * w.C + c, c < w.C);
  const u32 lane = tid % 32;
  if (ROWS_TOO)
    along_rows(v, [&](int i) { return from_owner(rows, i, lane / ROW_LANES * ROW_LANES + i / OWN, word[0]); }, row_tile, at,
               [&](int, u32 packed) { return rebased(packed, word[0]); });
  if (COLUMNS_TOO)
    along_columns(v, [&](int j) { return from_owner(columns, j, lane % 8 + j / OWN * 8, word[j % 2]); }, column_tile, at,
                  [&](int j, u32 packed) { return rebased(packed, word[j % 2]); });
}

__device__ __forceinline__ void write(const uint4* row_tile, const uint4* column_tile, const Weight& w, const Results& out, Tile tile, u32 tid) {
  const long long start = (long long)tile.group * w.R * w.C;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS / 2; ++i) {
    if (ROWS_TOO) {
      const int r = tile.row + tid / ROW_CHUNKS + i * (THREADS / ROW_CHUNKS), c = tile.column + tid % ROW_CHUNKS * 16;
      if (r < w.R && c < w.C) __stcs((uint4*)(out.q + start + (long long)r * w.C + c), row_tile[row_place(tid) + i * THREADS]);
    }
    if (COLUMNS_TOO) {
      const u32 c = tid / COLUMN_CHUNKS + i * (THREADS / COLUMN_CHUNKS), m = tid % COLUMN_CHUNKS;
      if (tile.column + c < w.C && tile.row + m * 16 < w.R)
        __stcs((uint4*)(out.qt + start + (long long)(tile.column + c) * w.R + tile.row + m * 16),
               column_tile[c * COLUMN_CHUNKS + (m ^ (c / LANE_COLUMNS % 8))]);
    }
  }
}

enum Kind { END, FIND, WRITE };                          // of a turn

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) quantize_weight(Weight w, Results out, WeightScales scales) {
  extern __shared__ uint4 memory[];
  uint4 *column_tile = memory, *row_tile = column_tile + (COLUMNS_TOO ? COLUMNS * COLUMN_CHUNKS : 0);
  int* tops = (int*)(row_tile + (ROWS_TOO ? ROWS * ROW_CHUNKS : 0));
  __shared__ int4 drawn[2];                              // a turn's group, row, column and kind; this one's and the next one's

  const int across = (w.C + COLUMNS - 1) / COLUMNS, tiles = across * ((w.R + ROWS - 1) / ROWS), all = w.G * tiles, lag = tiles + LAG;
  auto draw = [&](int place) {                           // by thread 0
    int turn, number;
    do {                                                 // the first turns write nothing yet, the last ones find nothing any more
      turn = atomicAdd(out.turn, 1);
      number = turn % 2 ? turn / 2 - lag : turn / 2;
    } while (turn < 2 * (all + lag) && (number < 0 || number >= all));
    const int in_group = number % tiles;
    drawn[place] = int4{number / tiles, in_group / across * ROWS, in_group % across * COLUMNS,
                        turn >= 2 * (all + lag) ? END : turn % 2 ? WRITE : FIND};
  };
  auto read = [&](int place) { return load_shared_4((u32)__cvta_generic_to_shared(drawn + place)); };      // again where it is needed

  if (threadIdx.x == 0) draw(0);
  for (int place = 0;; place ^= 1) {
    u32 tid = threadIdx.x;
    asm volatile("" : "+r"(tid));                        // addresses are recomputed in every turn: kept, they would spill
    __syncthreads();
    const int4 turn = read(place);
    const u32 kind = uniform(turn.w);
    if (kind == END) break;
    u32 v[8][4];
    load_tile(v, w, scales, Tile{turn.x, turn.y, turn.z}, lane_of(tid), kind == WRITE ? policy<false>() : policy<true>());
    if (kind == FIND) {
      for (int i = tid; i < ROWS + COLUMNS; i += THREADS) tops[i] = 0;
    } else if (tid == 0) {
      int seen;
      do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(seen) : "l"(out.seen + turn.x) : "memory");
      while (seen < tiles);
    }
    __syncthreads();
    if (FLOAT && ROUND) round_to_bf16(v);
    if constexpr (MX) dequantise(v);
    if (kind == FIND) find_exponents(v, tops, w, out, Tile{turn.x, turn.y, turn.z}, tid);
    else quantise(v, row_tile, column_tile, w, out, Tile{turn.x, turn.y, turn.z}, tid);
    __syncthreads();
    if (tid == 0) draw(place ^ 1);
    const int4 done = read(place);
    if (kind == WRITE) write(row_tile, column_tile, w, out, Tile{done.x, done.y, done.z}, tid);
    else if (tid == 0) atomicAdd(out.seen + done.x, 1);
  }
}
