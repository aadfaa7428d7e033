// gemm (Hopper) for bfloat16 weights; see gemm.cuh.
#include "cuda/hopper/gemm.cuh"

namespace eaglex::cuda::hopper {

void multiply_bf16(const Product& p, Epilogue epilogue, cudaStream_t stream) {
  multiply<cutlass::bfloat16_t>(p, epilogue, stream);
}

}  // namespace eaglex::cuda::hopper
