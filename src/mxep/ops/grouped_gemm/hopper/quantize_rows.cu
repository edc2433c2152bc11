// Rows, bf16 or float32 -> e4m3 with one exponent each or, in wide rows, one per 128 columns, as an FP8 GEMM reads them, and the rows in MX
// (MX) from the same read.  The bytes are those of a quantiser and of rebase_rows.cu after it.  Include after hopper.cuh, mx_bytes.cuh,
// eight_columns.cuh, wide_rows.cuh and rows_in_memory.cuh; the reference is rebase_reference.quantize_rows.
//
// A block of threads takes ROWS whole rows (rows_in_memory.cuh).  First a lane takes 8 neighbouring columns BATCH times, after it has loaded
// all of these: codes and exponents.  Memory bounds the kernel.

// Constants that the launcher puts in front.  BATCH: what a lane loads ahead.  MIN_BLOCKS: on a multiprocessor.  X_FLOAT: x is float32, else
// bf16.  MX: the rows in MX are wanted, too.

constexpr int ROW_LANES = REBASED_WIDTH / 8;

// x (T, REBASED_WIDTH) with x_row bytes between rows.  q (T, REBASED_WIDTH), s (T, REBASED_WIDTH / 32): the rows in MX.
// out, scale, block_scale: as in rows_in_memory.cuh.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
quantize_rows(const u8* __restrict__ x, long long x_row, u8* __restrict__ q, u8* __restrict__ s, u8* __restrict__ out,
              float* __restrict__ scale, float* __restrict__ block_scale, long long block_scale_row, int max_spread, int T) {
  extern __shared__ __align__(16) u8 bytes[];
  RowsInMemory& memory = *(RowsInMemory*)bytes;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4;
  const u32 row_0 = blockIdx.x * ROWS, rows = min(u32(ROWS), T - row_0), lanes = rows * ROW_LANES;

  for (u32 first = 32 * warp; first < lanes; first += BATCH * THREADS) {
    // Lanes past the end take the last 32 columns once more and store nothing.
    auto place = [&](int k) { return min(first + k * THREADS + lane, lanes - 4 + quarter); };
    Eight<X_FLOAT> loaded[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k)
      loaded[k] = load<X_FLOAT>(x + (row_0 + place(k) / ROW_LANES) * x_row + place(k) % ROW_LANES * (X_FLOAT ? 32 : 16));
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      if (first + k * THREADS >= lanes) break;           // the same for the whole warp
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = loaded[k][i];
      const FourLaneScale block = scale_of_block(largest(v));
      if (first + k * THREADS + lane >= lanes) continue;
      const u32 row = place(k) / ROW_LANES, in_row = place(k) % ROW_LANES;
      const uint2 packed = codes(v, block.factor);
      *(uint2*)(memory.codes + 8 * place(k)) = packed;
      if (MX) *(uint2*)(q + (u64)row_0 * REBASED_WIDTH + 8 * place(k)) = packed;
      if (quarter == 0) {
        memory.exponents[row][in_row / 4] = kept_exponent(block.exponent, block.counts);
        if (MX) s[(u64)(row_0 + row) * MX_BLOCKS + in_row / 4] = block.exponent;
      }
    }
  }
  __syncthreads();
  find_targets(memory, row_0, rows, max_spread, scale, block_scale, block_scale_row);
  __syncthreads();
  write_rebased(memory, row_0, rows, out);
}
