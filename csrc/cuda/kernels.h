// The launches of the plain chain, one or two per step; csrc/cuda/backend.cu strings them together with gemm().
// All take rows [first, first + count) of a pass; `x`, `raw` and `logits` are the backend's own buffers and start at
// row `first`.
#pragma once

#include "cuda/common.cuh"
#include "cuda/head_scores.h"

namespace eaglex::cuda {

// Compute capability (90 for 9.0) of the code that the current device takes from this build; of PTX that the driver
// compiles, the PTX's own. Throws ErrorCode::kDevice where there is none for it.
[[nodiscard]] int compiled_for();

// At load: a low-bit matrix of the device in the type of the activations, [out, in].
void launch_unpack(const Matrix& matrix, DType type, void* out, cudaStream_t stream);

// fuse: auxiliary hidden states, normed where the draft says so, in the weights' type.
struct FuseInput {
  RowRange range;
  const TensorView* aux_norms = nullptr;
  void* x = nullptr;  // out [count, A·Ht]
};
void launch_fuse_input(const Chain& chain, DType type, const FuseInput& params, cudaStream_t stream);

// qkv: what enters the projections, and what leaves them.
struct QkvInput {
  RowRange range;
  bool first_layer = false;
  bool gather = false;
  const void* embed_tokens = nullptr;
  const void* input_layernorm = nullptr;  // null: none
  const void* hidden_norm = nullptr;
  const void* hidden = nullptr;
  void* x = nullptr;         // out [count, 2H or H]
  void* residual = nullptr;  // out [R, H], or null
};
void launch_qkv_input(const Chain& chain, DType type, const QkvInput& params, cudaStream_t stream);

struct QkvOutput {
  RowRange range;
  QkvParts parts = QkvParts::kAll;
  KvTarget target = KvTarget::kPool;
  const float* raw = nullptr;  // [count, the parts' outputs]
  const float* inv_freq = nullptr;
  void* q = nullptr;  // out [R, heads·D]
  void* k = nullptr;  // out, the layer's pool or scratch
  void* v = nullptr;
};
void launch_qkv_output(const Chain& chain, DType type, const QkvOutput& params, cudaStream_t stream);

// attention: partial results of shares of the keys, then their combination in fixed order.
struct AttentionLaunch {
  RowRange range;  // whole lanes
  const void* q = nullptr;
  const void* pool_k = nullptr;
  const void* pool_v = nullptr;
  const void* scratch_k = nullptr;
  const void* scratch_v = nullptr;
  float* partial = nullptr;  // [count, attention_partial_floats]
  void* out = nullptr;
};
void prepare_attention(const DraftConfig& config);
[[nodiscard]] std::size_t attention_partial_floats(const DraftConfig& config);  // per row
void launch_attention(const Chain& chain, DType type, const AttentionLaunch& params, int num_sms, cudaStream_t stream);

// gate_up and head: the norm in front of the product.
struct NormInput {
  RowRange range;
  const void* x = nullptr;      // [R, H]
  const void* gamma = nullptr;  // [H]
  void* normed = nullptr;       // out [count, H]
  void* replace = nullptr;      // out [R, H] as well, or null; may be x
};
void launch_norm_input(const Chain& chain, DType type, const NormInput& params, cudaStream_t stream);

// head: logits to log-probabilities and ids; the best are made exact before, where there are rows for it
// (core/rescore.h).
struct HeadOutput {
  RowRange range;
  int draft_step = 0;
  float* logits = nullptr;             // [count, Vd]
  float* partial = nullptr;            // [count, segments, 2 + 2n]: max, Σ exp, n scores, n ids
  DType type = DType::kF32;            // of x and the rows
  const void* x = nullptr;             // [count, H], normed
  const void* rescore_rows = nullptr;  // [Vd, H], or null
};
[[nodiscard]] std::size_t head_partial_floats(const EngineContext& context, HeadScores scores);  // per row
void launch_head_output(const Chain& chain, const HeadOutput& params, cudaStream_t stream);

// `begin` is a tree's; a chain's select has no wait.
void launch_select(const Chain& chain, const SelectParams& params, int lanes, Begin begin, cudaStream_t stream);

void launch_tree(const EngineContext& context, const VerifyBatch& batch, int num_sms, cudaStream_t stream);

}  // namespace eaglex::cuda
