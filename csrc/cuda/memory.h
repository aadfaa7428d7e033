// Device and pinned memory with an owner. Taken while planning only.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

#include "cuda/common.cuh"

namespace eaglex::cuda {

struct FreeDevice {
  void operator()(void* block) const { static_cast<void>(cudaFree(block)); }
};
struct FreePinned {
  void operator()(void* block) const { static_cast<void>(cudaFreeHost(block)); }
};
using DeviceMemory = std::unique_ptr<void, FreeDevice>;
using PinnedMemory = std::unique_ptr<void, FreePinned>;

// Zeroed when this returns.
inline DeviceMemory allocate_device(std::size_t bytes) {
  void* block = nullptr;
  const cudaError_t status = cudaMalloc(&block, bytes == 0 ? 1 : bytes);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    fail(ErrorCode::kDevice, "device memory: expected ", bytes, " bytes free, got ", cudaGetErrorString(status));
  }
  DeviceMemory memory(block);
  EAGLEX_CUDA_CHECK(cudaMemset(block, 0, bytes));
  EAGLEX_CUDA_CHECK(cudaDeviceSynchronize());
  return memory;
}

// Zeroed, and readable and writable by the device under the same address.
PinnedMemory allocate_pinned(std::size_t bytes);

}  // namespace eaglex::cuda
