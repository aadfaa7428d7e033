#include "draft/loop.h"

#include <algorithm>
#include <array>
#include <utility>

namespace eaglex {

Loop::Loop(Backend& backend, const DraftConfig& config, const SpeculationConfig& speculation,
           const EngineLimits& limits, const DraftWeights& weights, const KvPool& kv, PoolArrays arrays,
           const DraftResults& results)
    : backend_(backend),
      arrays_(std::move(arrays)),
      context_{config, speculation, limits, kv, results, {}},
      weights_(weights) {
  context_.kv.k = arrays_.k.data();
  context_.kv.v = arrays_.v.data();
  const auto prepare = [&](const auto&... parts) {
    return backend_.prepare(std::array<Matrix, sizeof...(parts)>{parts...});
  };
  fc_ = prepare(weights.fc);
  lm_head_ = prepare(weights.lm_head);
  for (const LayerWeights& layer : weights.layers) {
    layers_.push_back({layer, prepare(layer.q_proj, layer.k_proj, layer.v_proj), prepare(layer.o_proj),
                       prepare(layer.gate_proj, layer.up_proj), prepare(layer.down_proj)});
  }
  Workspace count;
  carve(count);
  workspace_bytes_ = count.used();
  Workspace workspace(backend_.allocate(workspace_bytes_));
  carve(workspace);
  backend_.bind(context_);
  know_tokens();
}

void Loop::know_tokens() const {
  const Layer& first = layers_.front();
  backend_.know_tokens({first.qkv, weights_.embed_tokens, first.weights.input_layernorm,
                        weights_.d2t ? weights_.d2t.as<const std::int64_t>() : nullptr});
}

void Loop::carve(Workspace& workspace) {
  const DraftConfig& config = context_.config;
  const auto lanes = static_cast<std::size_t>(context_.limits.max_batch);
  const auto max_rows = static_cast<std::size_t>(context_.limits.max_rows);
  const auto k = static_cast<std::size_t>(context_.speculation.topk);
  const auto steps = static_cast<std::size_t>(context_.speculation.num_steps);
  const auto grid = static_cast<std::size_t>(context_.speculation.num_candidates());
  const auto frontier = lanes * k;

  LaneState& state = context_.lanes;
  state.status = workspace.take<std::int32_t>(lanes);
  state.new_len = workspace.take<std::int64_t>(lanes);
  state.frontier_tokens = workspace.take<std::int64_t>(frontier);
  state.frontier_nodes = workspace.take<std::int32_t>(frontier);
  state.frontier_scores = workspace.take<float>(frontier);
  state.frontier_parents = workspace.take<std::int32_t>(frontier);
  for (auto& ancestors : state.ancestors) ancestors = workspace.take<std::int32_t>(frontier * steps);
  state.grid_tokens = workspace.take<std::int64_t>(lanes * grid);
  state.grid_parents = workspace.take<std::int32_t>(lanes * grid);
  state.grid_scores = workspace.take<float>(lanes * grid);
  state.grid_nodes = workspace.take<std::int32_t>(lanes * grid);
  state.top_scores = workspace.take<float>(frontier * k);
  state.top_ids = workspace.take<std::int32_t>(frontier * k);

  const std::size_t element = size_of(backend_.activation_type());
  const auto hidden = static_cast<std::size_t>(config.hidden_size) * element;
  const auto q_size = static_cast<std::size_t>(config.q_size()) * element;
  // A draft of one layer runs it on one row per lane only (the single-layer identity); deeper ones on every row below
  // the last.
  const std::size_t rows = config.num_layers > 1 ? std::max(max_rows, frontier) : frontier;
  buffers_.rows = workspace.take_bytes(max_rows * hidden);
  for (auto& buffer : buffers_.hidden) buffer = workspace.take_bytes(frontier * hidden);
  buffers_.q = workspace.take_bytes(rows * q_size);
  buffers_.residual = workspace.take_bytes(rows * hidden);
  buffers_.attention = workspace.take_bytes(rows * q_size);
  buffers_.middle = workspace.take_bytes(rows * hidden);
  buffers_.gated = workspace.take_bytes(rows * static_cast<std::size_t>(config.intermediate_size) * element);

  const std::size_t scratch = lanes * static_cast<std::size_t>(context_.speculation.num_scratch_nodes()) *
                              static_cast<std::size_t>(config.kv_size()) * size_of(context_.kv.dtype);
  for (Layer& layer : layers_) {
    layer.scratch_k = workspace.take_bytes(scratch);
    layer.scratch_v = workspace.take_bytes(scratch);
  }
}

void Loop::cycle(int lanes, int rows) const {
  backend_.admit();
  extend(lanes, rows);
  for (int s = 1; s < context_.speculation.num_steps; ++s) step(s, lanes);
}

void Loop::extend(int lanes, int rows) const {
  const Rows all{Pass::kExtendAll, 0, rows};
  const Rows last{Pass::kExtendLast, 0, lanes};
  const int top = context_.config.num_layers - 1;
  backend_.fuse({all, fc_, weights_.aux_norms.data(), buffers_.rows});
  for (int index = 0; index < top; ++index) layer(index, all, QkvParts::kAll, buffers_.rows, false, buffers_.rows);
  // In the last layer K and V of a row depend on its input alone; only the row that is drafted from needs the rest.
  backend_.qkv(qkv_params(top, all, QkvParts::kKeyValue, buffers_.rows, false));
  if (context_.speculation.num_steps > 0) {
    layer(top, last, QkvParts::kQuery, buffers_.rows, true, buffers_.hidden[0]);
    finish_step(0, last, buffers_.hidden[0]);
  } else {
    backend_.select({0, nullptr});
  }
}

void Loop::step(int step, int lanes) const {
  const Rows rows{Pass::kStep, step, lanes * context_.speculation.topk};
  const void* in = buffers_.hidden[(step - 1) % 2];
  void* const out = buffers_.hidden[step % 2];
  for (int index = 0; index < context_.config.num_layers; ++index) {
    layer(index, rows, QkvParts::kAll, in, index == 0, out);
    in = out;
  }
  finish_step(step, rows, out);
}

QkvParams Loop::qkv_params(int index, const Rows& rows, QkvParts parts, const void* in, bool gather) const {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  QkvParams params;
  params.rows = rows;
  params.layer = index;
  params.parts = parts;
  params.target = rows.pass == Pass::kStep ? KvTarget::kScratch : KvTarget::kPool;
  params.qkv = layer.qkv;
  params.embed_tokens = weights_.embed_tokens;
  params.input_layernorm = layer.weights.input_layernorm;
  params.hidden_norm = layer.weights.hidden_norm;
  params.inv_freq = weights_.inv_freq.as<const float>();
  params.hidden = in;
  params.gather = gather;
  params.q = buffers_.q;
  params.residual = buffers_.residual;
  params.scratch_k = layer.scratch_k;
  params.scratch_v = layer.scratch_v;
  return params;
}

void Loop::layer(int index, const Rows& rows, QkvParts parts, const void* in, bool gather, void* out) const {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  backend_.qkv(qkv_params(index, rows, parts, in, gather));
  backend_.attention({rows, index, buffers_.q, layer.scratch_k, layer.scratch_v, buffers_.attention});
  backend_.o_proj({rows, layer.o_proj, buffers_.attention, buffers_.residual, buffers_.middle});
  backend_.gate_up({rows, layer.gate_up, layer.weights.post_attention_layernorm, buffers_.middle, buffers_.gated});
  backend_.down({rows, layer.down, buffers_.gated, buffers_.middle, out});
}

void Loop::finish_step(int draft_step, const Rows& rows, void* hidden) const {
  backend_.head({rows, lm_head_, weights_.norm, hidden, draft_step, weights_.lm_head_rows});
  backend_.select({draft_step, weights_.d2t ? weights_.d2t.as<const std::int64_t>() : nullptr});
}

}  // namespace eaglex
