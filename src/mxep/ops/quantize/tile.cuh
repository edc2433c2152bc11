// A warp's tile of a matrix, 32 rows x 128 bytes of columns (8 lanes), quantised to e4m3 along its columns and along its rows.
// Include after hopper.cuh and mx_bytes.cuh, in front of a kernel that walks over tiles of ROW_WARPS x COLUMN_WARPS warps.
//
// Both kinds of blocks of 32 lie inside a warp, and shuffles find their maxima.
//   load      a lane takes 16 bytes of 8 consecutive rows
//   scale     times a power of two: exact in pairs of bf16; e4m3 bytes are packed from 4 columns of a row or from 4 rows of a column,
//             which makes the transpose of single bytes free
//   exchange  through shared memory, so that an output row gets ROWS or COLUMNS contiguous bytes; the XOR keeps it free of bank conflicts

// Constants that the launcher puts in front.  SCALING: the scaling mode.  ROWS_TOO: the kernel makes the form along the rows.
// ROW_WARPS, COLUMN_WARPS: of a tile.  FLOAT: x is float32, else bf16.

constexpr int LANE_COLUMNS = FLOAT ? 4 : 8;
constexpr int ROWS = 32 * ROW_WARPS, COLUMNS = 8 * LANE_COLUMNS * COLUMN_WARPS, THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int ROW_CHUNKS = COLUMNS / 16, COLUMN_CHUNKS = ROWS / 16;            // 16 bytes of an output row of each form
static_assert(COLUMN_CHUNKS >= 8 && (!ROWS_TOO || ROW_CHUNKS >= 8 && THREADS / ROW_CHUNKS % 32 == 0), "the XOR goes over 8 chunks");

__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 o; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(o) : "r"(a), "r"(b)); return o; }
__device__ __forceinline__ u32 low(u32 w) { return w << 16; }                  // one bf16 of a pair, as float32 bits
__device__ __forceinline__ u32 high(u32 w) { return w & 0xFFFF0000u; }
__device__ __forceinline__ u32 times(u32 a, u32 b) { return __float_as_uint(__fmul_rn(__uint_as_float(a), __uint_as_float(b))); }
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return FLOAT ? max(a, b) : max2(a, b); }

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

// Largest magnitudes of a lane: of each of its 8 rows, and of its columns (bits of float32, or of pairs of bf16 as they lie).
__device__ __forceinline__ void lane_maxima(const u32 (&v)[8][4], u32 (&of_rows)[8], u32 (&of_columns)[4]) {
  const u32 mask = FLOAT ? 0x7FFFFFFF : 0x7FFF7FFF;
#pragma unroll
  for (int j = 0; j < 4; ++j) of_columns[j] = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u32 m[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      m[j] = v[i][j] & mask;
      of_columns[j] = larger(of_columns[j], m[j]);
    }
    of_rows[i] = larger(larger(m[0], m[1]), larger(m[2], m[3]));
  }
}

// Two rows of a lane in a word: half the shuffles.
__device__ __forceinline__ u32 row_pair(u32 a, u32 b) { return max2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)); }

// Blocks of 32 columns: 8 rows of this lane into `tile`; their e8m0 bytes.  `scale(row)`: of its block; called before `finish(row, packed
// bytes)`, the bytes to write.
template <class Scale, class Finish>
__device__ __forceinline__ uint2 along_rows(const u32 (&v)[8][4], Scale scale, uint4* tile, Lane at, Finish finish) {
  const u32 first = row_place(at.row * ROW_CHUNKS + at.column / 16);
  u32 bytes[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto [e, f] = scale(i);
    const u32 chunk = first + i * ROW_CHUNKS;
    const u32(&x)[4] = v[i];
    if (FLOAT) {
      ((u32*)tile)[chunk * 4 + at.group % 4] = finish(i, pack4(times(x[0], f), times(x[1], f), times(x[2], f), times(x[3], f)));
    } else {
      const u32 f2 = __byte_perm(f, f, 0x3232), a = mul2(x[0], f2), b = mul2(x[1], f2), c = mul2(x[2], f2), d = mul2(x[3], f2);
      ((uint2*)tile)[chunk * 2 + at.group % 2] = uint2{finish(i, pack4(low(a), high(a), low(b), high(b))),
                                                       finish(i, pack4(low(c), high(c), low(d), high(d)))};
    }
    bytes[i / 4] |= e << 8 * (i % 4);
  }
  return uint2{bytes[0], bytes[1]};
}

// Blocks of 32 rows: this lane's columns, transposed, into `tile`; their e8m0 bytes.  `scale(column)` and `finish(column, packed bytes)` as
// above.
template <class Scale, class Finish>
__device__ __forceinline__ uint2 along_columns(const u32 (&v)[8][4], Scale scale, uint4* tile, Lane at, Finish finish) {
  const u32 chunk = at.row / 16 ^ at.group, half = at.quarter % 2;      // group is column / LANE_COLUMNS % 8
  u32 bytes[2] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 w[8];
    if (FLOAT) {
      const auto [e, f] = scale(j);
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = times(v[i][j], f);
      uint2* to = (uint2*)tile + ((at.column + j) * COLUMN_CHUNKS + chunk) * 2 + half;
      *to = uint2{finish(j, pack4(w[0], w[1], w[2], w[3])), finish(j, pack4(w[4], w[5], w[6], w[7]))};
      bytes[0] |= e << 8 * j;
    } else {
      const BlockScale a = scale(2 * j), b = scale(2 * j + 1);
      const u32 f2 = __byte_perm(a.factor, b.factor, 0x7632);
      uint2* to = (uint2*)tile + ((at.column + j * 2) * COLUMN_CHUNKS + chunk) * 2 + half;
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = mul2(v[i][j], f2);
      *to = uint2{finish(2 * j, pack4(low(w[0]), low(w[1]), low(w[2]), low(w[3]))),
                  finish(2 * j, pack4(low(w[4]), low(w[5]), low(w[6]), low(w[7])))};
      to += COLUMN_CHUNKS * 2;
      *to = uint2{finish(2 * j + 1, pack4(high(w[0]), high(w[1]), high(w[2]), high(w[3]))),
                  finish(2 * j + 1, pack4(high(w[4]), high(w[5]), high(w[6]), high(w[7])))};
      bytes[j / 2] |= (a.exponent | b.exponent << 8) << 16 * (j % 2);
    }
  }
  return uint2{bytes[0], bytes[1]};
}
