// A matrix to MX along its columns (32x1, transposed) and, with ROWS_TOO, along its rows (1x32) as well, from one read.
// Include after hopper.cuh and mx_bytes.cuh; the references are reference.quantize_columnwise and reference.quantize_rowwise_columnwise.
//
// A warp owns 32 rows x 128 bytes of columns (8 lanes), so both kinds of blocks lie inside a warp and shuffles find their maxima.
// A block of threads walks over a region of row_steps x column_steps tiles; a tile is ROW_WARPS x COLUMN_WARPS warps.
//   load      a lane takes 16 bytes of 8 consecutive rows; those of the next tile are asked for before this one is stored
//   scale     times a power of two: exact in pairs of bf16; e4m3 bytes are packed from 4 columns of a row or from 4 rows of a column,
//             which makes the transpose of single bytes free
//   exchange  through shared memory, so that an output row gets ROWS or COLUMNS contiguous bytes; the XOR keeps it free of bank conflicts
//   scales    wait in shared memory: a region writes its piece of a row of scales at once (4 bytes at a time cost a tenth of the speed)

// Constants that the launcher puts in front.  SCALING: the rounding mode.
// ROW_WARPS, COLUMN_WARPS: of a tile.
// FLOAT: x is float32, else bf16.  ROW_STEPS, COLUMN_STEPS: the most of a region.  BAND: regions above each other that go first.
// MIN_BLOCKS: on a multiprocessor.

constexpr int LANE_COLUMNS = FLOAT ? 4 : 8;
constexpr int ROWS = 32 * ROW_WARPS, COLUMNS = 8 * LANE_COLUMNS * COLUMN_WARPS, THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int ROW_CHUNKS = COLUMNS / 16, COLUMN_CHUNKS = ROWS / 16;            // 16 bytes of an output row of each form
constexpr int TILE_BLOCKS = COLUMNS / 32;
constexpr int ROW_BYTES = COLUMN_STEPS * TILE_BLOCKS, COLUMN_BYTES = ROW_STEPS * ROW_WARPS;   // scales of a region's row and of its column
constexpr int ROW_PITCH = ROW_BYTES + 4, COLUMN_PITCH = COLUMN_BYTES + 4;                     // free of bank conflicts
static_assert(COLUMN_CHUNKS >= 8 && (!ROWS_TOO || ROW_CHUNKS >= 8 && THREADS / ROW_CHUNKS % 32 == 0), "the XOR goes over 8 chunks");

__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 o; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(o) : "r"(a), "r"(b)); return o; }
__device__ __forceinline__ u32 low(u32 w) { return w << 16; }                  // one bf16 of a pair, as float32 bits
__device__ __forceinline__ u32 high(u32 w) { return w & 0xFFFF0000u; }
__device__ __forceinline__ u32 times(u32 a, u32 b) { return __float_as_uint(__fmul_rn(__uint_as_float(a), __uint_as_float(b))); }

struct Lane { u32 row, column, group, quarter; };       // first of 8 rows and of LANE_COLUMNS columns in the tile, and which of its warp
__device__ __forceinline__ Lane lane_of(u32 tid) {
  const u32 warp = tid / 32, group = tid % 8, quarter = tid % 32 / 8;
  return {warp / COLUMN_WARPS * 32 + quarter * 8, (warp % COLUMN_WARPS * 8 + group) * LANE_COLUMNS, group, quarter};
}

__device__ __forceinline__ void load(u32 (&v)[8][4], const u8* at, long long row_bytes, bool valid) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
    if (valid)
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3]) : "l"(at + i * row_bytes));
  }
}

// Where 16 bytes of the row form lie: the chunks that the warp's quarters write at once fall into different banks.
__device__ __forceinline__ u32 row_place(u32 chunk) { return chunk ^ (chunk / ROW_CHUNKS / 8 * (LANE_COLUMNS / 2) % 8); }

// Largest magnitudes: of a lane's 8 rows over their blocks of 32 columns (float32 bits), of its columns over its own 8 rows.
__device__ __forceinline__ void maxima(const u32 (&v)[8][4], u32 (&of_rows)[8], u32 (&of_columns)[4]) {
  const u32 mask = FLOAT ? 0x7FFFFFFF : 0x7FFF7FFF;
#pragma unroll
  for (int j = 0; j < 4; ++j) of_columns[j] = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u32 m[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      m[j] = v[i][j] & mask;
      of_columns[j] = FLOAT ? max(of_columns[j], m[j]) : max2(of_columns[j], m[j]);
    }
    of_rows[i] = FLOAT ? max(max(m[0], m[1]), max(m[2], m[3])) : max2(max2(m[0], m[1]), max2(m[2], m[3]));
  }
#pragma unroll
  for (int i = 0; i < (ROWS_TOO ? 8 : 0); i += 2) {
    if (FLOAT) {
#pragma unroll
      for (int k = i; k < i + 2; ++k)
#pragma unroll
        for (int step = 1; step < 8; step *= 2) of_rows[k] = max(of_rows[k], __shfl_xor_sync(~0u, of_rows[k], step));
    } else {                                             // two rows in a word are half the shuffles
      u32 a = max2(__byte_perm(of_rows[i], of_rows[i + 1], 0x5410), __byte_perm(of_rows[i], of_rows[i + 1], 0x7632));
      a = max2(a, __shfl_xor_sync(~0u, a, 1));
      a = max2(a, __shfl_xor_sync(~0u, a, 2));
      of_rows[i] = low(a), of_rows[i + 1] = high(a);
    }
  }
}

// Blocks of 32 columns: 8 rows of this lane into `tile`, their e8m0 bytes into `scales`.
__device__ __forceinline__ void along_rows(const u32 (&v)[8][4], const u32 (&largest)[8], uint4* tile, u8* scales, Lane at) {
  const u32 first = row_place(at.row * ROW_CHUNKS + at.column / 16);
  u32 bytes[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto [e, f] = block_scale<SCALING>(largest[i]);
    const u32 chunk = first + i * ROW_CHUNKS;
    const u32(&x)[4] = v[i];
    if (FLOAT) {
      ((u32*)tile)[chunk * 4 + at.group % 4] = pack4(times(x[0], f), times(x[1], f), times(x[2], f), times(x[3], f));
    } else {
      const u32 f2 = __byte_perm(f, f, 0x3232), a = mul2(x[0], f2), b = mul2(x[1], f2), c = mul2(x[2], f2), d = mul2(x[3], f2);
      ((uint2*)tile)[chunk * 2 + at.group % 2] = uint2{pack4(low(a), high(a), low(b), high(b)), pack4(low(c), high(c), low(d), high(d))};
    }
    bytes[i / 4] |= e << 8 * (i % 4);
  }
  u8* to = scales + (at.row + at.group) * ROW_PITCH + at.column / 32;    // one row for each lane of the 8
  const u32 mine = __byte_perm(bytes[0], bytes[1], at.group) & 0xFF;
  if (FLOAT) {
    *to = mine;
  } else {                                               // two blocks lie in these 8 lanes: half of the other's rows are this lane's
    const u32 other = __shfl_xor_sync(~0u, __byte_perm(bytes[0], bytes[1], at.group ^ 4) & 0xFF, 4);
    *(unsigned short*)(to - at.group / 4) = at.group < 4 ? mine | other << 8 : other | mine << 8;
  }
}

// Blocks of 32 rows: this lane's columns, transposed, into `tile`, their e8m0 bytes into `scales`.
__device__ __forceinline__ void along_columns(const u32 (&v)[8][4], const u32 (&of_lane)[4], uint4* tile, u8* scales, Lane at) {
  const u32 chunk = at.row / 16 ^ at.group, half = at.quarter % 2;      // group is column / LANE_COLUMNS % 8
  u32 bytes[2] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 m = of_lane[j], w[8];
#pragma unroll
    for (int step = 8; step < 32; step *= 2) {
      const u32 other = __shfl_xor_sync(~0u, m, step);
      m = FLOAT ? max(m, other) : max2(m, other);
    }
    if (FLOAT) {
      const auto [e, f] = block_scale<SCALING>(m);
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = times(v[i][j], f);
      uint2* to = (uint2*)tile + ((at.column + j) * COLUMN_CHUNKS + chunk) * 2 + half;
      *to = uint2{pack4(w[0], w[1], w[2], w[3]), pack4(w[4], w[5], w[6], w[7])};
      bytes[0] |= e << 8 * j;
    } else {
      const BlockScale a = block_scale<SCALING>(low(m)), b = block_scale<SCALING>(high(m));
      const u32 f2 = __byte_perm(a.factor, b.factor, 0x7632);
      uint2* to = (uint2*)tile + ((at.column + j * 2) * COLUMN_CHUNKS + chunk) * 2 + half;
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = mul2(v[i][j], f2);
      *to = uint2{pack4(low(w[0]), low(w[1]), low(w[2]), low(w[3])), pack4(low(w[4]), low(w[5]), low(w[6]), low(w[7]))};
      to += COLUMN_CHUNKS * 2;
      *to = uint2{pack4(high(w[0]), high(w[1]), high(w[2]), high(w[3])), pack4(high(w[4]), high(w[5]), high(w[6]), high(w[7]))};
      bytes[j / 2] |= (a.exponent | b.exponent << 8) << 16 * (j % 2);
    }
  }
  constexpr int MINE = LANE_COLUMNS / 4;                 // the 4 quarters know the same bytes
  const u32 first = at.quarter * MINE, mine = __byte_perm(bytes[0], bytes[1], first | (first + 1) << 4);
#pragma unroll
  for (int i = 0; i < MINE; ++i) scales[(at.column + first + i) * COLUMN_PITCH] = mine >> 8 * i;
}

// `count` rows of scales, PITCH bytes apart in shared memory, to rows of `out`; `bytes` (at most MOST) of each.
// A row of scales comes from several regions, 16 or 32 bytes at a time.  Its cache lines are marked to stay until they are whole:
// written back in parts they cost 2 to 3% of the speed.
template <int PITCH, int MOST>
__device__ __forceinline__ void write_scales(u8* out, long long out_row, const u8* staged, int count, int bytes, u32 tid) {
  if ((out_row | bytes | (long long)out) % 4 == 0) {
    u64 stay;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stay));
#pragma unroll 1
    for (int i = tid; i < count * (MOST / 4); i += THREADS) {
      const int r = i / (MOST / 4), b = i % (MOST / 4) * 4;
      if (b < bytes)
        asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
                     ::"l"(out + r * out_row + b), "r"(*(const u32*)(staged + r * PITCH + b)), "l"(stay) : "memory");
    }
  } else {
#pragma unroll 1
    for (int i = tid; i < count * MOST; i += THREADS) {
      const int r = i / MOST, b = i % MOST;
      if (b < bytes) out[r * out_row + b] = staged[r * PITCH + b];
    }
  }
}

// x (batches, R, C): x_batch and x_row in bytes, columns contiguous, 16-byte aligned.  R a multiple of 32, with ROWS_TOO C as well.
// q (.., R, C), s (.., R, C/32), qt (.., C, R), st (.., C, R/32), contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
quantize_rowwise_columnwise(const u8* __restrict__ x, long long x_batch, long long x_row, u8* __restrict__ q, u8* __restrict__ s, u8* __restrict__ qt,
              u8* __restrict__ st, int R, int C, int row_steps, int column_steps) {
  extern __shared__ uint4 memory[];
  uint4 *column_tile = memory, *row_tile = column_tile + COLUMNS * COLUMN_CHUNKS;
  u8* column_scales = (u8*)(row_tile + (ROWS_TOO ? ROWS * ROW_CHUNKS : 0));
  u8* row_scales = column_scales + COLUMN_STEPS * COLUMNS * COLUMN_PITCH;

  const u32 across = (C + COLUMNS * column_steps - 1) / (COLUMNS * column_steps), down = (R + ROWS * row_steps - 1) / (ROWS * row_steps);
  const u32 batch_regions = across * down, b = blockIdx.x % batch_regions, band = b / (BAND * across), in_band = b % (BAND * across);
  const u32 height = min((u32)BAND, down - band * BAND);
  const int first_row = (band * BAND + in_band % height) * (ROWS * row_steps), first_column = in_band / height * (COLUMNS * column_steps);
  const long long batch = blockIdx.x / batch_regions;
  x += batch * x_batch;
  q += batch * R * C, qt += batch * R * C;
  s += batch * R * (C / 32), st += batch * C * (R / 32);
  const int steps = min(column_steps, (C - first_column + COLUMNS - 1) / COLUMNS);
  const int last_row = min(first_row + ROWS * row_steps, R);

  u32 v[8][4];
  int row = first_row, step = 0, row_step = 0;
  {
    const Lane at = lane_of(threadIdx.x);
    const int r = first_row + at.row, c = first_column + at.column;
    load(v, x + r * x_row + c * (16 / LANE_COLUMNS), x_row, r < R && c < C);
  }
  while (true) {
    u32 tid = threadIdx.x;
    asm volatile("" : "+r"(tid));                        // addresses are recomputed in every turn: kept, they would spill
    const Lane at = lane_of(tid);
    const int column = first_column + step * COLUMNS;
    u32 of_rows[8], of_columns[4];
    maxima(v, of_rows, of_columns);
    if (ROWS_TOO) along_rows(v, of_rows, row_tile, row_scales + step * TILE_BLOCKS, at);
    along_columns(v, of_columns, column_tile, column_scales + step * COLUMNS * COLUMN_PITCH + row_step * ROW_WARPS + at.row / 32, at);
    __syncthreads();

    const bool row_ends = step + 1 == steps, ends = row_ends && row + ROWS >= last_row;
    if (!ends) {
      const int r = row + (row_ends ? ROWS : 0) + at.row, c = (row_ends ? first_column : column + COLUMNS) + at.column;
      load(v, x + r * x_row + c * (16 / LANE_COLUMNS), x_row, r < R && c < C);
    }
    if (ROWS_TOO && row_ends)
      write_scales<ROW_PITCH, ROW_BYTES>(s + (long long)row * (C / 32) + first_column / 32, C / 32, row_scales, min(ROWS, R - row),
                                         min(column_steps * TILE_BLOCKS, (C - first_column) / 32), tid);
    if (ends)
      write_scales<COLUMN_PITCH, COLUMN_BYTES>(st + (long long)first_column * (R / 32) + first_row / 32, R / 32, column_scales,
                                               min(column_steps * COLUMNS, C - first_column), (last_row - first_row) / 32, tid);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 2; ++i) {
      if (ROWS_TOO) {
        const int r = row + tid / ROW_CHUNKS + i * (THREADS / ROW_CHUNKS), c = column + tid % ROW_CHUNKS * 16;
        if (r < R && c < C) *(uint4*)(q + (long long)r * C + c) = row_tile[row_place(tid) + i * THREADS];
      }
      const u32 c = tid / COLUMN_CHUNKS + i * (THREADS / COLUMN_CHUNKS), m = tid % COLUMN_CHUNKS;
      if (column + c < C && row + m * 16 < R)
        *(uint4*)(qt + (long long)(column + c) * R + row + m * 16) = column_tile[c * COLUMN_CHUNKS + (m ^ (c / LANE_COLUMNS % 8))];
    }
    if (ends) break;
    __syncthreads();
    if (row_ends) row += ROWS, ++row_step, step = 0;
    else ++step;
  }
}
