// A draft of random weights in device memory, and everything that its steps need around it.
#pragma once

#include <cmath>
#include <memory>
#include <string>

#include "core/params.h"
#include "cuda/stream/steps.h"
#include "packed.cuh"
#include "random.cuh"

namespace eaglex::bench {

struct Shape {
  std::string name;
  int hidden;
  int intermediate;
  int heads;
  int kv_heads;
  int head_dim;
  int draft_vocab;
  int vocab;
  int rotary_dim;
};

// One matrix: its parts row-major (for the plain kernels) and its tiles.
struct Matrix {
  std::vector<std::unique_ptr<Buffer<bf16>>> parts;
  std::vector<Packed> packed;
  std::unique_ptr<Buffer<std::byte>> memory;
  std::unique_ptr<stream::Tiles> tiles;
  Linear linear;
};

inline TensorView view_of(const Buffer<bf16>& buffer, std::int64_t rows, std::int64_t columns) {
  TensorView view;
  view.data = buffer.get();
  view.dtype = DType::kBF16;
  view.device = {DeviceKind::kCuda, 0};
  view.rank = rows == 0 ? 1 : 2;
  view.shape = rows == 0 ? std::array<std::int64_t, 4>{columns} : std::array<std::int64_t, 4>{rows, columns};
  view.stride = rows == 0 ? std::array<std::int64_t, 4>{1} : std::array<std::int64_t, 4>{columns, 1};
  return view;
}

// `type`: kBF16, kF8 or kI4.
inline Matrix make_matrix(const std::vector<int>& rows, int k, const stream::TileOrder& order, std::uint32_t seed,
                          DType type = DType::kBF16, int segments = 1) {
  Matrix matrix;
  std::int64_t total = 0;
  for (const int n : rows) {
    matrix.parts.push_back(std::make_unique<Buffer<bf16>>(static_cast<std::size_t>(n) * k));
    randomise(*matrix.parts.back(), seed + static_cast<std::uint32_t>(matrix.parts.size()), 0,
              1 / std::sqrt(static_cast<float>(k)));
    eaglex::Matrix part = view_of(*matrix.parts.back(), n, k);
    if (type != DType::kBF16) {
      matrix.packed.push_back(quantised(matrix.parts.back()->get(), n, k, type));
      part = matrix.packed.back().matrix;
    }
    matrix.linear.parts[matrix.linear.num_parts++] = part;
    total += n;
  }
  const std::span<const eaglex::Matrix> parts{matrix.linear.parts, static_cast<std::size_t>(matrix.linear.num_parts)};
  const stream::Precision precision = stream::precision_of(parts, segments);
  matrix.memory = std::make_unique<Buffer<std::byte>>(stream::tile_bytes(total, k, precision));
  matrix.tiles =
      std::make_unique<stream::Tiles>(stream::retile(parts, order, precision, matrix.memory->get(), nullptr));
  matrix.linear.prepared = matrix.tiles.get();
  return matrix;
}

struct Model {
  static constexpr int kContext = 1024;  // positions of the prefix
  static constexpr int kMaxRows = stream::kMaxWideTokens;
  static constexpr int kSteps = 5;
  static constexpr int kNumAux = 3;

  Shape shape;
  EngineContext context;
  Matrix fc, qkv, o_proj, gate_up, down, lm_head;
  Buffer<bf16> embed, input_norm, hidden_norm, post_norm, norm, aux_norm;
  Buffer<float> inv_freq;
  Buffer<bf16> aux, hidden, hidden_in, q, attention, residual, middle, act, scratch_k, scratch_v, pool_k, pool_v;
  Buffer<std::int32_t> status, frontier_nodes, frontier_parents, ancestors0, ancestors1, top_ids, row_start, num_valid,
      req_to_token;
  Buffer<std::int64_t> new_len, frontier_tokens, input_ids, slots, seq_lens;
  Buffer<float> top_scores;
  void* pool_arrays[2];
  Buffer<DraftBatch> batch;
  DraftBatch host_batch;
  stream::StreamPlan plan;
  std::unique_ptr<Buffer<std::byte>> workspace, offers;
  bool rescores;  // an INT4 head's best are made exact; a test may turn it off

  Model(const Shape& s, int topk, DType type = DType::kBF16)
      : shape(s),
        fc(make_matrix({s.hidden}, kNumAux * s.hidden, {}, 10)),
        qkv(make_matrix({s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim}, 2 * s.hidden,
                        {stream::RowOrder::kRotary, s.head_dim, s.rotary_dim}, 20, type, 2)),
        o_proj(make_matrix({s.hidden}, s.heads * s.head_dim, {}, 30, type)),
        gate_up(make_matrix({s.intermediate, s.intermediate}, s.hidden, stream::kGateUpOrder, 40, type)),
        down(make_matrix({s.hidden}, s.intermediate, {}, 50, type)),
        lm_head(make_matrix({s.draft_vocab}, s.hidden, {}, 60, type)),
        embed(size(s.vocab) * s.hidden),
        input_norm(size(s.hidden)),
        hidden_norm(size(s.hidden)),
        post_norm(size(s.hidden)),
        norm(size(s.hidden)),
        aux_norm(size(s.hidden) * kNumAux),
        inv_freq(size(s.rotary_dim / 2)),
        aux(size(kMaxRows) * kNumAux * s.hidden),
        hidden(size(kMaxRows) * s.hidden),
        hidden_in(size(kMaxRows) * s.hidden),
        q(size(kMaxRows) * s.heads * s.head_dim),
        attention(size(kMaxRows) * s.heads * s.head_dim),
        residual(size(kMaxRows) * s.hidden),
        middle(size(kMaxRows) * s.hidden),
        act(size(kMaxRows) * s.intermediate),
        scratch_k(size(kMaxRows) * kSteps * topk * s.kv_heads * s.head_dim),
        scratch_v(scratch_k.size()),
        pool_k(size(kMaxRows + 1) * kContext * s.kv_heads * s.head_dim),
        pool_v(pool_k.size()),
        status(kMaxRows),
        frontier_nodes(size(kMaxRows) * topk),
        frontier_parents(size(kMaxRows) * topk),
        ancestors0(size(kMaxRows) * topk * kSteps),
        ancestors1(ancestors0.size()),
        top_ids(size(kMaxRows) * topk),
        row_start(kMaxRows + 1),
        num_valid(kMaxRows),
        req_to_token(size(kMaxRows + 1) * kContext),
        new_len(kMaxRows),
        frontier_tokens(size(kMaxRows) * topk),
        input_ids(kMaxRows),
        slots(kMaxRows),
        seq_lens(kMaxRows),
        top_scores(size(kMaxRows) * topk),
        batch(1) {
    rescores = type == DType::kI4;
    configure(topk);
    contents(topk);
    const stream::DeviceLimits device = stream::current_device();
    const int widest = std::max({kNumAux * s.hidden, s.intermediate, s.heads * s.head_dim, 2 * s.hidden});
    const int tallest =
        std::max({2 * s.intermediate, s.draft_vocab, s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim});
    const stream::StreamNeeds needs{tallest, widest, kNumAux, topk, s.head_dim};
    workspace = std::make_unique<Buffer<std::byte>>(stream::workspace_bytes(device, needs));
    plan = stream::make_plan(device, needs, workspace->get());
    if (rescores) {
      offers = std::make_unique<Buffer<std::byte>>(stream::head_offer_bytes(s.draft_vocab, topk));
      plan.head_offers = reinterpret_cast<std::uint64_t*>(offers->get());
    }
    pool_arrays[0] = pool_k.get(), pool_arrays[1] = pool_v.get();
    plan.pool_k = pool_arrays, plan.pool_v = pool_arrays + 1;
  }

  // Lanes 1..lanes hold a request each of kContext - kSteps positions.
  void set_lanes(int lanes) {
    host_batch.batch = lanes;
    host_batch.num_rows = lanes;
    batch.set({host_batch});
  }

  [[nodiscard]] QkvParams qkv_params(int rows) const {
    QkvParams params;
    params.rows = {Pass::kStep, 1, rows};
    params.target = KvTarget::kScratch;
    params.qkv = qkv.linear;
    params.embed_tokens = view_of(embed, shape.vocab, shape.hidden);
    params.input_layernorm = view_of(input_norm, 0, shape.hidden);
    params.hidden_norm = view_of(hidden_norm, 0, shape.hidden);
    params.inv_freq = inv_freq.get();
    params.hidden = hidden_in.get();
    params.gather = true;
    params.q = q.get();
    params.residual = residual.get();
    params.scratch_k = scratch_k.get();
    params.scratch_v = scratch_v.get();
    return params;
  }

  [[nodiscard]] HeadParams head_params(int rows) const {
    HeadParams params;
    params.rows = {Pass::kStep, 1, rows};
    params.lm_head = lm_head.linear;
    params.norm = view_of(norm, 0, shape.hidden);
    params.hidden = hidden.get();
    if (rescores) params.rescore_rows = view_of(*lm_head.parts[0], shape.draft_vocab, shape.hidden);
    return params;
  }

  void launch_head(int rows, cudaStream_t stream) const {
    const HeadParams params = head_params(rows);
    const int blocks = stream::launch_head(plan, params, context, stream);
    stream::launch_head_end(plan, params, blocks, nullptr, context, batch.get(), stream);
  }

  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

 private:
  void configure(int topk) {
    DraftConfig& c = context.config;
    c.hidden_size = c.target_hidden_size = shape.hidden;
    c.intermediate_size = shape.intermediate;
    c.num_heads = shape.heads;
    c.num_kv_heads = shape.kv_heads;
    c.head_dim = shape.head_dim;
    c.vocab_size = shape.vocab;
    c.draft_vocab_size = shape.draft_vocab;
    c.max_positions = 131072;
    c.rotary_dim = shape.rotary_dim;
    context.speculation = {kSteps, topk, 2, Sampling::kGreedy};
    context.limits = {kMaxRows, kMaxRows, kMaxRows + 1};
    context.kv = {req_to_token.get(), kContext, (kMaxRows + 1) * kContext, DType::kBF16, nullptr, nullptr};
    LaneState& l = context.lanes;
    l.status = status.get();
    l.new_len = new_len.get();
    l.frontier_tokens = frontier_tokens.get();
    l.frontier_nodes = frontier_nodes.get();
    l.frontier_parents = frontier_parents.get();
    l.ancestors[0] = ancestors0.get();
    l.ancestors[1] = ancestors1.get();
    l.top_ids = top_ids.get();
    l.top_scores = top_scores.get();
    host_batch.aux_hidden_states = aux.get();
    host_batch.aux_type = DType::kBF16;
    host_batch.aux_stride = kNumAux * shape.hidden;
    host_batch.input_ids.i64 = input_ids.get();
    host_batch.row_start = row_start.get();
    host_batch.num_valid = num_valid.get();
    host_batch.req_pool_indices.i64 = slots.get();
    host_batch.seq_lens.i64 = seq_lens.get();
  }

  void contents(int topk) {
    randomise(embed, 1, 0, 0.02F);
    randomise(input_norm, 2, 1, 0.1F), randomise(hidden_norm, 3, 1, 0.1F), randomise(post_norm, 4, 1, 0.1F),
        randomise(norm, 5, 1, 0.1F);
    randomise(aux_norm, 6, 1, 0.1F);
    randomise(aux, 7, 0, 2), randomise(hidden_in, 8, 0, 3), randomise(attention, 9, 0, 1);
    randomise(pool_k, 11, 0, 1), randomise(pool_v, 12, 0, 1);
    std::vector<float> frequencies;
    for (int i = 0; i < shape.rotary_dim / 2; ++i) {
      frequencies.push_back(static_cast<float>(std::pow(500000.0, -2.0 * i / shape.rotary_dim)));
    }
    inv_freq.set(frequencies);
    std::vector<std::int32_t> starts(kMaxRows + 1), ones(kMaxRows, 1), parents(size(kMaxRows) * topk),
        nodes(ancestors0.size()), table(req_to_token.size());
    std::vector<std::int64_t> lens(kMaxRows), before(kMaxRows), tokens(size(kMaxRows) * topk), ids(kMaxRows),
        request(kMaxRows);
    for (int i = 0; i <= kMaxRows; ++i) starts[size(i)] = i;
    for (int i = 0; i < kMaxRows; ++i) {
      lens[size(i)] = kContext - kSteps - i % 7;
      before[size(i)] = lens[size(i)] - 1;
      ids[size(i)] = (i * 7919 + 13) % shape.vocab;
      request[size(i)] = 1 + (i * 5) % kMaxRows;
    }
    for (std::size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = (static_cast<std::int64_t>(i) * 104729 + 77) % shape.vocab;
    // The frontier of step 1: its nodes are the scratch's first topk of each lane.
    for (std::size_t i = 0; i < size(kMaxRows) * topk; ++i)
      nodes[i * kSteps] = static_cast<std::int32_t>(i % size(topk));
    for (std::size_t i = 0; i < table.size(); ++i) {  // pages of one slot, scattered
      table[i] = static_cast<std::int32_t>((i * 40503) % table.size());
    }
    row_start.set(starts), num_valid.set(ones), frontier_parents.set(parents), ancestors0.set(nodes),
        req_to_token.set(table);
    new_len.set(lens), seq_lens.set(before), frontier_tokens.set(tokens), input_ids.set(ids), slots.set(request);
  }
};

}  // namespace eaglex::bench
