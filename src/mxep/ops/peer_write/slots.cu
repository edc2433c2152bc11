// One round of rows: as packed MX records into the slots of all ranks, and the values from this rank's own slots. Include after hopper.cuh,
// mx_bytes.cuh and chunks.cuh; the references are in slots_reference.py.
// Both get all messages of a call as one argument and work out which rows belong to this round.

// MESSAGES, a constant that the launcher puts in front: room for so many ranks.

constexpr u32 HEADER = 128;                              // bytes in front of a slot's records, of which 16 are used
constexpr int TAKEN = 16 / ITEM;                         // values that a lane stores at a time

// A message: address of the two slots that take turns; the first of its rows and how many, `per` of them in a round; rounds before it.
struct PeerMessage { u64 slots; u32 first, rows, per, before; };

// rows: (T, width) to send, or the output.  units: pieces of rows, of send_slots as if every message had as many rows as the longest.
// error: (1 + world, 8) int32 of the host.
struct Call {
  u64 rows;
  u32 number, step;
  u64 row_bytes, slot_bytes, error;
  u32 width, pieces, units, record, world, unused;
  PeerMessage messages[MESSAGES];
};

__device__ __forceinline__ bool goes_on(const PeerMessage& message, u32 step) { return step == 0 || step * message.per < message.rows; }

__device__ __forceinline__ u32 rows_in(const PeerMessage& message, u32 step) {
  const u32 done = step * message.per;
  return done < message.rows ? min(message.per, message.rows - done) : 0;
}

__device__ __forceinline__ u8* slot_of(const Call& call, const PeerMessage& message) {
  return (u8*)(message.slots + ((message.before + call.step) & 1) * call.slot_bytes);
}

__device__ __forceinline__ uint4 header_of(const Call& call, const PeerMessage& message) {
  return uint4{call.number, message.rows, call.record, call.step};
}

// A fixed number of blocks walks over all rows, interleaving the ranks: blocks that wait for the link leave the memory to
// the rows that stay.
extern "C" __global__ void __launch_bounds__(THREADS) send_slots(const __grid_constant__ Call call) {
  if (blockIdx.x == 0 && threadIdx.x < call.world) {
    const PeerMessage& message = call.messages[threadIdx.x];
    if (goes_on(message, call.step)) put(slot_of(call, message), header_of(call, message));
  }
  constexpr u32 TEAMS = THREADS / LANES;
  const u32 lane = threadIdx.x % LANES, number = call.width / 16;
  for (u32 start = blockIdx.x * TEAMS; start < call.units; start += gridDim.x * TEAMS) {
    const u32 unit = start + threadIdx.x / LANES, first = unit % call.pieces * (PARTS * LANES) + lane;
    const u32 row = unit / call.pieces / call.world;
    const PeerMessage& message = call.messages[unit / call.pieces % call.world];
    const bool there = unit < call.units && row < rows_in(message, call.step);
    if (!__any_sync(ALL, there)) continue;
    const u8* from = (const u8*)call.rows + ((u64)message.first + call.step * message.per + row) * call.row_bytes + first * (LOADS * WORD);
    RowChunk row_chunks[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (there && first + i * LANES < number) load(row_chunks[i], from + i * (LANES * LOADS * WORD));
    const Parts parts = parts_of(row_chunks, first, number, lane);
    if (there) parts.store(slot_of(call, message) + HEADER + (u64)row * call.record);
  }
}

// Two e4m3 values as float32 bits.
__device__ __forceinline__ void unpack2(u32 codes, float& low, float& high) {
  asm("{ .reg .b16 c, l, h; .reg .b32 p; cvt.u16.u32 c, %2; cvt.rn.f16x2.e4m3x2 p, c; mov.b32 {l, h}, p;"
      "cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high) : "r"(codes));
}

// Reports to the host that the slot of a rank does not have the expected header.
__device__ void report(const Call& call, u32 rank, const uint4& found, const uint4& awaited) {
  u8* error = (u8*)call.error;
  put(error + (1 + rank) * 32, found);
  put(error + (1 + rank) * 32 + 16, awaited);
  __threadfence_system();
  put(error, 1u);
}

__device__ __forceinline__ bool equal(const uint4& a, const uint4& b) {
  return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w;
}

extern "C" __global__ void __launch_bounds__(THREADS) recv_slots(const __grid_constant__ Call call) {
  if (blockIdx.x == 0 && threadIdx.x < call.world) {
    const PeerMessage& message = call.messages[threadIdx.x];
    if (goes_on(message, call.step)) {
      const uint4 found = __ldg((const uint4*)slot_of(call, message)), awaited = header_of(call, message);
      if (!equal(found, awaited)) report(call, threadIdx.x, found, awaited);
    }
  }
  const u32 unit = (blockIdx.x * THREADS + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
  if (unit >= call.units) return;
  u32 row = unit / call.pieces, rank = 0;
  for (; row >= rows_in(call.messages[rank], call.step); ++rank) row -= rows_in(call.messages[rank], call.step);
  const PeerMessage& message = call.messages[rank];
  const u8* slot = slot_of(call, message);
  const u8* record = slot + HEADER + (u64)row * call.record;
  u8* out = (u8*)call.rows + ((u64)message.first + call.step * message.per + row) * call.row_bytes;
  const u32 first = (unit % call.pieces * (PARTS * LANES) + lane) * TAKEN;

  union Packed { typename WordOf<TAKEN>::type all; u32 words[TAKEN / 4]; } codes[PARTS];
  u32 exponents[PARTS];
  const uint4 found = __ldg((const uint4*)slot);
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const u32 column = first + i * (LANES * TAKEN);
    if (column < call.width) {
      codes[i].all = __ldg((const typename WordOf<TAKEN>::type*)(record + column));
      exponents[i] = __ldg(record + call.width + column / 32);
    }
  }
  const bool good = equal(found, header_of(call, message));
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const u32 column = first + i * (LANES * TAKEN);
    if (column >= call.width) break;
    const float factor = exponents[i] == 255 ? __uint_as_float(0x7FC00000) : power_of_two(exponents[i]);
    uint4 stored;
    u32* words = (u32*)&stored;
#pragma unroll
    for (int k = 0; k < TAKEN / 2; ++k) {
      float low, high;
      unpack2(codes[i].words[k / 2] >> 16 * (k % 2) & 0xFFFF, low, high);
      low *= factor, high *= factor;
      if (ITEM == 4) words[2 * k % 4] = __float_as_uint(low), words[(2 * k + 1) % 4] = __float_as_uint(high);
      else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[k % 4]) : "f"(high), "f"(low));
    }
    put(out + column * ITEM, good ? stored : uint4{ALL, ALL, ALL, ALL});
  }
}
