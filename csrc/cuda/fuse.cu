// fuse: x = norm(aux) per auxiliary layer, per row or not at all; then hidden = x W_fcᵀ (gemm).
// Caller: once per cycle, over every row of the extend.
// Bytes: rows · A·Ht · (2 to 4 read, 2 written); fc is read by gemm.
// Mapping: one CTA per row.
#include "cuda/kernels.h"
#include "cuda/norm.cuh"

namespace eaglex::cuda {
namespace {

struct Part {
  RowRange range;
  int begin = 0;  // columns of the row that this launch norms
  int width = 0;
  const void* gamma = nullptr;
  void* x = nullptr;
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    fuse_input_kernel(const __grid_constant__ Chain chain, const __grid_constant__ Part part) {
  __shared__ float shared[kRowWarps];
  const DraftBatch& batch = *chain.batch;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = part.range.first + local;
  if (row >= batch.num_rows) return;
  T* const out = static_cast<T*>(part.x) + local * chain.context.config.aux_width() + part.begin;
  if (!locate(chain.context, batch, part.range.rows, row).live) return zero_row(out, part.width);
  const std::int64_t at = row * batch.aux_stride + part.begin;
  const auto load = [&](int i) {
    return to_float(from_float<T>(load_float(batch.aux_hidden_states, batch.aux_type, at + i)));
  };
  norm_row(part.width, static_cast<const T*>(part.gamma), chain.context.config.rms_norm_eps, load, out, shared);
}

}  // namespace

void launch_fuse_input(const Chain& chain, DType type, const FuseInput& params, cudaStream_t stream) {
  const DraftConfig& config = chain.context.config;
  const bool each = config.aux_norm == AuxNorm::kEach;
  const int parts = each ? config.num_aux : 1;
  for (int i = 0; i < parts; ++i) {
    Part part{params.range, 0, config.aux_width(), nullptr, params.x};
    if (config.aux_norm != AuxNorm::kNone) part.gamma = params.aux_norms[i].data;
    if (each) {
      part.width = config.target_hidden_size;
      part.begin = i * part.width;
    }
    dispatch(type, [&]<typename T>(T*) {
      launch("fuse", fuse_input_kernel<T>, {dim3(static_cast<unsigned>(params.range.count)), kRowThreads, 0, stream},
             chain, part);
    });
  }
}

}  // namespace eaglex::cuda
