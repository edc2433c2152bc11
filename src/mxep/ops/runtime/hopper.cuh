// Instructions that CUDA C++ has no words for: approximations, and Hopper's barriers in shared memory, copy engine (TMA) and wgmma.
// No includes: NVRTC compiles this text in front of a kernel's own (see nvrtc.py).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct __align__(64) TensorMap { u64 words[16]; };       // CUtensorMap

// ---------------------------------------------------------------- approximations, subnormal numbers flushed to zero

__device__ __forceinline__ float approx_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float approx_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---------------------------------------------------------------- barriers; addresses are shared-memory addresses

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_test(u32 barrier, u32 parity) {  // a look, without waiting
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// ---------------------------------------------------------------- shared memory

__device__ __forceinline__ float2 load_shared_2(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ int4 load_shared_4(u32 address) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_shared_if(float& v, bool wanted, u32 address) {   // v stays what it was where not wanted
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.shared.f32 %0, [%1]; }" : "+f"(v) : "r"(address), "r"((int)wanted));
}

// ---------------------------------------------------------------- the copy engine

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void store_wait() {    // until the copy engine has read its source
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ---------------------------------------------------------------- tensor cores

#define REGS_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                     "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGS_64(d) REGS_8(d, 0), REGS_8(d, 8), REGS_8(d, 16), REGS_8(d, 24), \
                   REGS_8(d, 32), REGS_8(d, 40), REGS_8(d, 48), REGS_8(d, 56)

// A value that all threads of the warp share, in a register of the scalar unit: what is computed from it is computed once
// per warp there, and not 32 times in the vector lanes, which the adding warps need.
__device__ __forceinline__ u32 uniform(u32 x) { return __reduce_or_sync(~0u, x); }

// d (64 x 128) = or += a (64 x 32) b (128 x 32)^T of e4m3.
// a, b: shared addresses / 16 of 64 and 128 rows of 128 bytes, in 128-byte swizzle, 1024 bytes between groups of 8 rows.
__device__ __forceinline__ void wgmma(float (&d)[64], u32 a, u32 b, bool add) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b;\n"
      "setp.ne.b32 p, %66, 0; mov.b64 a, {%64, 0x40000040}; mov.b64 b, {%65, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,"
      "%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      "a, b, p, 1, 1; }"
      : REGS_64(d) : "r"(a), "r"(b), "r"((int)add));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[64]) {  // names d: no use moves above it
  asm volatile("wgmma.wait_group.sync.aligned %64;" : REGS_64(d) : "n"(PENDING) : "memory");
}
