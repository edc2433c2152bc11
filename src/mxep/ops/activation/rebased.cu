// An activation (FORWARD), or its gradient, with the rows that an FP8 GEMM reads next rebased to one exponent each: h, or x's gradient.
// The bytes are those of MX rows and a rebase of these, in one pass.  Include after hopper.cuh, mx_bytes.cuh, eight_columns.cuh,
// wide_rows.cuh, rows_in_memory.cuh, functions.cuh and columns.cuh; the references are reference.activate and
// reference.activate_backward.
//
// A block of threads takes ROWS whole rows (rows_in_memory.cuh).  First a lane takes 8 neighbouring columns BATCH times, after it has
// loaded all of these: codes and exponents of what is rebased, and all other outputs as in backward.cu.
//
// With SUMS a block takes a tile, SUM_ROWS rows of one group, ROWS of them at a time.  A lane takes the same columns of each row and has
// the sums of their gradients in registers; it loads one row ahead.

// Constants that the launcher puts in front.  BATCH: what a lane loads ahead without SUMS.  MIN_BLOCKS: on a multiprocessor.
// DX_MX, DX_HP, H_MX, H_HP: other outputs, of which FORWARD has H_HP alone.
// NUM_VALID: rows from *num_valid_rows on are not written, and thread blocks loop.
// SUMS, SUM_ROWS: see above; not with FORWARD.  With SUMS and NUM_VALID rows past the last group are not written: num_valid_rows is not
// read, and thread blocks do not loop.

// The rows of tile `index` of groups that end at offs (groups,): rows_of_tile of grouped_gemm/triton.py.  Group `groups` has the rows past
// the last end.  An index past the last tile has the owner groups + 1.  Each warp finds the tile for itself, 32 groups at a time.
struct Tile { int owner, first, end; };
template <int TILE_ROWS> __device__ __forceinline__ Tile tile_of(int index, const int* __restrict__ offs, int groups, int T) {
  const int lane = threadIdx.x % 32;
  for (int group_0 = 0; group_0 <= groups; group_0 += 32) {
    const int group = group_0 + lane;
    const int start = group > 0 && group <= groups ? __ldg(offs + group - 1) : 0;
    const int end = group < groups ? min(__ldg(offs + group), T) : group == groups ? T : 0;
    const int tiles = (max(end - start, 0) + TILE_ROWS - 1) / TILE_ROWS, all = __reduce_add_sync(ALL, tiles);
    if (index >= all) {
      index -= all;
      continue;
    }
    int after = tiles;                                   // tiles up to this lane's group
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int others = __shfl_up_sync(ALL, after, step);
      after += lane >= step ? others : 0;
    }
    const int owner = __ffs(__ballot_sync(ALL, index < after)) - 1, first = start + (index - (after - tiles)) * TILE_ROWS;
    return {group_0 + owner, __shfl_sync(ALL, first, owner), __shfl_sync(ALL, min(first + TILE_ROWS, end), owner)};
  }
  return {groups + 1, 0, 0};
}

// Inputs and outputs as backward.cu has them; those of the gradient are not read in FORWARD.
// out (T, REBASED_WIDTH), scale (T,), block_scale (BLOCKS_128, T) with block_scale_row floats between rows: as in rebase_rows.cu.
// With SUMS offs (groups,), and parts (thread blocks, WIDTH): the sums of each tile's rows of dx.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
activation_rebased(const u8* __restrict__ dh, long long dh_row, const u8* __restrict__ x, long long x_row, const u8* __restrict__ x_s,
                   const float* __restrict__ scores, float* __restrict__ d_scores, u8* __restrict__ dx_q, u8* __restrict__ dx_s,
                   u8* __restrict__ dx, u8* __restrict__ h_q, u8* __restrict__ h_s, u8* __restrict__ h, u8* __restrict__ out,
                   float* __restrict__ scale, float* __restrict__ block_scale, long long block_scale_row, int max_spread,
                   const int* __restrict__ num_valid_rows, int T, const int* __restrict__ offs, int groups, float* __restrict__ parts) {
  extern __shared__ __align__(16) u8 bytes[];
  RowsInMemory& memory = *(RowsInMemory*)bytes;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4;

  constexpr int BYTES = X_FLOAT ? 4 : 2, DX_COLUMNS = INTERLEAVED ? 2 : 1;     // of dx for one of h in one part
  auto load_x = [&](u32 row, u32 column) {
    const u32 dx_column = column * DX_COLUMNS;
    const u8* at = x + row * x_row + dx_column * (X_MX ? 1 : BYTES);
    if constexpr (X_MX) return load_codes(at, x_s + (u64)row * X_BLOCKS + dx_column / 32);
    else return load_pairs<X_FLOAT>(at);
  };
  auto load_dh = [&](u32 row, u32 column) { return load<DH_FLOAT>(dh + row * dh_row + column * (DH_FLOAT ? 4 : 2)); };

  // Eight columns of h and theirs of x in one row, which is row `in_block` of those in memory.  mine: whether the lane stores anything.
  auto quantize_eight = [&](u32 in_block, u32 row, u32 column, bool mine, const auto& pairs, const auto& grads) {
    const u32 dx_column = column * DX_COLUMNS;
    const long long dx_at = (long long)row * WIDTH + dx_column, h_at = (long long)row * H + column;
    const float score = SCORES ? __ldg(scores + row) : 1.0f;
    const Values v = gradients(values_of(pairs), grads, score);

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
    return v;
  };

  // Here and below lanes past the end take the last 32 columns once more and store nothing.
  auto quantize = [&](u32 row_0, u32 rows) {
    const u32 lanes = rows * ROW_LANES;
    for (u32 first = 32 * warp; first < lanes; first += BATCH * THREADS) {
      auto place = [&](int k) { return min(first + k * THREADS + lane, lanes - 4 + quarter); };
      decltype(load_x(0, 0)) pairs[BATCH];
      Eight<DH_FLOAT> grads[BATCH] = {};
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const u32 row = row_0 + place(k) / ROW_LANES, column = place(k) % ROW_LANES * 8;
        pairs[k] = load_x(row, column);
        if (!FORWARD) grads[k] = load_dh(row, column);
      }
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        if (first + k * THREADS >= lanes) break;         // the same for the whole warp
        const u32 in_block = place(k) / ROW_LANES, column = place(k) % ROW_LANES * 8;
        quantize_eight(in_block, row_0 + in_block, column, first + k * THREADS + lane < lanes, pairs[k], grads[k]);
      }
    }
  };

  if constexpr (SUMS) {
    constexpr int PASSES = (ROW_LANES + THREADS - 1) / THREADS;
    const Tile tile = tile_of<SUM_ROWS>(blockIdx.x, offs, groups, T);
    if (tile.owner > groups - NUM_VALID) return;         // the same for the whole block
    auto column_of = [&](int pass) { return min(pass * THREADS + threadIdx.x, ROW_LANES - 4 + quarter) * 8; };
    auto pairs = load_x(tile.first, column_of(0));       // always of the next place
    auto grads = load_dh(tile.first, column_of(0));
    float sums[PASSES][PARTS][8] = {};                   // of the lane's columns of dx
    for (u32 row_0 = tile.first; row_0 < tile.end; row_0 += ROWS) {
      const u32 rows = min(u32(ROWS), tile.end - row_0);
#pragma unroll 1
      for (u32 i = 0; i < rows; ++i) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const auto x_here = pairs;
          const auto dh_here = grads;
          const u32 row = row_0 + i, next_row = pass + 1 < PASSES ? row : min(row + 1, tile.end - 1);
          pairs = load_x(next_row, column_of((pass + 1) % PASSES));
          grads = load_dh(next_row, column_of((pass + 1) % PASSES));
          const Values v = quantize_eight(i, row, column_of(pass), pass * THREADS + threadIdx.x < ROW_LANES, x_here, dh_here);
#pragma unroll
          for (int k = 0; k < PARTS * 8; ++k) sums[pass][k / 8][k % 8] = __fadd_rn(sums[pass][k / 8][k % 8], v.dx[k / 8][k % 8]);
        }
      }
      __syncthreads();
      find_targets(memory, row_0, rows, max_spread, scale, block_scale, block_scale_row);
      __syncthreads();
      write_rebased(memory, row_0, rows, out);
      __syncthreads();
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (pass * THREADS + threadIdx.x >= ROW_LANES) continue;
      float* const at = parts + (u64)blockIdx.x * WIDTH + column_of(pass) * DX_COLUMNS;
#pragma unroll
      for (int k = 0; k < PARTS * 8; k += 4) {
        const float* v = sums[pass][k / 8] + k % 8;
        *(float4*)(at + k / 8 * APART + k % 8) = float4{v[0], v[1], v[2], v[3]};
      }
    }
    return;
  }

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
