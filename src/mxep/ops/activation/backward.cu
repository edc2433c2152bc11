// An activation's gradient, and h once more, each to MX along its rows, to x's dtype, or to both: one read of dh and x, one write.
// Include after hopper.cuh, mx_bytes.cuh, eight_columns.cuh, functions.cuh and columns.cuh; the reference is reference.activate_backward.
//
// Memory bounds it, and the number of instructions per value at the clock that the chip's power allows.  A lane takes 8 neighbouring
// columns of ROWS rows: 16 bytes at a time, no barrier, addresses once; four lanes hold 32 columns.
// Packed e4m3 pairs are never taken apart again here: ptxas reads such codes from the stack pointer (tests/ops/sass.py looks for it).

// Constants that the launcher puts in front.  ROWS: of a lane.  MIN_BLOCKS: on a multiprocessor.
// DX_MX, DX_HP, H_MX, H_HP: which outputs there are.
// NUM_VALID: rows from *num_valid_rows on are not written, and thread blocks loop.

// dh (T, H) and x (T, WIDTH) with dh_row and x_row bytes between rows, x_s (T, WIDTH/32) contiguous, with X_MX; scores (T,); T >= ROWS.
// dx_q (T, WIDTH), dx_s (T, WIDTH/32), dx (T, WIDTH), h_q (T, H), h_s (T, H/32), h (T, H), d_scores (T, H/32), all contiguous.
__device__ __forceinline__ void backward(u32 block, const u8* __restrict__ dh, long long dh_row, const u8* __restrict__ x,
                                         long long x_row, const u8* __restrict__ x_s, const float* __restrict__ scores,
                                         float* __restrict__ d_scores, u8* __restrict__ dx_q, u8* __restrict__ dx_s, u8* __restrict__ dx,
                                         u8* __restrict__ h_q, u8* __restrict__ h_s, u8* __restrict__ h, int T) {
  constexpr int BYTES = X_FLOAT ? 4 : 2, DX_COLUMNS = INTERLEAVED ? 2 : 1;     // of dx for one of h in one part
  const u32 lane = block * THREADS + threadIdx.x, quarter = threadIdx.x % 4;
  // Lanes past the end take the last rows once more and write the same bytes, so that no load or store is conditional.
  const u32 row = min(lane / ROW_LANES * ROWS, T - ROWS), column = lane % ROW_LANES * 8, dx_column = column * DX_COLUMNS;
  x += row * x_row + dx_column * (X_MX ? 1 : BYTES);
  x_s += (long long)row * X_BLOCKS + dx_column / 32;
  dh += row * dh_row + column * (DH_FLOAT ? 4 : 2);
  const long long dx_at = (long long)row * WIDTH + dx_column, h_at = (long long)row * H + column;
  const Role role = role_of(column, quarter);
  const u32 scale_row = role.of_h ? BLOCKS : X_BLOCKS;
  u8* const scale = (role.of_h ? h_s : dx_s) + ((u64)row * scale_row + role.block);

  auto load_x = [&](int k) {
    if constexpr (X_MX) return load_codes(x + k * x_row, x_s + k * X_BLOCKS);
    else return load_pairs<X_FLOAT>(x + k * x_row);
  };
  decltype(load_x(0)) pairs[ROWS];
  Eight<DH_FLOAT> grads[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    pairs[k] = load_x(k);
    grads[k] = load<DH_FLOAT>(dh + k * dh_row);
  }
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const float score = SCORES ? __ldg(scores + row + k) : 1.0f;
    const Values v = gradients(values_of(pairs[k]), grads[k], score);

    if constexpr (DX_MX || H_MX) {
      const Scales s = scales_of(DX_MX ? largest(v.dx[0]) : 0, DX_MX ? largest(v.dx[PARTS - 1]) : 0, H_MX ? largest(v.h) : 0, quarter);
      if (DX_MX) {
        const uint2 a = codes(v.dx[0], s.first), b = codes(v.dx[PARTS - 1], s.second);
        u8* at = dx_q + dx_at + k * WIDTH;
        if (INTERLEAVED) *(uint4*)at = uint4{a.x, a.y, b.x, b.y};
        else *(uint2*)at = a;
        if (GATED && !INTERLEAVED) *(uint2*)(at + H) = b;
      }
      if (H_MX) *(uint2*)(h_q + h_at + k * H) = codes(v.h, s.h);
      if (role.own && (role.of_h ? H_MX : DX_MX)) scale[k * scale_row] = s.exponent;
    }
    if (DX_HP) {
      u8* at = dx + (dx_at + k * WIDTH) * BYTES;
      store(at, v.dx[0]);
      if (GATED) store(at + APART * BYTES, v.dx[PARTS - 1]);
    }
    if (H_HP) store(h + (h_at + k * H) * BYTES, v.h);
    if constexpr (SCORES) {
      float sum = plus(v.d_score, __shfl_xor_sync(ALL, v.d_score, 1));
      sum = plus(sum, __shfl_xor_sync(ALL, sum, 2));
      if (quarter == 3) d_scores[h_at / 32 + k * BLOCKS] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
activation_backward(const u8* __restrict__ dh, long long dh_row, const u8* __restrict__ x, long long x_row, const u8* __restrict__ x_s,
                const float* __restrict__ scores, float* __restrict__ d_scores, u8* __restrict__ dx_q, u8* __restrict__ dx_s,
                u8* __restrict__ dx, u8* __restrict__ h_q, u8* __restrict__ h_s, u8* __restrict__ h, const int* __restrict__ num_valid_rows,
                int T) {
  if constexpr (!NUM_VALID) {
    backward(blockIdx.x, dh, dh_row, x, x_row, x_s, scores, d_scores, dx_q, dx_s, dx, h_q, h_s, h, T);
  } else {
    const int rows = min(__ldg(num_valid_rows), T);
    const u32 blocks = ((rows + ROWS - 1) / ROWS * ROW_LANES + THREADS - 1) / THREADS;
    for (u32 block = blockIdx.x; block < blocks; block += gridDim.x)
      backward(block, dh, dh_row, x, x_row, x_s, scores, d_scores, dx_q, dx_s, dx, h_q, h_s, h, rows);
  }
}
