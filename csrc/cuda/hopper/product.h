// One product of the Hopper kernel, as its two instances take it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/gemm.h"

namespace eaglex::cuda::hopper {

// One part of the weights.
struct Product {
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  const void* weight = nullptr;
  const void* residual = nullptr;
  void* out = nullptr;
  std::int64_t out_stride = 0;
  int rows = 0;
  int outputs = 0;
  int in = 0;
  int num_sms = 0;
};

void multiply_bf16(const Product& p, Epilogue epilogue, cudaStream_t stream);
void multiply_f16(const Product& p, Epilogue epilogue, cudaStream_t stream);

}  // namespace eaglex::cuda::hopper
