// attention: softmax(q kᵀ / √D) v over the prefix in the paged pool and the node's ancestors in the scratch.
#include <cmath>
#include <limits>

#include "cpu/backend.h"
#include "cpu/numeric.h"

namespace eaglex::cpu {
namespace {

using Index = std::int64_t;

// One key and value that a row sees: the arrays they lie in and their row there.
struct Seen {
  const void* k = nullptr;
  const void* v = nullptr;
  Index slot = 0;
};

}  // namespace

void CpuBackend::attention(const AttentionParams& params) {
  const LiveRows live = live_rows(params.rows);
  const Index heads = context_.config.num_kv_heads;
  parallel_for(live.count() * heads, [&](Index task) {
    const auto i = static_cast<std::size_t>(task / heads);
    attend_row(params, live.rows[i], live.places[i], task % heads);
  });
}

void CpuBackend::attend_row(const AttentionParams& params, Index row, const RowPlace& place, Index kv_head) const {
  const DraftConfig& config = context_.config;
  const SpeculationConfig& speculation = context_.speculation;
  const bool step = params.rows.pass == Pass::kStep;
  // Rows of the extend see keys up to their own; drafted nodes see the whole prefix and, in the scratch, their
  // ancestors and self.
  const Index prefix = step ? context_.lanes.new_len[place.lane] : place.position + 1;
  const Index request = batch_.req_pool_indices[place.lane];
  std::vector<Seen> seen;
  seen.reserve(static_cast<std::size_t>(prefix + speculation.num_steps));
  for (Index position = 0; position < prefix; ++position) {
    const Index slot = kv_slot(context_.kv, request, position);
    if (slot >= 0) seen.push_back({context_.kv.k[params.layer], context_.kv.v[params.layer], slot});
  }
  if (step) {
    const std::int32_t* const nodes =
        context_.lanes.ancestors[(params.rows.step - 1) % 2] + row * speculation.num_steps;
    const Index base = static_cast<Index>(place.lane) * speculation.num_scratch_nodes();
    for (int depth = 0; depth < params.rows.step; ++depth)
      seen.push_back({params.scratch_k, params.scratch_v, base + nodes[depth]});
  }

  const int dim = config.head_dim;
  const Index group = config.num_heads / config.num_kv_heads;
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
  std::vector<float> buffer(static_cast<std::size_t>(dim));
  std::vector<float> weight(seen.size());
  for (Index head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const float* const q = static_cast<const float*>(params.q) + row * config.q_size() + head * dim;
    float* const out = static_cast<float*>(params.out) + row * config.q_size() + head * dim;
    float best = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const Index first = (seen[i].slot * config.num_kv_heads + kv_head) * dim;
      weight[i] = scale * dot(q, widen(seen[i].k, context_.kv.dtype, first, dim, buffer.data()), dim);
      best = std::max(best, weight[i]);
    }
    float total = 0;
    for (float& w : weight) total += w = std::exp(w - best);
    for (int j = 0; j < dim; ++j) out[j] = 0;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const Index first = (seen[i].slot * config.num_kv_heads + kv_head) * dim;
      const float* const v = widen(seen[i].v, context_.kv.dtype, first, dim, buffer.data());
      for (int j = 0; j < dim; ++j) out[j] += weight[i] / total * v[j];
    }
  }
}

}  // namespace eaglex::cpu
