// qkv: x = [norm(embedding) | norm(hidden)] (first layer) or norm(hidden); x Wᵀ (gemm); RoPE; K, V to pool or scratch.
// Caller: per layer; over all extend rows for K and V alone in the last layer, then over one row per lane for q.
// Bytes: rows · (4H read, 4H written) before, rows · outputs · (4 read, 2 written) after the product.
// Mapping: one CTA per row, both times.
#include "cuda/kernels.h"
#include "cuda/norm.cuh"

namespace eaglex::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    qkv_input_kernel(const __grid_constant__ Chain chain, const __grid_constant__ QkvInput p) {
  __shared__ float shared[kRowWarps];
  const EngineContext& context = chain.context;
  const DraftBatch& batch = *chain.batch;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  const Pass pass = p.range.rows.pass;
  if (row >= rows_of_pass(chain, p.range.rows)) return;
  const int hidden_size = context.config.hidden_size;
  const int width = p.first_layer ? 2 * hidden_size : hidden_size;
  T* const x = static_cast<T*>(p.x) + local * width;
  T* const residual = p.residual == nullptr ? nullptr : static_cast<T*>(p.residual) + row * hidden_size;
  const RowPlace place = locate(context, batch, p.range.rows, row);
  if (!place.live) {
    zero_row(x, width);
    if (residual != nullptr) zero_row(residual, hidden_size);
    return;
  }
  const T* const hidden = static_cast<const T*>(p.hidden) + (p.gather ? place.source : row) * hidden_size;
  const float eps = context.config.rms_norm_eps;
  const auto* const hidden_gamma = static_cast<const T*>(p.first_layer ? p.hidden_norm : p.input_layernorm);
  T* const normed = p.first_layer ? x + hidden_size : x;
  norm_row(hidden_size, hidden_gamma, eps, [&](int i) { return to_float(hidden[i]); }, normed, shared);
  if (p.first_layer) {
    const std::int64_t token = pass == Pass::kStep ? context.lanes.frontier_tokens[row] : batch.input_ids[place.source];
    const T* const embedding = static_cast<const T*>(p.embed_tokens) + token * hidden_size;
    norm_row(
        hidden_size, static_cast<const T*>(p.input_layernorm), eps, [&](int i) { return to_float(embedding[i]); }, x,
        shared);
  }
  if (residual == nullptr) return;
  const bool normed_residual = p.first_layer && context.config.residual == Residual::kNormed;
  // Each thread reads back what it wrote itself.
  for (int i = static_cast<int>(threadIdx.x); i < hidden_size; i += kRowThreads)
    residual[i] = normed_residual ? normed[i] : hidden[i];
}

// A NaN in the pool would void every later draft of all requests that share the prefix.
__device__ float finite_or_zero(DType type, float x) {
  return isfinite(rounded(type, x)) ? x : 0.0F;
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    qkv_output_kernel(const __grid_constant__ Chain chain, const __grid_constant__ QkvOutput p) {
  __shared__ float cosine[kRowThreads], sine[kRowThreads];  // rotary_dim / 2 <= 128
  const EngineContext& context = chain.context;
  const DraftConfig& config = context.config;
  const DraftBatch& batch = *chain.batch;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  const int topk = context.speculation.topk;
  if (row >= rows_of_pass(chain, p.range.rows)) return;
  const int q_size = p.parts == QkvParts::kKeyValue ? 0 : config.q_size();
  const int kv_size = p.parts == QkvParts::kQuery ? 0 : config.kv_size();
  T* const q = static_cast<T*>(p.q) + row * config.q_size();
  const RowPlace place = locate(context, batch, p.range.rows, row);
  if (!place.live) return zero_row(q, q_size);

  const int half = config.rotary_dim / 2;
  if (static_cast<int>(threadIdx.x) < half) {
    // The angle is rounded to float, as the models were trained.
    const float angle = static_cast<float>(place.position) * p.inv_freq[threadIdx.x];
    cosine[threadIdx.x] = cosf(angle) * config.rope_factor;
    sine[threadIdx.x] = sinf(angle) * config.rope_factor;
  }
  __syncthreads();

  std::int64_t slot = -1;
  if (p.parts != QkvParts::kQuery) {
    slot = p.target == KvTarget::kPool
               ? write_slot(context, batch, place.lane, place.source, place.position)
               : static_cast<std::int64_t>(place.lane) * context.speculation.num_scratch_nodes() +
                     (p.range.rows.step - 1) * topk + row % topk;
  }
  const float* const raw = p.raw + local * (q_size + 2 * kv_size);
  const int head_dim = config.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < q_size + 2 * kv_size; i += kRowThreads) {
    float x = raw[i];
    const int d = i % head_dim;  // q_size and kv_size are whole heads
    if (i < q_size + kv_size && d < 2 * half)
      x = d < half ? x * cosine[d] - raw[i + half] * sine[d] : x * cosine[d - half] + raw[i - half] * sine[d - half];
    if (i < q_size) {
      q[i] = from_float<T>(x);
    } else if (slot >= 0) {
      const bool key = i < q_size + kv_size;
      store_float(key ? p.k : p.v, context.kv.dtype, slot * kv_size + i - q_size - (key ? 0 : kv_size),
                  finite_or_zero(context.kv.dtype, x));
    }
  }
}

}  // namespace

void launch_qkv_input(const Chain& chain, DType type, const QkvInput& params, cudaStream_t stream) {
  dispatch(type, [&]<typename T>(T*) {
    launch("qkv input", qkv_input_kernel<T>, {dim3(static_cast<unsigned>(params.range.count)), kRowThreads, 0, stream},
           chain, params);
  });
}

void launch_qkv_output(const Chain& chain, DType type, const QkvOutput& params, cudaStream_t stream) {
  dispatch(type, [&]<typename T>(T*) {
    launch("qkv output", qkv_output_kernel<T>,
           {dim3(static_cast<unsigned>(params.range.count)), kRowThreads, 0, stream}, chain, params);
  });
}

}  // namespace eaglex::cuda
