// The transposing pass of a wgrad's operands: MX rows (tokens, width) -> e4m3 (width, tokens), with the exponents of token_maxima.cu.
// Include after hopper.cuh and mx_bytes.cuh; the reference is reference.rebase_tokens.  One launch moves both operands: first a's blocks, then g's.
//
// 256 threads move 128 tokens x 128 columns, in words of 4 bytes; a block of threads has 2 such teams, so that an output row gets 256
// contiguous bytes.
//   load      a thread takes 16 columns of 4 consecutive tokens (4 x 16 bytes); 8 lanes cover 128 bytes of a row
//   rebase    6 instructions a word
//   4x4       8 PRMT turn 4 words "4 columns of one token" into 4 words "4 tokens of one column"
//   exchange  through shared memory; the XOR keeps stores (4 bytes) and loads (16 bytes) free of bank conflicts
//   store     16 lanes write 256 bytes of one output row, streamed, so that L2 keeps rows which are read again
// Rows that several tokens read are walked panel by panel of columns, so small that L2 holds a panel of all of them.

// Constants that the launcher puts in front.
// WIDTH_A, WIDTH_G: columns, a multiple of 32. MAP_A, MAP_G: token t is row row_map[t], -1 a row of zeros.  WALK: few blocks of threads
// take all tiles, up to the last that has tokens; a panel then has all columns.

constexpr int TEAMS = 2, BAND = 4;                       // BAND: pairs of token tiles walked together
constexpr int LEAST = 128;                               // of a group's exponent: its scale stays a normal float32

struct Operand {
  const u8 *q, *s;
  const int *row_map, *table;                            // table: (groups, width / 32) maxima
  const u8* moved;                                       // (output tokens,) what moves a token's exponents, + 255
  u8* out;
  float* scale;                                          // (groups, width)
  long long q_row, s_row;
  int panel;                                             // columns of a panel, in units of 128
};
struct Plan {
  const int4* tiles;                                     // {first row, rows, group, first tile of its group}; rows < 0: none
  long long out_row;
  int tile_count;
};

__device__ __forceinline__ void transpose4x4(u32 (&w)[4]) {
  const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

template <int WIDTH, bool MAP>
__device__ __forceinline__ void move(const Operand& o, const Plan& p, uint4 (&memory)[128 * 8 * TEAMS], u32 b) {
  constexpr u32 COLUMNS = (WIDTH + 127) / 128, BLOCKS = WIDTH / 32;
  const u32 pairs = (p.tile_count + TEAMS - 1) / TEAMS, panel_0 = b / (pairs * o.panel) * o.panel;
  const u32 in_panel = b - pairs * panel_0, columns = min(o.panel, COLUMNS - panel_0);
  const u32 band = in_panel / (BAND * columns), in_band = in_panel % (BAND * columns);
  const u32 height = min((u32)BAND, pairs - band * BAND), tile_0 = (band * BAND + in_band % height) * TEAMS;
  const u32 column_0 = (panel_0 + in_band / height) * 128;
  const u32 team = threadIdx.x / 256, tid = threadIdx.x % 256, lane = tid % 32, part = lane % 8, quad = tid / 32 * 4 + lane / 8;
  const u32 column = column_0 + part * 16, tile = tile_0 + team;
  if (__ldg(p.tiles + tile_0).y < 0) return;             // tiles of no group are the last ones
  const int4 t = tile < p.tile_count ? __ldg(p.tiles + tile) : int4{0, -1, 0, 0};
  if (t.y >= 0) {
    const int* tops = o.table + (long long)t.z * BLOCKS;
    const bool inside = WIDTH % 128 == 0 || column < WIDTH;
    const u32 moved4 = __ldg((const u32*)o.moved + tile * 32 + quad);
    const int top = inside ? max(__ldg(tops + column / 32), LEAST) : LEAST;
    if (t.w && tid < 128 && column_0 + tid < WIDTH)          // one float32 scale per group and column
      o.scale[(long long)t.z * WIDTH + column_0 + tid] =
          __int_as_float(min(max(__ldg(tops + (column_0 + tid) / 32), LEAST) - 127, 255) << 23);
    uint4 v[4];
    u32 f[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = quad * 4 + i, moved = __byte_perm(moved4, 0, 0x4440 + i);
      const long long row = !inside || r >= t.y ? -1 : MAP ? __ldg(o.row_map + t.x + r) : t.x + r;
      v[i] = row >= 0 ? __ldg((const uint4*)(o.q + row * o.q_row + column)) : uint4{};
      const int e = row >= 0 ? __ldg(o.s + row * o.s_row + column / 32) : 0;
      f[i] = shift_factor(top - 255 + moved - e, e);
    }
    u32* to = (u32*)memory + part * 16 * (TEAMS * 32) + team * 32 + (quad ^ (part * 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = shifted(j == 0 ? v[i].x : j == 1 ? v[i].y : j == 2 ? v[i].z : v[i].w, f[i]);
      transpose4x4(w);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(j * 4 + i) * (TEAMS * 32)] = w[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 x = i * (256 * TEAMS) + threadIdx.x, c = x / (8 * TEAMS), m = x % (8 * TEAMS);
    if (tile_0 + m / 8 < p.tile_count && (WIDTH % 128 == 0 || column_0 + c < WIDTH))
      __stcs((uint4*)(o.out + (column_0 + c) * p.out_row + (long long)tile_0 * 128 + m * 16), memory[c * 8 * TEAMS + (m ^ (c / 16 % 8))]);
  }
}

extern "C" __global__ void __launch_bounds__(256 * TEAMS, WALK ? 3 : 4)
rebase_tokens(const Operand a, const Operand g, const Plan plan) {
  __shared__ uint4 memory[128 * 8 * TEAMS];              // [128 columns][chunks of 16 tokens]
  const u32 pairs = (plan.tile_count + TEAMS - 1) / TEAMS, columns_a = (WIDTH_A + 127) / 128, columns_g = (WIDTH_G + 127) / 128;
  if constexpr (!WALK) {
    if (blockIdx.x < pairs * columns_a) move<WIDTH_A, MAP_A>(a, plan, memory, blockIdx.x);
    else move<WIDTH_G, MAP_G>(g, plan, memory, blockIdx.x - pairs * columns_a);
  } else {
    // Tiles of no group are the last ones: the first band that begins with one ends an operand.
    auto has_tokens = [&](u32 b, u32 columns) { return __ldg(plan.tiles + b / (BAND * columns) * BAND * TEAMS).y >= 0; };
    for (u32 b = blockIdx.x; b < pairs * columns_a && has_tokens(b, columns_a); b += gridDim.x) {
      move<WIDTH_A, MAP_A>(a, plan, memory, b);
      __syncthreads();
    }
    for (u32 b = blockIdx.x; b < pairs * columns_g && has_tokens(b, columns_g); b += gridDim.x) {
      move<WIDTH_G, MAP_G>(g, plan, memory, b);
      __syncthreads();
    }
  }
}
