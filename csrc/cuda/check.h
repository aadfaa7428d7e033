// CUDA status -> Error.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"

namespace eaglex::cuda {

// Throws ErrorCode::kDevice with the call and CUDA's own words.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  // An error that does not stick must not surface again in somebody else's check.
  static_cast<void>(cudaGetLastError());
  fail(ErrorCode::kDevice, what, ": ", cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}

}  // namespace eaglex::cuda
