// The transposing pass of a wgrad's operands: MX rows (tokens, WIDTH) -> e4m3 (WIDTH, tokens), with the exponents that token_maxima.cu found.
// Behind hopper.cuh and mx_bytes.cuh; the twin is reference.rebase_tokens.
//
// 256 threads move 128 tokens x 128 columns, in words of 4 bytes; a block of threads has 2 such teams, so that an output row gets 256
// contiguous bytes.
//   load      a thread takes 16 columns of 4 consecutive tokens (4 x 16 bytes); 8 lanes cover 128 bytes of a row
//   rebase    6 instructions a word
//   4x4       8 PRMT turn 4 words "4 columns of one token" into 4 words "4 tokens of one column"
//   exchange  through shared memory; the XOR keeps stores (4 bytes) and loads (16 bytes) free of bank conflicts
//   store     16 lanes write 256 bytes of one output row

#ifndef OPTIONS
constexpr int WIDTH = 7168;
constexpr bool GETS = false;
#endif
// WIDTH: columns, a multiple of 32.  GETS: this operand gets the tokens' exponents c_t, the other one gives them.

constexpr int TEAMS = 2, BAND = 4;                       // BAND: pairs of token tiles walked together

__device__ __forceinline__ void transpose4x4(u32 (&w)[4]) {
  const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

extern "C" __global__ void __launch_bounds__(256 * TEAMS, 4)
rebase_tokens(const u8* __restrict__ q, long long q_row, const u8* __restrict__ s, long long s_row, const u8* __restrict__ token_exponent,
              const int* __restrict__ table, const int4* __restrict__ tiles, int tile_count, u8* __restrict__ out, long long out_row,
              float* __restrict__ scale) {
  __shared__ uint4 memory[128 * 8 * TEAMS];              // [128 columns][chunks of 16 tokens]
  const u32 columns = (WIDTH + 127) / 128, pairs = (tile_count + TEAMS - 1) / TEAMS, b = blockIdx.x;
  const u32 band = b / (BAND * columns), in_band = b % (BAND * columns), height = min((u32)BAND, pairs - band * BAND);
  const u32 tile_0 = (band * BAND + in_band % height) * TEAMS, column_0 = in_band / height * 128;
  const u32 team = threadIdx.x / 256, tid = threadIdx.x % 256, lane = tid % 32, part = lane % 8, quad = tid / 32 * 4 + lane / 8;
  const u32 blocks = WIDTH / 32, column = column_0 + part * 16, tile = tile_0 + team;
  if (__ldg(tiles + tile_0).y < 0) return;               // tiles of no group are the last ones
  const int4 t = tile < tile_count ? __ldg(tiles + tile) : int4{0, -1, 0, 0};
  if (t.y >= 0) {
    const int* tops = table + (long long)t.z * blocks;
    const bool inside = column < WIDTH;
    const u32 c4 = __ldg((const u32*)token_exponent + tile * 32 + quad);
    const int top = inside ? max(__ldg(tops + column / 32), 128) : 128;   // 128: the scale stays a normal float32
    if (t.w && tid < 128 && column_0 + tid < WIDTH)          // one float32 scale per group and column
      scale[(long long)t.z * WIDTH + column_0 + tid] = __int_as_float(min(max(__ldg(tops + (column_0 + tid) / 32), 128) - 127, 255) << 23);
    uint4 v[4];
    u32 f[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = quad * 4 + i, c = __byte_perm(c4, 0, 0x4440 + i);
      const bool live = inside && r < t.y;
      const long long row = t.x + r;
      v[i] = live ? __ldg((const uint4*)(q + row * q_row + column)) : uint4{};
      const int e = live ? __ldg(s + row * s_row + column / 32) : 0;
      f[i] = shift_factor((GETS ? top - c : top - 254 + c) - e, e);
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
    if (tile_0 + m / 8 < tile_count && column_0 + c < WIDTH)
      *(uint4*)(out + (column_0 + c) * out_row + (long long)tile_0 * 128 + m * 16) = memory[c * 8 * TEAMS + (m ^ (c / 16 % 8))];
  }
}
