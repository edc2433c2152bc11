// Rows, or sums of rows, into the memory of other ranks, as they are or as packed MX records. Include after hopper.cuh, mx_bytes.cuh and
// chunks.cuh; the references are reference.p2p_scatter_rows and reference.p2p_reduce_rows.
// Addresses of ranks are arguments of the kernel: out of a table in memory the compiler knows less about them.

// Constants that the launcher puts in front.
// SUMS: sums of rows, else rows.  CHUNK: sums of the last chunk, which continue those of the earlier chunks.

constexpr int TERMS = 4;                                 // of a sum, loaded at a time

struct Ranks { u8* memory[32]; };

// The values of a sum in the dtype of its terms.
__device__ __forceinline__ RowChunk rounded(const float (&sum)[VALUES]) {
  RowChunk out;
#pragma unroll
  for (int i = 0; i < VALUES; i += ITEM == 4 ? 1 : 2) {
    if (ITEM == 4) out.bits[i] = __float_as_uint(sum[i]);
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out.bits[i / 2]) : "f"(i + 1 < VALUES ? sum[(i + 1) % VALUES] : 0.0f), "f"(sum[i]));
  }
  return out;
}

// The upper halves of float32 values, or all of their bits, and the lower halves.
__device__ __forceinline__ float joined(const RowChunk& upper, const RowChunk& lower, int i) {
  const u32 pair = lower.bits[i / 2];
  return __uint_as_float(__float_as_uint(value_of(upper, i)) | (i % 2 ? pair >> 16 : pair & 0xFFFF));
}

// The slot that a lane reads for its row, -1 after the last.
__device__ __forceinline__ int slot_of(const int* __restrict__ slots, u32 row, int J, int j, bool there) {
  return there && j < J ? __ldg(slots + (u64)row * J + j) : -1;
}

// from (T, D) with from_row bytes between rows, of `bytes` each; slots (T, J), or for sums (count, J) with values below T; ranks (T, J) or
// null; `pieces` of a row; `region`: sums of a rank.  With CHUNK, slots are expert rows, from holds rows chunk[0] to chunk[1], partial_sums
// (count, D) in rows' dtype and carry (count, D) int16 or null are what reduce_rows_chunk left.
extern "C" __global__ void __launch_bounds__(THREADS)
p2p(const u8* __restrict__ from, long long from_row, int bytes, const int* __restrict__ slots, const int* __restrict__ ranks, int J,
     int count, int pieces, int T, int region, const int* __restrict__ chunk, const u8* __restrict__ partial_sums,
     const u8* __restrict__ carry, const __grid_constant__ Ranks to, int world, long long pitch) {
  const u32 unit = (blockIdx.x * THREADS + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
  const u32 index = unit / pieces, first = unit % pieces * (PARTS * LANES) + lane, number = bytes / (LOADS * WORD);
  // Sums go to all ranks in turn: if every rank began with the first one's, they would all wait for that one's link.
  const u32 rank = SUMS ? index % world : 0, line = SUMS ? index / world : index, row = SUMS ? rank * region + line : index;
  const bool there = index < count;
  from += (u64)first * (LOADS * WORD);
  RowChunk row_chunks[PARTS];

  if constexpr (SUMS) {
    float sums[PARTS][VALUES] = {};
    bool any = false;
    int base = 0, end = T;
    if constexpr (CHUNK) {
      base = __ldg(chunk), end = min(__ldg(chunk + 1), base + T);
      const u32 of_row = LANES == 32 ? ALL : ((1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES);
      bool earlier = false, here = false;
      for (int start = 0; start < J; start += LANES) {
        const int slot = slot_of(slots, row, J, start + lane, there);
        earlier |= (__ballot_sync(ALL, slot >= 0 && slot < base) & of_row) != 0;
        here |= (__ballot_sync(ALL, slot >= base && slot < end) & of_row) != 0;
      }
      if (earlier) {
        any = true;
        const u64 at = (u64)row * bytes + (u64)first * (LOADS * WORD);
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
          if (first + i * LANES < number) {
            RowChunk upper, lower;
            load(upper, partial_sums + at + i * (LANES * LOADS * WORD));
            if (ITEM == 2 && here) load(lower, carry + at + i * (LANES * LOADS * WORD));  // else the sum was finished and rounded
#pragma unroll
            for (int v = 0; v < VALUES; ++v) sums[i][v] = ITEM == 2 ? joined(upper, lower, v) : value_of(upper, v);
          }
      }
    }
    for (int start = 0; start < J; start += LANES) {
      int slot = slot_of(slots, row, J, start + lane, there);
      slot = slot >= base && slot < end ? slot - base : -1;
      if (!__any_sync(ALL, slot >= 0)) continue;
      for (int j = 0; j < min(LANES, J - start); j += TERMS) {
        RowChunk terms[TERMS][PARTS];
#pragma unroll
        for (int k = 0; k < TERMS; ++k) {
          const int of = __shfl_sync(ALL, slot, j + k, LANES);
          if (j + k < LANES && of >= 0) {
            any = true;
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
              if (first + i * LANES < number) load(terms[k][i], from + of * from_row + i * (LANES * LOADS * WORD));
          }
        }
#pragma unroll
        for (int k = 0; k < TERMS; ++k)
#pragma unroll
          for (int i = 0; i < PARTS; ++i)
#pragma unroll
            for (int v = 0; v < VALUES; ++v) sums[i][v] = sums[i][v] + value_of(terms[k][i], v);  // a term that is not there is +0
      }
    }
    if (!__any_sync(ALL, any)) return;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) row_chunks[i] = rounded(sums[i]);
    const Parts parts = parts_of(row_chunks, first, number, lane);
    if (any) parts.store(to.memory[rank] + line * pitch);
  } else {
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (there && first + i * LANES < number) load(row_chunks[i], from + row * from_row + i * (LANES * LOADS * WORD));
    const Parts parts = parts_of(row_chunks, first, number, lane);
    for (int start = 0; start < J; start += LANES) {
      const int slot = slot_of(slots, row, J, start + lane, there);
      u64 mine = 0;
      if (slot >= 0) {
        const int rank = ranks ? __ldg(ranks + (u64)row * J + start + lane) : start + lane;
        if (u32(rank) < u32(world)) mine = (u64)to.memory[rank] + slot * pitch;
      }
      for (int j = 0; j < min(LANES, J - start); ++j) {
        const u64 place = __shfl_sync(ALL, mine, j, LANES);
        if (place) parts.store((u8*)place);
      }
    }
  }
}
