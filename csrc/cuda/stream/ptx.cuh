// The instructions behind the weight stream, one thin function each. Before sm_90 there are neither bulk copies nor
// programmatic dependent launch (PDL): FastChain refuses such devices, and the kernels' bodies are empty there.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

// Around the body of every kernel of the chain: a library for several architectures holds empty ones for older devices.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define EAGLEX_STREAM_KERNELS 1
#else
#define EAGLEX_STREAM_KERNELS 0
#endif

namespace eaglex::stream {

// Whether this compilation has Hopper's warpgroup products: they are in sm_90a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kWgmma = true;
#else
inline constexpr bool kWgmma = false;
#endif

inline constexpr std::uint64_t kDeadlineNs = 2'000'000'000;  // no wait inside a kernel outlives this

__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- PDL. `release_dependents` only lets the next kernel be scheduled; `wait_for_producers` is what makes data
// visible. Seen on an H200: while one warp of a block waits, the others of the block stand still too. So nothing that
// is to run beside the kernel before may come after the block's first wait.
__device__ __forceinline__ void release_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_producers() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Whether the flag says that nobody wants what this launch would do. Before the wait it may be read only where whoever
// raises it is done before this kernel can start: the kernels between release their dependents after their own wait
// (Release::kAfterWait of fuse and of qkv with queries).
__device__ __forceinline__ bool is_idle(const std::int32_t* needed) {
  if (needed == nullptr) return false;
  std::int32_t raised;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(needed) : "memory");
  return raised == 0;
}
// Whether there are not more than `first` of what is counted there.
__device__ __forceinline__ bool is_behind(const std::int32_t* count, int first) {
  if (count == nullptr) return false;
  std::int32_t there;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
  return there <= first;
}

// ---- mbarriers in shared memory; `bar` is a shared address.
__device__ __forceinline__ void mbar_init(std::uint32_t bar, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the bulk-copy engine; threads of the block need a barrier of their own besides.
__device__ __forceinline__ void mbar_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Between what threads have read and written of the block's shared memory and the tensor cores' or bulk copies' reads.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(std::uint32_t bar) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_arrive_expect(std::uint32_t bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Arrives, for the calling thread, once all its earlier cp.async have landed.
__device__ __forceinline__ void mbar_arrive_on_cp_async(std::uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ bool mbar_try_wait(std::uint32_t bar, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}

// A copy of this block that does not land within the deadline is a fault of the device: trap rather than hang. The
// clock must not include the kernel before: whoever gets here has waited for the producers, or waits for nothing but
// weights.
inline __device__ __noinline__ void mbar_wait_slow(std::uint32_t bar, std::uint32_t parity, std::uint64_t deadline) {
  const std::uint64_t start = now_ns();
  std::uint32_t polls = 0;
#pragma unroll 1
  while (!mbar_try_wait(bar, parity)) {
    if ((++polls & 255U) == 0 && now_ns() - start > deadline) __trap();
  }
}

__device__ __forceinline__ void mbar_wait(std::uint32_t bar, std::uint32_t parity,
                                          std::uint64_t deadline = kDeadlineNs) {
  if (mbar_try_wait(bar, parity)) return;
  if (mbar_try_wait(bar, parity)) return;
  mbar_wait_slow(bar, parity, deadline);
}

// ---- copies from global to shared memory.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One thread copies `bytes` (a multiple of 16); completes on `bar`. Weights are read once: the policy keeps them from
// evicting the rest.
__device__ __forceinline__ void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t bar,
                                          std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Brings a line towards L1; nobody waits. (A plain load into a register that is never used would be optimised away.)
__device__ __forceinline__ void touch(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p) : "memory");
}

// Brings a line into L2; nobody waits.
__device__ __forceinline__ void touch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

__device__ __forceinline__ std::int64_t load_past_l1(const std::int64_t* p) {
  std::int64_t v;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::int32_t load_past_l1(const std::int32_t* p) {
  std::int32_t v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Reads a kernel's parameters once. Before the wait it costs nothing; after it, each of their cache lines would be a
// miss of its own.
template <class Params>
__device__ __forceinline__ void touch_parameters(const Params& params) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(&params);
#pragma unroll
  for (std::size_t i = 0; i < sizeof(Params) / 4; i += 8) asm volatile("" ::"r"(words[i]));
}

// ---- counters between the blocks of one kernel.
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void add_release(std::uint32_t* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

// Counts up to `last`, then wraps to 0; returns the value before.
__device__ __forceinline__ std::uint32_t increment_wrapping(std::uint32_t* p, std::uint32_t last) {
  std::uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(last) : "memory");
  return old;
}

// ---- pairs of bf16 in a register, the first in the low half.
__device__ __forceinline__ std::uint32_t pack(const __nv_bfloat162& pair) {
  std::uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  return pack(__floats2bfloat162_rn(low, high));
}
__device__ __forceinline__ __nv_bfloat162 unpack(std::uint32_t bits) {
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof(bits));
  return pair;
}

// Four 8 x 8 matrices of 16 bits: lane l says where row l % 8 of matrix l / 8 lies, and gets word l % 4 of row l / 4 of
// each.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

// ---- tensor cores: D[16 x 8] += A[16 x 16] B[16 x 8].
__device__ __forceinline__ void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D = C + A B.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                         const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// D[16 x 8] = A[16 x 32] B[32 x 8] in whole numbers: A without signs, B with.
__device__ __forceinline__ void mma_int8(int (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// D[16 x 8] += A[16 x 8] B[8 x 8].
__device__ __forceinline__ void mma_bf16(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace eaglex::stream
