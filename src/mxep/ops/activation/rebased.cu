// An activation (FORWARD), or its gradient, with the rows that an FP8 GEMM reads next rebased to one exponent each: h, or x's gradient.
// The bytes are those of MX rows and a rebase of these, in one pass.  Include after hopper.cuh, mx_bytes.cuh, eight_columns.cuh,
// wide_rows.cuh, rows_in_memory.cuh, functions.cuh and columns.cuh; the references are reference.activate and
// reference.activate_backward.
//
// A block of threads takes ROWS whole rows (rows_in_memory.cuh).  First a lane takes 8 neighbouring columns BATCH times, after it has
// loaded all of these: codes and exponents of what is rebased, and all other outputs as in backward.cu.

// Constants that the launcher puts in front.  BATCH: what a lane loads ahead.  MIN_BLOCKS: on a multiprocessor.  DX_MX, DX_HP, H_MX, H_HP:
// other outputs, of which FORWARD has H_HP alone.  NUM_VALID: rows from *num_valid_rows on are not written, and thread blocks loop.

// Inputs and outputs as backward.cu has them; those of the gradient are not read in FORWARD.
// out (T, REBASED_WIDTH), scale (T,), block_scale (BLOCKS_128, T) with block_scale_row floats between rows: as in rebase_rows.cu.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
activation_rebased(const u8* __restrict__ dh, long long dh_row, const u8* __restrict__ x, long long x_row, const u8* __restrict__ x_s,
                   const float* __restrict__ scores, float* __restrict__ d_scores, u8* __restrict__ dx_q, u8* __restrict__ dx_s,
                   u8* __restrict__ dx, u8* __restrict__ h_q, u8* __restrict__ h_s, u8* __restrict__ h, u8* __restrict__ out,
                   float* __restrict__ scale, float* __restrict__ block_scale, long long block_scale_row, int max_spread,
                   const int* __restrict__ num_valid_rows, int T) {
  extern __shared__ __align__(16) u8 bytes[];
  RowsInMemory& memory = *(RowsInMemory*)bytes;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4;

  auto quantize = [&](u32 row_0, u32 rows) {
    constexpr int BYTES = X_FLOAT ? 4 : 2, DX_COLUMNS = INTERLEAVED ? 2 : 1;   // of dx for one of h in one part
    const u32 lanes = rows * ROW_LANES;
    auto load_x = [&](u32 row, u32 dx_column) {
      const u8* at = x + row * x_row + dx_column * (X_MX ? 1 : BYTES);
      if constexpr (X_MX) return load_codes(at, x_s + (u64)row * X_BLOCKS + dx_column / 32);
      else return load_pairs<X_FLOAT>(at);
    };
    for (u32 first = 32 * warp; first < lanes; first += BATCH * THREADS) {
      // Lanes past the end take the last 32 columns once more and store nothing.
      auto place = [&](int k) { return min(first + k * THREADS + lane, lanes - 4 + quarter); };
      decltype(load_x(0, 0)) pairs[BATCH];
      Eight<DH_FLOAT> grads[BATCH] = {};
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const u32 row = row_0 + place(k) / ROW_LANES, column = place(k) % ROW_LANES * 8;
        pairs[k] = load_x(row, column * DX_COLUMNS);
        if (!FORWARD) grads[k] = load<DH_FLOAT>(dh + row * dh_row + column * (DH_FLOAT ? 4 : 2));
      }
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        if (first + k * THREADS >= lanes) break;         // the same for the whole warp
        const bool mine = first + k * THREADS + lane < lanes;
        const u32 in_block = place(k) / ROW_LANES, row = row_0 + in_block, column = place(k) % ROW_LANES * 8;
        const u32 dx_column = column * DX_COLUMNS;
        const long long dx_at = (long long)row * WIDTH + dx_column, h_at = (long long)row * H + column;
        const float score = SCORES ? __ldg(scores + row) : 1.0f;
        const Values v = gradients(values_of(pairs[k]), grads[k], score);

        const Scales s = FORWARD ? scale_of_h(largest(v.h))
                                 : scales_of(largest(v.dx[0]), largest(v.dx[PARTS - 1]), H_MX ? largest(v.h) : 0, quarter);
        const Role role = role_of(column, quarter);
        if (mine && role.own) {
          if (role.of_h == FORWARD) memory.exponents[in_block][role.block] = kept_exponent(s.exponent, s.counts);
          if (role.of_h ? H_MX : DX_MX) (role.of_h ? h_s + (u64)row * BLOCKS : dx_s + (u64)row * X_BLOCKS)[role.block] = s.exponent;
        }
        if (!FORWARD && mine) {
          const uint2 a = codes(v.dx[0], s.first), b = codes(v.dx[PARTS - 1], s.second);
          auto put = [&](u8* at) {
            if (INTERLEAVED) *(uint4*)at = uint4{a.x, a.y, b.x, b.y};
            else *(uint2*)at = a;
            if (GATED && !INTERLEAVED) *(uint2*)(at + H) = b;
          };
          put(memory.codes + in_block * REBASED_WIDTH + dx_column);
          if (DX_MX) put(dx_q + dx_at);
        }
        if ((FORWARD || H_MX) && mine) *(uint2*)(FORWARD ? memory.codes + in_block * REBASED_WIDTH + column : h_q + h_at) = codes(v.h, s.h);
        if (DX_HP && mine) {
          store(dx + dx_at * BYTES, v.dx[0]);
          if (GATED) store(dx + (dx_at + APART) * BYTES, v.dx[PARTS - 1]);
        }
        if (H_HP && mine) store(h + h_at * BYTES, v.h);
        if constexpr (SCORES && !FORWARD) {
          float sum = plus(v.d_score, __shfl_xor_sync(ALL, v.d_score, 1));
          sum = plus(sum, __shfl_xor_sync(ALL, sum, 2));
          if (mine && quarter == 3) d_scores[h_at / 32] = sum;
        }
      }
    }
  };

  const u32 end = NUM_VALID ? min(__ldg(num_valid_rows), T) : T;
  for (u32 row_0 = blockIdx.x * ROWS; row_0 < end; row_0 += gridDim.x * ROWS) {
    const u32 rows = min(u32(ROWS), end - row_0);
    quantize(row_0, rows);
    __syncthreads();
    find_targets(memory, row_0, rows, max_spread, scale, block_scale, block_scale_row);
    __syncthreads();
    write_rebased(memory, row_0, rows, out);
    if (!NUM_VALID) break;
    __syncthreads();
  }
}
