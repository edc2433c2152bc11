// Row chunks of a row of plain values, and the packed MX records that they become, for kernels that write to other ranks.
// Include after hopper.cuh and mx_bytes.cuh.
//
// LANES lanes together take one piece of one row: PARTS chunks each, of 16 values of a record or of WORD bytes. They read it once,
// quantise it once in registers and store it as often as it is wanted; no piece waits for another one.  32 lanes hold 16 blocks of a
// record, whose scales are 16 bytes: the bytes from the last scale to the record's end are the scales of blocks that do not exist.

// Constants that the launcher puts in front.  SCALING: the scaling mode.
// QUANTISED: records, else plain rows.  THREADS: of a block.
// ITEM: bytes of a value that is added up or quantised, 2 (bf16) or 4 (float32).  WORD: bytes of a load or store, 16 for records.
// LANES: a power of two, at least 8 for records; more than one piece, and more than one part of a record, need 32.

constexpr int VALUES = QUANTISED ? 16 : WORD / ITEM;     // of a chunk
constexpr int LOADS = QUANTISED ? ITEM : 1;              // of WORD bytes each make a chunk
constexpr u32 ALL = ~0u;

// ---------------------------------------------------------------- chunks of a row

template <int BYTES> struct WordOf;
template <> struct WordOf<1> { typedef u8 type; };
template <> struct WordOf<2> { typedef unsigned short type; };
template <> struct WordOf<4> { typedef u32 type; };
template <> struct WordOf<8> { typedef uint2 type; };
template <> struct WordOf<16> { typedef uint4 type; };
typedef typename WordOf<WORD>::type Word;

// Said to be global memory: an address out of an argument may be of any kind, for all the compiler knows.
__device__ __forceinline__ void put(u8* at, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}
__device__ __forceinline__ void put(u8* at, uint2 w) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(w.x), "r"(w.y) : "memory");
}
__device__ __forceinline__ void put(u8* at, u32 w) { asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(w) : "memory"); }
__device__ __forceinline__ void put(u8* at, unsigned short w) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(w) : "memory"); }
__device__ __forceinline__ void put(u8* at, u8 w) { asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)w) : "memory"); }

union RowChunk {
  Word words[LOADS];
  u32 bits[LOADS * WORD < 4 ? 1 : LOADS * WORD / 4];
  __device__ __forceinline__ RowChunk() : words{} {}
};

__device__ __forceinline__ void load(RowChunk& to, const u8* from) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) to.words[i] = __ldg((const Word*)from + i);
}

__device__ __forceinline__ float value_of(const RowChunk& chunk, int i) {
  if (ITEM == 4) return __uint_as_float(chunk.bits[i]);
  const u32 pair = chunk.bits[i / 2];
  return __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
}

// ---------------------------------------------------------------- records

struct Codes { uint4 data; u32 exponent; };
// 16 values as e4m3; the neighbouring lane has the other half of the block.
__device__ __forceinline__ Codes quantised(const RowChunk& chunk) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < 4 * ITEM; ++i) {
    if (ITEM == 4) top = max(top, chunk.bits[i] & 0x7FFFFFFF);
    else top = __vmaxu2(top, chunk.bits[i] & 0x7FFF7FFF);
  }
  if (ITEM == 2) top = max(top & 0xFFFF, top >> 16) << 16;
  const BlockScale scale = block_scale<SCALING>(max(top, __shfl_xor_sync(ALL, top, 1)));
  const float factor = __uint_as_float(scale.factor);
  u32 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = __float_as_uint(value_of(chunk, 4 * i + k) * factor);
    codes[i] = pack4(w[0], w[1], w[2], w[3]);
  }
  return {uint4{codes[0], codes[1], codes[2], codes[3]}, scale.exponent};
}

// Of the exponents of one part, two lanes to a block, the four bytes that lane `lane` % 4 stores.
__device__ __forceinline__ u32 scale_word(u32 exponent, u32 lane) {
  u32 word = exponent << 8 * (lane / 2 % 4);
  word |= __shfl_xor_sync(ALL, word, 2);
  word |= __shfl_xor_sync(ALL, word, 4);
  const u32 from = 8 * (lane % 4);
  word = __shfl_sync(ALL, word, from, LANES);
  return from < LANES ? word : 0;
}

// ---------------------------------------------------------------- what a lane stores, and where

struct Parts {
  Word words[PARTS];
  u32 scales;                                            // of a record: four of them
  u32 first, row_chunks, lane, scales_at, scale_words;     // row_chunks: of the row

  __device__ __forceinline__ void store(u8* row) const {
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (first + i * LANES < row_chunks) put(row + (first + i * LANES) * WORD, words[i]);
    if (QUANTISED && lane < 4 * PARTS && scales_at + lane < scale_words) put(row + row_chunks * WORD + (scales_at + lane) * 4, scales);
  }
};

__device__ __forceinline__ Parts parts_of(const RowChunk (&row_chunks)[PARTS], u32 first, u32 number, u32 lane) {
  Parts out;
  out.first = first, out.row_chunks = number, out.lane = lane;
  out.scales_at = first / 32 * 4, out.scale_words = (number + 31) / 32 * 4;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    if constexpr (QUANTISED) {
      const Codes codes = quantised(row_chunks[i]);
      out.words[i] = (const Word&)codes.data;            // of a plain row Word may be another type, and this is compiled all the same
      const u32 scales = scale_word(codes.exponent, lane);
      if (lane / 4 == i) out.scales = scales;
    } else {
      out.words[i] = row_chunks[i].words[0];
    }
  }
  return out;
}
