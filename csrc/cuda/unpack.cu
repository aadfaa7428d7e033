// A low-bit matrix in the type of the activations: s · q, rounded once.    Formula: reference_low_bit.py unpacked.
// Caller: CudaBackend::bind, once per matrix that the plain chain reads.    Bytes: the matrix in, 2 or 4 per weight out.
// Mapping: a thread per weight.
#include "cuda/kernels.h"
#include "cuda/packed.cuh"

namespace eaglex::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 1024;

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ WeightSource source, std::int64_t count, DType type, void* out) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride)
    store_float(out, type, i, weight_at(source, i / source.in, i % source.in));
}

}  // namespace

void launch_unpack(const Matrix& matrix, DType type, void* out, cudaStream_t stream) {
  const std::int64_t count = matrix.numel();
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + kThreads - 1) / kThreads, kBlocks));
  launch("unpack", unpack_kernel, {dim3(blocks), kThreads, 0, stream}, source_of(matrix), count, type, out);
}

}  // namespace eaglex::cuda
