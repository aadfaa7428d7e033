// The emulator notices missing barriers, barriers that not all reach, memory read before it is written, launches too
// large.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <iterator>
#include <numeric>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/ptx.cuh"

namespace {

constexpr unsigned kThreads = 256;

template <typename... Params>
cudaError_t run(void (*kernel)(Params...), unsigned blocks, std::size_t shared_bytes,
                const std::type_identity_t<Params>&... params) {
  cudaLaunchConfig_t config;
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params...);
  static_cast<void>(cudaGetLastError());
  return status;
}

__global__ void shift(float* out, bool with_barrier) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % kThreads];
}

// Half of the block has returned when the other half waits.
__global__ void sum_of_half(int* out) {
  if (threadIdx.x >= kThreads / 2) return;
  __shared__ int sums[kThreads / 2 / 32];
  int sum = 1;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(eaglex::cuda::kFullWarp, sum, offset);
  sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) *out = std::accumulate(std::begin(sums), std::end(sums), 0);
}

__global__ void wait_for_different_things() {
  if (threadIdx.x == 0) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Leaves a value for the next block to find.
__global__ void find_and_leave(int* found) {
  __shared__ float left;
  EAGLEX_DYNAMIC_SHARED(float, dynamic, alignof(float));
  if (threadIdx.x != 0) return;
  *found += std::isnan(left) && std::isnan(dynamic[7]) ? 0 : 1;
  left = dynamic[7] = 1.0F;
}

}  // namespace

TEST_CASE("a missing barrier shows") {
  float out[kThreads];
  for (const bool with_barrier : {true, false}) {
    REQUIRE(run(shift, 1, 0, out, with_barrier) == cudaSuccess);
    int wrong = 0;
    for (unsigned i = 0; i < kThreads; ++i) wrong += out[i] == static_cast<float>((i + 1) % kThreads) ? 0 : 1;
    CHECK((wrong == 0) == with_barrier);
  }
}

TEST_CASE("threads that have returned are not waited for") {
  int out = 0;
  REQUIRE(run(sum_of_half, 3, 0, &out) == cudaSuccess);
  CHECK(out == kThreads / 2);
}

TEST_CASE("a barrier that not all reach is an error, and the next launch is sound") {
  CHECK(run(wait_for_different_things, 2, 0) == cudaErrorLaunchFailure);
  int out = 0;
  REQUIRE(run(sum_of_half, 1, 0, &out) == cudaSuccess);
  CHECK(out == kThreads / 2);
}

TEST_CASE("a block finds nothing of the one before") {
  int found = 0;
  REQUIRE(run(find_and_leave, 4, 64, &found) == cudaSuccess);
  CHECK(found == 0);
}

TEST_CASE("launches beyond the limits are refused") {
  int found = 0;
  CHECK(run(find_and_leave, 0, 64, &found) == cudaErrorInvalidConfiguration);
  CHECK(run(find_and_leave, 1, 64 << 10, &found) == cudaErrorInvalidConfiguration);
  REQUIRE(cudaFuncSetAttribute(find_and_leave, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10) == cudaSuccess);
  CHECK(run(find_and_leave, 1, 64 << 10, &found) == cudaSuccess);
  CHECK(found == 0);
}
