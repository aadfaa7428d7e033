// qkv of drafted tokens by a table of what the embeddings' half makes of each (csrc/cuda/stream/qkv_drafted.cu), against
// the plain one of both halves.
#pragma once

#include "check.cuh"

namespace eaglex::bench {

// Rows of step 1 whose tokens are ids of the draft vocabulary, as head and select would leave them.
class Drafted {
 public:
  Drafted(Model& m, cudaStream_t stream)
      : m_(m),
        tokens_(m.frontier_tokens.host()),
        width_(stream::token_product_width(m.context.config)),
        products_(Model::size(m.shape.draft_vocab) * Model::size(width_)) {
    const DraftedTokens known{m.qkv.linear, view_of(m.embed, m.shape.vocab, m.shape.hidden),
                              view_of(m.input_norm, 0, m.shape.hidden), nullptr};
    stream::launch_token_products(m.plan, known, m.context.config, products_.get(), stream);
    stream::check(cudaStreamSynchronize(stream), "token products");
    const int topk = m.context.speculation.topk;
    std::vector<std::int64_t> tokens = tokens_;
    std::vector<std::int32_t> ids(m.top_ids.size()), nodes(m.frontier_nodes.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = (static_cast<std::int64_t>(i) * 104729 + 77) % std::min(m.shape.draft_vocab, m.shape.vocab);
      const std::size_t rank = topk - 1 - i % topk;  // the frontier is in another order than the candidates
      ids[i - i % topk + rank] = static_cast<std::int32_t>(tokens[i]);
      nodes[i] = static_cast<std::int32_t>(rank) + 1;
    }
    m.frontier_tokens.set(tokens), m.top_ids.set(ids), m.frontier_nodes.set(nodes);
  }
  ~Drafted() { m_.frontier_tokens.set(tokens_); }
  Drafted(const Drafted&) = delete;
  Drafted& operator=(const Drafted&) = delete;

  void check(int rows, bool early, cudaStream_t stream, Verdict& verdict) const {
    stream::StreamPlan plan = m_.plan;
    plan.token_products = products_.get();
    plan.hidden_is_there = early;
    for (const Buffer<bf16>* const out : {&m_.q, &m_.residual, &m_.scratch_k, &m_.scratch_v})
      stream::check(cudaMemsetAsync(out->get(), 0xFF, out->size() * sizeof(bf16), stream), "poison");
    stream::launch_qkv(plan, m_.qkv_params(rows), m_.context, m_.batch.get(), stream);
    stream::check(cudaStreamSynchronize(stream), "qkv of drafted tokens");
    check_qkv(m_, rows, verdict);
  }

 private:
  Model& m_;
  std::vector<std::int64_t> tokens_;
  int width_;
  Buffer<bf16> products_;
};

inline void check_drafted(Model& m, int rows, cudaStream_t stream, Verdict& verdict) {
  const Drafted drafted(m, stream);
  drafted.check(rows, false, stream, verdict);
  if (rows != 1 || m.context.speculation.topk != 1) return;
  const Floats late = floats_of(m.q, Model::size(m.shape.heads) * m.shape.head_dim);
  drafted.check(rows, true, stream, verdict);
  verdict.require(floats_of(m.q, late.size()) == late, "the same bits, early");
}

}  // namespace eaglex::bench
