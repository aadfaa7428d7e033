// The one matrix product of the plain chain: rows times weights as the checkpoint has them, any shape, fp32 sums.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace eaglex::cuda {

enum class Epilogue {
  kFloat,   // out fp32 = x Wᵀ; several parts lie side by side
  kStore,   // out = x Wᵀ (+ residual), in the activation type
  kSwiglu,  // out = silu(x W₀ᵀ) · (x W₁ᵀ), in the activation type
};

struct GemmParams {
  const DraftBatch* batch = nullptr;  // how many rows there are is read on the device
  Pass pass = Pass::kExtendAll;
  const std::int32_t* drafting = nullptr;  // the pass's flag (drafting_flag)
  int topk = 1;
  // The launch covers rows [first, first + max_rows) of the pass; x, residual and out point at row `first`.
  int first = 0;
  int max_rows = 0;
  // SMs of a Hopper device, where all of max_rows are the batch's own: a raw launch, no graph of our own. Else 0.
  int hopper_sms = 0;

  const void* x = nullptr;  // [max_rows, in], rows x_stride elements apart
  std::int64_t x_stride = 0;
  int in = 0;
  const void* weight[3] = {};  // [outputs[i], in]
  int outputs[3] = {};
  Epilogue epilogue = Epilogue::kStore;
  const void* residual = nullptr;  // [max_rows, total outputs], may be `out`
  void* out = nullptr;             // [max_rows, total outputs]; [max_rows, outputs[0]] with kSwiglu
};

// `type` is that of x and the weights.
void gemm(DType type, const GemmParams& params, cudaStream_t stream);

}  // namespace eaglex::cuda
