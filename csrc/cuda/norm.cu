// norm: x / sqrt(mean(x²) + eps) · gamma of each row.
// Callers: gate_up (post-attention norm), head (final norm, the next hidden state too with NextHidden::kNormed).
// Bytes: rows · H · (4 read, 2 to 4 written).
// Mapping: one CTA per row.
#include "cuda/kernels.h"
#include "cuda/norm.cuh"

namespace eaglex::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    norm_input_kernel(const __grid_constant__ Chain chain, const __grid_constant__ NormInput p) {
  __shared__ float shared[kRowWarps];
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  if (row >= rows_of_pass(chain, p.range.rows)) return;
  const int width = chain.context.config.hidden_size;
  T* const out = static_cast<T*>(p.normed) + local * width;
  const T* const x = static_cast<const T*>(p.x) + row * width;
  if (!locate(chain.context, *chain.batch, p.range.rows, row).live) return zero_row(out, width);
  norm_row(
      width, static_cast<const T*>(p.gamma), chain.context.config.rms_norm_eps, [&](int i) { return to_float(x[i]); },
      out, shared);
  if (p.replace == nullptr) return;
  T* const replace = static_cast<T*>(p.replace) + row * width;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kRowThreads) replace[i] = out[i];
}

}  // namespace

void launch_norm_input(const Chain& chain, DType type, const NormInput& params, cudaStream_t stream) {
  dispatch(type, [&]<typename T>(T*) {
    launch("norm", norm_input_kernel<T>, {dim3(static_cast<unsigned>(params.range.count)), kRowThreads, 0, stream},
           chain, params);
  });
}

}  // namespace eaglex::cuda
