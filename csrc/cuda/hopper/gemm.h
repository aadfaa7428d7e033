// The matrix product of long prompts on Hopper, by CUTLASS: warp-specialised wgmma over TMA. Compiled for sm_90a alone,
// where the nvidia-cutlass wheel is there; elsewhere the plain chain's own kernel does the same work.
#pragma once

#include "cuda/gemm.h"

namespace eaglex::cuda::hopper {

// From here on an SM's tensor cores are the limit, not the weights' bytes.
inline constexpr int kLeastRows = 512;

// Launches the product and returns true, or returns false where it is none of this kernel's: another type or epilogue,
// fewer rows, addresses or widths that TMA cannot take. The caller has made sure of params.hopper_sms > 0.
[[nodiscard]] bool gemm(DType type, const GemmParams& params, cudaStream_t stream);

}  // namespace eaglex::cuda::hopper
