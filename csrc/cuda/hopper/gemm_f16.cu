// gemm (Hopper) for float16 weights; see gemm.cuh.
#include "cuda/hopper/gemm.cuh"

namespace eaglex::cuda::hopper {

void multiply_f16(const Product& p, Epilogue epilogue, cudaStream_t stream) {
  multiply<cutlass::half_t>(p, epilogue, stream);
}

}  // namespace eaglex::cuda::hopper
