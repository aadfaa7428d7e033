// Stands in for the CUDA runtime: what the plain kernels of csrc/cuda use of it, and no more, so that g++ compiles them
// as they are and a machine without a GPU runs them. Device side here, host side in emulated_host.h.
//
// Emulated: every thread of a block as a fiber of its own, in shuffled order; barriers and votes of a block, barriers
// and shuffles of a warp; shared memory, full of NaN at the start of each block; limits of a launch; capture and replay
// of graphs; a device that lags behind the host, on demand. A barrier that some threads never reach is an error of the
// launch, not a hang.
// Not emulated: memory ordering and races between blocks (they run one after the other), separate address spaces,
// timing, and how the tensor cores round. Those are for tests/gpu.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __host__
// In a section of its own, so that it can be poisoned between blocks. One block runs at a time, hence `static`.
#define __shared__ static __attribute__((section("emulated_shared")))
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
struct float2 {
  float x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Of the thread and block that run.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 1024;

enum class Vote { kAll, kAny };

// Wait for the other threads of the block or warp; those that have returned count as arrived, as on the device.
void block_barrier();
void warp_barrier();
int block_vote(int value, Vote vote);
// In a loop that polls: the other threads go on, and now and then so does whoever needs this processor, since what is
// waited for may come from another process.
void pause();

// Of the block that runs.
extern unsigned char* dynamic_shared;

// What the lanes of a warp show each other: written, then read behind one warp_barrier. There are two per warp in turn,
// so that a fast lane's next words do not overwrite what a slow one has yet to read; hence ask for it before the
// barrier.
struct Exchange {
  std::uint64_t words[kWarp][6];
};
Exchange& exchange();
inline int lane() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::block_barrier();
}
inline int __syncthreads_and(int value) {
  return emulator::block_vote(value, emulator::Vote::kAll);
}
inline int __syncthreads_or(int value) {
  return emulator::block_vote(value, emulator::Vote::kAny);
}
inline void __syncwarp() {
  emulator::warp_barrier();
}

template <typename V>
V __shfl_xor_sync(unsigned, V value, int mask) {
  static_assert(sizeof(V) <= sizeof(std::uint64_t));
  auto& words = emulator::exchange().words;
  std::memcpy(&words[emulator::lane()][0], &value, sizeof(V));
  emulator::warp_barrier();
  std::memcpy(&value, &words[emulator::lane() ^ mask][0], sizeof(V));
  return value;
}

using std::isfinite;
using std::isnan;
using std::max;
using std::min;
inline float rsqrtf(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __ffs(unsigned x) {
  return x == 0 ? 0 : std::countr_zero(x) + 1;
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline void __threadfence_system() {}
// One thread runs at a time.
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  const unsigned long long before = *to;
  *to += value;
  return before;
}

#include "emulated_host.h"
