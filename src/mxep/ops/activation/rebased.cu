// An activation (FORWARD), or its gradient, with the rows that an FP8 GEMM reads next rebased to one exponent each: h, or x's gradient.
// The bytes are those of MX rows and a rebase of these, in one pass.  Include after hopper.cuh, mx_bytes.cuh, wide_rows.cuh, functions.cuh
// and columns.cuh; the references are reference.activate and reference.activate_backward.
//
// A row's exponent needs all of the row, so a block of threads takes ROWS whole rows, whose codes wait in shared memory.
//   1. a lane takes 8 neighbouring columns BATCH times, after it has loaded all of these: codes and exponents of what is rebased, and all
//      other outputs as in backward.cu
//   2. a warp takes a row: its largest exponent and, in a wide row, the target of each 128 columns
//   3. a thread takes 16 codes at a time: times 2^(own exponent - target), and out

// Constants that the launcher puts in front.  ROWS: of a block.  BATCH: what a lane loads ahead.  MIN_BLOCKS: on a multiprocessor.
// BLOCK_SCALES: a row may have one scale per 128 columns.  DX_MX, DX_HP, H_MX, H_HP: other outputs, of which FORWARD has H_HP alone.
// NUM_VALID: rows from *num_valid_rows on are not written, and thread blocks loop.

constexpr int REBASED_WIDTH = FORWARD ? H : WIDTH, PIECES = REBASED_WIDTH / 16, MX_BLOCKS = REBASED_WIDTH / 32;
constexpr int BLOCKS_128 = (REBASED_WIDTH + 127) / 128, RANGES = (BLOCKS_128 + 31) / 32;
constexpr u32 ZEROS = 254;                               // for the exponent of a block of zeros; a NaN block has 255, others have less

// The exponents of some MX blocks that count: the largest, and in the upper half 255 - the smallest, so that max2 joins two of them.
// 0: none counts.
__device__ __forceinline__ u32 range_of(u32 exponent) { return exponent | (255 - exponent) << 16; }
__device__ __forceinline__ int top_of(u32 range) { return range & 255; }
__device__ __forceinline__ int low_of(u32 range) { return 255 - (range >> 16); }

struct Memory { u8 codes[ROWS * REBASED_WIDTH], exponents[ROWS][4 * BLOCKS_128], targets[ROWS][BLOCKS_128]; };

// Inputs and outputs as backward.cu has them; those of the gradient are not read in FORWARD.
// out (T, REBASED_WIDTH), scale (T,), block_scale (BLOCKS_128, T) with block_scale_row floats between rows: as in rebase_rows.cu.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
activation_rebased(const u8* __restrict__ dh, long long dh_row, const u8* __restrict__ x, long long x_row, const u8* __restrict__ x_s,
                   const u8* __restrict__ bias, const int* __restrict__ offs, const float* __restrict__ scores,
                   float* __restrict__ d_scores, u8* __restrict__ dx_q, u8* __restrict__ dx_s, u8* __restrict__ dx, u8* __restrict__ h_q,
                   u8* __restrict__ h_s, u8* __restrict__ h, u8* __restrict__ out, float* __restrict__ scale,
                   float* __restrict__ block_scale, long long block_scale_row, int max_spread, const int* __restrict__ num_valid_rows,
                   int T, int G) {
  extern __shared__ __align__(16) u8 bytes[];
  Memory& memory = *(Memory*)bytes;
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
        const Values v = values_of_row(pairs[k], grads[k], score, bias, offs, G, row, dx_column);

        const Scales s = FORWARD ? scale_of_h(largest(v.h))
                                 : scales_of(largest(v.dx[0]), largest(v.dx[PARTS - 1]), H_MX ? largest(v.h) : 0, quarter);
        const Role role = role_of(column, quarter);
        if (mine && role.own) {
          if (role.of_h == FORWARD) memory.exponents[in_block][role.block] = s.counts || s.exponent == 255 ? s.exponent : ZEROS;
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

  auto find_targets = [&](u32 row_0, u32 rows) {
    for (u32 i = warp; i < rows; i += THREADS / 32) {
      auto range = [&](int part) {                       // of the lane's 128 columns
        const u32 block = 32 * part + lane;
        if (block >= BLOCKS_128) return 0u;
        const u32 four = *(const u32*)(memory.exponents[i] + 4 * block);
        u32 w = 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const u32 e = four >> 8 * j & 255;
          if (e < ZEROS && (MX_BLOCKS % 4 == 0 || 4 * block + j < MX_BLOCKS)) w = max2(w, range_of(e));
        }
        return w;
      };
      u32 all = 0;
#pragma unroll
      for (int part = 0; part < RANGES; ++part) all = max2(all, range(part));
      const int top = __reduce_max_sync(ALL, all & 255), low = 255 - (int)__reduce_max_sync(ALL, all >> 16);
      const bool wide = BLOCK_SCALES && max(top - low, 0) > max_spread;
      int base = wide ? 127 : top;
      if (wide && top - low <= FAR) {                    // near the lowest block, or near the highest one, where more 128-column blocks lie
        int near_low = 0, near_top = 0, low_base = 0;
#pragma unroll
        for (int part = 0; part < RANGES; ++part) {
          const u32 w = range(part);
          const bool lower = w && top_of(w) <= low + NEAR;
          low_base = lower ? max(low_base, top_of(w)) : low_base;
          near_low += lower, near_top += w && low_of(w) >= top - NEAR;
        }
        near_low = __reduce_add_sync(ALL, near_low), near_top = __reduce_add_sync(ALL, near_top);
        low_base = __reduce_max_sync(ALL, low_base);
        base = near_low > near_top ? low_base : top;
      }
#pragma unroll
      for (int part = 0; part < RANGES; ++part) {
        const u32 block = 32 * part + lane, w = range(part);
        if (block >= BLOCKS_128) continue;
        const bool shares = !wide || !w || top_of(w) <= base && low_of(w) >= base - NEAR;
        const int target = shares ? base : top_of(w);
        memory.targets[i][block] = target;
        if (wide) block_scale[block * block_scale_row + row_0 + i] = power_of_two(target - base + 127);
      }
      if (lane == 0) scale[row_0 + i] = wide ? -power_of_two(base) : power_of_two(top);
    }
  };

  auto write = [&](u32 row_0, u32 rows) {
    u8* to = out + (u64)row_0 * REBASED_WIDTH;
    for (u32 piece = threadIdx.x; piece < rows * PIECES; piece += THREADS) {
      const u32 row = piece / PIECES, in_row = piece % PIECES;
      const int own = memory.exponents[row][in_row / 2], target = memory.targets[row][in_row / 8];
      *(uint4*)(to + 16 * piece) = rebased(*(const uint4*)(memory.codes + 16 * piece), target - own, own);
    }
  };

  const u32 end = NUM_VALID ? min(__ldg(num_valid_rows), T) : T;
  for (u32 row_0 = blockIdx.x * ROWS; row_0 < end; row_0 += gridDim.x * ROWS) {
    const u32 rows = min(u32(ROWS), end - row_0);
    quantize(row_0, rows);
    __syncthreads();
    find_targets(row_0, rows);
    __syncthreads();
    write(row_0, rows);
    if (!NUM_VALID) break;
    __syncthreads();
  }
}
