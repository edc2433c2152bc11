// A matrix to MX along its columns (32x1, transposed) and, with ROWS_TOO, along its rows (1x32) as well, from one read.
// Include after hopper.cuh, mx_bytes.cuh and tile.cuh; the references are reference.quantize_columnwise and reference.quantize_rowwise_columnwise.
//
// A block of threads walks over a region of row_steps x column_steps tiles; the next tile is asked for before this one is stored.
// Scales wait in shared memory: a region writes its piece of a row of scales at once (4 bytes at a time cost a tenth of the speed).

// Constants that the launcher puts in front, besides those of tile.cuh.
// ROW_STEPS, COLUMN_STEPS: the most of a region.  BAND: regions above each other that go first.  MIN_BLOCKS: on a multiprocessor.

constexpr int TILE_BLOCKS = COLUMNS / 32;
constexpr int ROW_BYTES = COLUMN_STEPS * TILE_BLOCKS, COLUMN_BYTES = ROW_STEPS * ROW_WARPS;   // scales of a region's row and of its column
constexpr int ROW_PITCH = ROW_BYTES + 4, COLUMN_PITCH = COLUMN_BYTES + 4;                     // free of bank conflicts

// Largest magnitudes of a lane's rows over their blocks of 32 columns, in place; bits of float32.
__device__ __forceinline__ void row_block_maxima(u32 (&of_rows)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    if (FLOAT) {
#pragma unroll
      for (int k = i; k < i + 2; ++k)
#pragma unroll
        for (int step = 1; step < 8; step *= 2) of_rows[k] = max(of_rows[k], __shfl_xor_sync(~0u, of_rows[k], step));
    } else {
      u32 a = row_pair(of_rows[i], of_rows[i + 1]);
      a = max2(a, __shfl_xor_sync(~0u, a, 1));
      a = max2(a, __shfl_xor_sync(~0u, a, 2));
      of_rows[i] = low(a), of_rows[i + 1] = high(a);
    }
  }
}

// Largest magnitude of a word's columns over their blocks of 32 rows.
__device__ __forceinline__ u32 column_block_maximum(u32 of_lane) {
#pragma unroll
  for (int step = 8; step < 32; step *= 2) of_lane = larger(of_lane, __shfl_xor_sync(~0u, of_lane, step));
  return of_lane;
}

// What a form does to four bytes of a block after they are packed: nothing.
struct AsQuantized { __device__ __forceinline__ u32 operator()(int, u32 packed) const { return packed; } };

// Their e8m0 bytes, one row for each lane of the 8.
__device__ __forceinline__ void stage_row_scales(uint2 bytes, u8* scales, Lane at) {
  u8* to = scales + (at.row + at.group) * ROW_PITCH + at.column / 32;
  const u32 mine = __byte_perm(bytes.x, bytes.y, at.group) & 0xFF;
  if (FLOAT) {
    *to = mine;
  } else {                                               // two blocks lie in these 8 lanes: half of the other's rows are this lane's
    const u32 other = __shfl_xor_sync(~0u, __byte_perm(bytes.x, bytes.y, at.group ^ 4) & 0xFF, 4);
    *(unsigned short*)(to - at.group / 4) = at.group < 4 ? mine | other << 8 : other | mine << 8;
  }
}

// Their e8m0 bytes: each quarter has some of the columns.
__device__ __forceinline__ void stage_column_scales(uint2 bytes, u8* scales, Lane at) {
  constexpr int MINE = LANE_COLUMNS / 4;
  const u32 first = at.quarter * MINE, mine = __byte_perm(bytes.x, bytes.y, first | (first + 1) << 4);
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
    lane_maxima(v, of_rows, of_columns);
    if (ROWS_TOO) row_block_maxima(of_rows);
    auto of_row = [&](int i) { return block_scale<SCALING>(of_rows[i]); };
    if (ROWS_TOO) stage_row_scales(along_rows(v, of_row, row_tile, at, AsQuantized()), row_scales + step * TILE_BLOCKS, at);
    auto of_column = [&](int j) {
      if (FLOAT || j % 2 == 0) of_columns[FLOAT ? j : j / 2] = column_block_maximum(of_columns[FLOAT ? j : j / 2]);
      return block_scale<SCALING>(FLOAT ? of_columns[j] : j % 2 ? high(of_columns[j / 2]) : low(of_columns[j / 2]));
    };
    stage_column_scales(along_columns(v, of_column, column_tile, at, AsQuantized()),
                        column_scales + step * COLUMNS * COLUMN_PITCH + row_step * ROW_WARPS + at.row / 32, at);
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
