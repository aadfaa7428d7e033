// CUDA status -> Error.
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace eaglex::stream {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(ErrorCode::kDevice, what, ": ", cudaGetErrorString(status));
}

}  // namespace eaglex::stream
