// Which tile of a grouped FP8 product a block of threads takes next. Include after hopper.cuh, before gemm.cu.
//
// A tile has 128 x 256 outputs, in four units of 64 x 128: two for each of a block's two consumer warpgroups. Tiles come in two shapes
// of equal cost. The last few tiles, too few to give all blocks one, are split into halves of one unit for each consumer.
//
//     wide  128 rows x 256 columns            tall  256 rows x 128 columns (the last column of tiles when N % 256 is
//                                                   1 .. 128, so that N = 1408 wastes nothing)
//             unit 0    unit 1                        +--------+
//           +---------+---------+                     |        | unit 0 of consumer 0
//           |         |         | consumer 0          |        | unit 0 of consumer 1
//           |         |         | consumer 1          |        | unit 1 of consumer 0
//           +---------+---------+                     |        | unit 1 of consumer 1
//                                                     +--------+

// Constants that the launcher puts in front.
// WGRAD: the sum over tokens.  BLOCK_SCALES: a row of A may have a scale per 128 of K.
// LORA: an adapter's product is added (forward, bf16 output).  FLOAT_OUT: float32 output.  ACCUMULATE: added to what is there.  SKIP: what has nothing to sum, rows past the last end or WGRAD's
// groups without tokens, is left as it is, not written as zero.
// STAGING: output buffers per warp, 1 or 2.  BAND: row tiles walked together, so that A and B stay in L2.  STAGES: of the ring.
// PRODUCER_REGS, CONSUMER_REGS: of a thread.

// ---------------------------------------------------------------- tiles

struct Problem {
  const float* a_scale;              // forward: (M,)      WGRAD: (G, rows)
  const int* ends;                   // (G,)
  const int* order;                  // WGRAD: (G,) the groups, largest first
  void* out;                         // forward: (M, N)    WGRAD: (G, rows, N)
  const void* inner;                 // LORA: (M, RANK) bf16
  int groups, rows, N, K;            // rows: M, or rows of A; K: the summed dimension of the operands
};

struct Tile {
  int a_row, b_row;                  // where its operand rows start
  int out_row, column;               // where its outputs start, in out as a matrix of N columns
  int group, rows;                   // rows: how many of them exist; may exceed the tile
  int k, steps;                      // first element of the summed dimension, number of 128s
  bool tall, half, empty;            // half: one of its units alone; empty: nothing to sum, zeros are written
};

// Block b of n takes tiles b, 2n-1-b, 2n+b, 4n-1-b, ...: a list of falling costs comes out balanced without
// communication. Example, n = 3: block 0 takes 0 5 6 11, block 2 takes 2 3 8 9.
struct Walk {
  const Problem& p;
  int round = 0, group = 0, first = 0, begin = 0, end;   // first: tiles before this group; begin .. end: what it owns
  int wide, tall, row_tiles, tiles, total = 0;           // columns of tiles of either shape; of a group; of all groups
  int groups;                                            // that have tiles; WGRAD: the first of the order

  __device__ __forceinline__ explicit Walk(const Problem& p) : p(p), end(end_of(0)) {
    wide = p.N / 256 + (p.N % 256 > 128), tall = p.N % 256 > 0 && p.N % 256 <= 128;
    if constexpr (WGRAD) {
      groups = p.groups;
      if constexpr (SKIP) {
        groups = 0;
        for (int g = threadIdx.x % 32; g < p.groups; g += 32) groups += p.ends[g] > (g ? p.ends[g - 1] : 0);
        groups = __reduce_add_sync(~0u, groups);
      }
      count(p.rows), total = groups * tiles;
    } else {
      groups = p.groups + !SKIP;                         // the last one owns the rows past the last end
      for (int g = threadIdx.x % 32; g < groups; g += 32) count(max(end_of(g) - (g ? end_of(g - 1) : 0), 0)), total += tiles;
      total = __reduce_add_sync(~0u, total);
    }
  }

  __device__ __forceinline__ void count(int rows) {
    row_tiles = (rows + 127) / 128, tiles = row_tiles * wide + tall * ((row_tiles + 1) / 2);
  }

  __device__ __forceinline__ int end_of(int g) const {   // forward: group G owns the rows past the last end
    if constexpr (WGRAD) return p.ends[g];
    return g < p.groups ? min(p.ends[g], p.rows) : p.rows;
  }

  __device__ __forceinline__ bool next(Tile& t) {
    const int n = gridDim.x, b = blockIdx.x;
    int tile = round * n + (round & 1 ? n - 1 - b : b), unit = 0;
    ++round;
    int rows = p.rows;
    const int left = total % n, whole = total - left;
    t.half = tile >= whole && 2 * left <= n;             // so few are left: a unit for a block, not two
    if (t.half) unit = (tile - whole) % 2, tile = whole + (tile - whole) / 2;
    if constexpr (WGRAD) {
      const int rank = tile / tiles;
      if (rank >= groups) return false;
      group = p.order[rank], first = rank * tiles, begin = group ? p.ends[group - 1] : 0, end = p.ends[group];
    } else {
      for (;; first += tiles, begin = end, end = end_of(group)) {
        rows = max(end - begin, 0), count(rows);
        if (tile < first + tiles) break;
        if (++group >= groups) return false;
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
