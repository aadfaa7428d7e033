// Blocks of a cluster and each other's shared memory: they run at once on neighbouring SMs, so they may wait for one
// another whatever else the device does.
#pragma once

#include <cstdint>

namespace eaglex::stream {

__device__ __forceinline__ int cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// By whole warps, each arrival before the next wait. The first pair says that all blocks run (their shared memory may
// be written from then on), a later one that what was written before the arrival is there behind the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Into the same place `at` of block `rank`'s shared memory.
__device__ __forceinline__ void store_in(int rank, std::uint32_t at, float value) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

}  // namespace eaglex::stream
