// Every streaming step against the plain one, from the same inputs.
#pragma once

#include "core/rescore.h"
#include "plain.cuh"

namespace eaglex::bench {

static __global__ void gather_kernel(const bf16* table, const std::int64_t* rows, int width, bf16* out) {
  for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x))
    out[static_cast<std::int64_t>(blockIdx.x) * width + i] = table[rows[blockIdx.x] * width + i];
}

// Those rows of a table in device memory, which may be too large to be copied as a whole.
inline Floats fetch_rows(const Buffer<bf16>& table, const std::vector<std::int64_t>& rows, int width) {
  const std::size_t count = rows.size() * Model::size(width);
  const Buffer<std::int64_t>& places = reused<std::int64_t, 0>(rows.size());
  const Buffer<bf16>& out = reused<bf16, 0>(count);
  places.set(rows);
  gather_kernel<<<static_cast<unsigned>(rows.size()), 256>>>(table.get(), places.get(), width, out.get());
  stream::check(cudaGetLastError(), "gather");
  return floats_of(out, count);
}

inline Floats gather_rows(const Floats& table, const std::vector<std::int64_t>& rows, int count, int width) {
  Floats out;
  for (int t = 0; t < count; ++t) {
    const auto begin = table.begin() + rows[static_cast<std::size_t>(t)] * width;
    out.insert(out.end(), begin, begin + width);
  }
  return out;
}

// One head of D dims in place: halves paired, the angle in float.
inline void plain_rope(float* head, float position, const Shape& s, const Floats& inv_freq, bool round) {
  const int half = s.rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = position * inv_freq[static_cast<std::size_t>(i)];
    const auto cosine = static_cast<float>(std::cos(angle));
    const auto sine = static_cast<float>(std::sin(angle));
    const float left = head[i];
    const float right = head[i + half];
    head[i] = maybe_rounded(left * cosine - right * sine, round);
    head[i + half] = maybe_rounded(right * cosine + left * sine, round);
  }
}

// [tokens, q | k | v] of step 1, after RoPE.
inline Floats plain_qkv(const Model& m, int tokens, bool round) {
  const Shape& s = m.shape;
  const int topk = m.context.speculation.topk;
  std::vector<std::int64_t> lanes;
  for (int t = 0; t < tokens; ++t) lanes.push_back(t / topk);
  std::vector<std::int64_t> ids = m.frontier_tokens.host();
  ids.resize(Model::size(tokens));
  const Floats e = fetch_rows(m.embed, ids, s.hidden);
  const Floats h = gather_rows(floats_of(m.hidden_in, m.hidden_in.size()), lanes, tokens, s.hidden);
  const Floats en = plain_norm(e, tokens, floats_of(m.input_norm, Model::size(s.hidden)), round);
  const Floats hn = plain_norm(h, tokens, floats_of(m.hidden_norm, Model::size(s.hidden)), round);
  Floats x;
  for (int t = 0; t < tokens; ++t) {
    x.insert(x.end(), en.begin() + static_cast<std::int64_t>(t) * s.hidden,
             en.begin() + static_cast<std::int64_t>(t + 1) * s.hidden);
    x.insert(x.end(), hn.begin() + static_cast<std::int64_t>(t) * s.hidden,
             hn.begin() + static_cast<std::int64_t>(t + 1) * s.hidden);
  }
  Floats y = plain_linear(x, tokens, m.qkv, round);
  const Floats inv_freq = m.inv_freq.host();
  const std::vector<std::int64_t> lens = m.new_len.host();
  const int width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  for (int t = 0; t < tokens; ++t) {
    for (int head = 0; head < s.heads + s.kv_heads; ++head) {
      plain_rope(y.data() + static_cast<std::int64_t>(t) * width + head * s.head_dim,
                 static_cast<float>(lens[Model::size(t / topk)]), s, inv_freq, round);
    }
  }
  return y;
}

inline Floats columns(const Floats& x, int rows, int width, int from, int count) {
  Floats out;
  for (int t = 0; t < rows; ++t) {
    const auto begin = x.begin() + static_cast<std::int64_t>(t) * width + from;
    out.insert(out.end(), begin, begin + count);
  }
  return out;
}

inline void check_qkv(const Model& m, int tokens, Verdict& verdict) {
  const Shape& s = m.shape;
  const int q = s.heads * s.head_dim;
  const int kv = s.kv_heads * s.head_dim;
  const int topk = m.context.speculation.topk;
  const int nodes = m.context.speculation.num_scratch_nodes();
  const Floats exact = plain_qkv(m, tokens, false);
  const Floats round = plain_qkv(m, tokens, true);
  const auto part = [&](int from, int count) {
    return [&, from, count](bool r) { return columns(r ? round : exact, tokens, q + 2 * kv, from, count); };
  };
  verdict.take("q", floats_of(m.q, Model::size(tokens) * q), part(0, q));
  std::vector<std::int64_t> at;  // step 1 writes the first topk nodes of each lane
  for (int t = 0; t < tokens; ++t) at.push_back(static_cast<std::int64_t>(t / topk) * nodes + t % topk);
  verdict.take("k", fetch_rows(m.scratch_k, at, kv), part(q, kv));
  verdict.take("v", fetch_rows(m.scratch_v, at, kv), part(q + kv, kv));
  std::vector<std::int64_t> lanes;
  for (int t = 0; t < tokens; ++t) lanes.push_back(t / topk);
  verdict.require(floats_of(m.residual, Model::size(tokens) * s.hidden) ==
                      gather_rows(floats_of(m.hidden_in, m.hidden_in.size()), lanes, tokens, s.hidden),
                  "residual");
}

inline void check_projection(const char* what, const Matrix& matrix, const Buffer<bf16>& x,
                             const Buffer<bf16>& residual, const Buffer<bf16>& out, int tokens, Verdict& verdict) {
  const auto n = Model::size(matrix.linear.parts[0].shape[0]);
  const auto k = Model::size(matrix.linear.parts[0].shape[1]);
  verdict.take(what, floats_of(out, Model::size(tokens) * n), [&](bool round) {
    Floats y = plain_linear(floats_of(x, Model::size(tokens) * k), tokens, matrix, round);
    const Floats r = floats_of(residual, y.size());
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = maybe_rounded(r[i] + y[i], round);
    return y;
  });
}

inline void check_gate_up(const Model& m, int tokens, Verdict& verdict) {
  const auto inter = Model::size(m.shape.intermediate);
  verdict.take("gate_up", floats_of(m.act, Model::size(tokens) * inter), [&](bool round) {
    const Floats x = plain_norm(floats_of(m.middle, Model::size(tokens) * m.shape.hidden), tokens,
                                floats_of(m.post_norm, Model::size(m.shape.hidden)), round);
    const Floats y = plain_linear(x, tokens, m.gate_up, round);
    Floats out(Model::size(tokens) * inter);
    for (std::size_t t = 0; t < Model::size(tokens); ++t) {
      for (std::size_t i = 0; i < inter; ++i) {
        const float gate = y[t * 2 * inter + i];
        out[t * inter + i] =
            maybe_rounded(maybe_rounded(gate / (1 + std::exp(-gate)), round) * y[t * 2 * inter + inter + i], round);
      }
    }
    return out;
  });
}

// What is drafted of a row whose best are made exact, as far as arithmetic tells values apart: `surely` those that are
// scored again whatever the rounding, `perhaps` those that may be (core/rescore.h).
struct Rescored {
  std::vector<bool> surely, perhaps;
};

inline Rescored rescored_of(const float* scan, std::size_t vocab, int topk, float slack) {
  constexpr std::size_t kGroup = kRescoreGroup;
  Floats offered;
  Rescored ids{std::vector<bool>(vocab), std::vector<bool>(vocab)};
  Floats worst_in, best_out;  // of each group: the last that it offers, the first that it does not
  for (std::size_t first = 0; first < vocab; first += kGroup) {
    Floats group(scan + first, scan + std::min(vocab, first + kGroup));
    std::sort(group.begin(), group.end(), std::greater<>());
    const std::size_t count = std::min(static_cast<std::size_t>(group_offers(topk)), group.size());
    offered.insert(offered.end(), group.begin(), group.begin() + static_cast<std::int64_t>(count));
    worst_in.push_back(group[count - 1]);
    best_out.push_back(count < group.size() ? group[count] : -1e30F);
  }
  const std::size_t kept = std::min(offered.size(), static_cast<std::size_t>(rescored(topk)));
  std::sort(offered.begin(), offered.end(), std::greater<>());
  const float worst = offered[kept - 1];
  const float next = kept < offered.size() ? offered[kept] : -1e30F;
  for (std::size_t i = 0; i < vocab; ++i) {
    ids.perhaps[i] = scan[i] >= std::max(worst, worst_in[i / kGroup]) - slack;
    ids.surely[i] =
        scan[i] >= std::max(worst, worst_in[i / kGroup]) && scan[i] > std::max(next, best_out[i / kGroup]) + slack;
  }
  return ids;
}

// Scores in order against the exact ones; ids may differ only where logits are closer than the arithmetic tells apart.
inline void check_head(const Model& m, int tokens, Verdict& verdict) {
  const auto vocab = Model::size(m.shape.draft_vocab);
  const auto topk = Model::size(m.context.speculation.topk);
  const Floats x = floats_of(m.hidden, Model::size(tokens) * m.shape.hidden);
  const Floats gamma = floats_of(m.norm, Model::size(m.shape.hidden));
  const Floats normed = plain_norm(x, tokens, gamma, false);
  Floats exact = plain_linear(normed, tokens, m.lm_head, false);
  const Floats round = plain_linear(plain_norm(x, tokens, gamma, true), tokens, m.lm_head, true);
  Floats stored;
  if (m.rescores) {
    Matrix rows;
    rows.linear.num_parts = 1;
    rows.linear.parts[0] = view_of(*m.lm_head.parts[0], m.shape.draft_vocab, m.shape.hidden);
    stored = plain_linear(normed, tokens, rows, false);
  }
  const std::vector<std::int32_t> ids = m.top_ids.host();
  const Floats scores = m.top_scores.host();
  double difference = 0;
  for (std::size_t i = 0; i < exact.size(); ++i)
    difference += (static_cast<double>(exact[i]) - round[i]) * (static_cast<double>(exact[i]) - round[i]);
  const float slack = 8 * static_cast<float>(std::sqrt(difference / static_cast<double>(exact.size())));
  bool sound = true;
  for (std::size_t t = 0; t < Model::size(tokens); ++t) {
    float* const logits = exact.data() + t * vocab;
    Rescored candidates{std::vector<bool>(vocab, true), std::vector<bool>(vocab, true)};
    if (m.rescores) {
      candidates = rescored_of(logits, vocab, static_cast<int>(topk), slack);
      for (std::size_t i = 0; i < vocab; ++i) {
        if (candidates.perhaps[i]) logits[i] = stored[t * vocab + i];
      }
    }
    const float largest = *std::max_element(logits, logits + vocab);
    double sum = 0;
    for (std::size_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
    const double log_sum = largest + std::log(sum);
    for (std::size_t rank = 0; rank < topk; ++rank) {
      const std::int32_t id = ids[t * topk + rank];
      const float score = scores[t * topk + rank];
      bool right = id >= 0 && static_cast<std::size_t>(id) < vocab;
      std::size_t before = 0, perhaps_before = 0;  // of it
      for (std::size_t i = 0; right && i < vocab; ++i) {
        before += candidates.surely[i] && logits[i] > logits[id] + slack;
        perhaps_before += candidates.perhaps[i] && logits[i] >= logits[id] - slack;
      }
      right = right && candidates.perhaps[static_cast<std::size_t>(id)] && before <= rank && perhaps_before > rank &&
              std::abs(score - (logits[id] - log_sum)) <= slack && (rank == 0 || score <= scores[t * topk + rank - 1]);
      if (!right && sound) {
        std::printf("  head: token %zu rank %zu id %d score %.5f, expected about %.5f (slack %.1e; %zu before it)\n", t,
                    rank, id, score, id < 0 ? 0.0 : logits[id] - log_sum, slack, before);
      }
      sound = sound && right;
    }
  }
  verdict.require(sound, "head");
}

struct PlainAttention {
  const bf16 *q, *pool_k, *pool_v, *scratch_k, *scratch_v;
  const std::int32_t* table;
  const std::int64_t *requests, *lengths;
  int heads, kv_heads, head_dim, topk, nodes;
  bool step;
};

// A block per query head and row, a thread per key and then per dim; all of it in double.
static __global__ void plain_attention_kernel(const __grid_constant__ PlainAttention p, float* out) {
  __shared__ double weights[Model::kContext + 1];
  const int head = blockIdx.x, row = blockIdx.y, lane = row / p.topk;
  const std::int64_t query = (static_cast<std::int64_t>(row) * p.heads + head) * p.head_dim;
  const std::int64_t prefix = p.lengths[lane], keys = prefix + (p.step ? 1 : 0);
  const auto find = [&](std::int64_t i, const bf16* pool, const bf16* scratch) -> const bf16* {
    const std::int64_t width = p.kv_heads * p.head_dim, from = head / (p.heads / p.kv_heads) * p.head_dim;
    if (i == prefix) return scratch + (static_cast<std::int64_t>(lane) * p.nodes + row % p.topk) * width + from;
    const std::int32_t slot = p.table[p.requests[lane] * Model::kContext + i];
    return slot < 0 ? nullptr : pool + slot * width + from;
  };
  for (std::int64_t i = threadIdx.x; i < keys; i += blockDim.x) {
    const bf16* const key = find(i, p.pool_k, p.scratch_k);
    double score = 0;
    for (int d = 0; d < p.head_dim && key != nullptr; ++d)
      score += static_cast<double>(__bfloat162float(p.q[query + d])) * __bfloat162float(key[d]);
    weights[i] = key == nullptr ? 0 : exp(score / sqrt(static_cast<double>(p.head_dim)));
  }
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < p.head_dim; d += static_cast<int>(blockDim.x)) {
    double value = 0, sum = 0;
    for (std::int64_t i = 0; i < keys; ++i) {
      const bf16* const from = find(i, p.pool_v, p.scratch_v);
      if (from == nullptr) continue;
      value += weights[i] * __bfloat162float(from[d]);
      sum += weights[i];
    }
    out[query + d] = static_cast<float>(value / sum);
  }
}

// softmax(q kᵀ / √D) v over the prefix in the pool and, in a step, the node's own scratch row; q, scratch and pool as
// they are.
inline void check_attention(const Model& m, Pass pass, int tokens, Verdict& verdict) {
  const Shape& s = m.shape;
  const std::size_t count = Model::size(tokens) * s.heads * s.head_dim;
  const Buffer<float>& out = reused<float, 1>(count);
  const PlainAttention plain{m.q.get(),
                             m.pool_k.get(),
                             m.pool_v.get(),
                             m.scratch_k.get(),
                             m.scratch_v.get(),
                             m.req_to_token.get(),
                             m.slots.get(),
                             m.new_len.get(),
                             s.heads,
                             s.kv_heads,
                             s.head_dim,
                             m.context.speculation.topk,
                             m.context.speculation.num_scratch_nodes(),
                             pass == Pass::kStep};
  const dim3 grid(static_cast<unsigned>(s.heads), static_cast<unsigned>(tokens));
  plain_attention_kernel<<<grid, 128>>>(plain, out.get());
  stream::check(cudaGetLastError(), "plain_attention");
  const Floats exact = out.host(count);
  verdict.take("attention", floats_of(m.attention, exact.size()), [&](bool round) {
    Floats y = exact;
    for (float& value : y) value = maybe_rounded(value, round);
    return y;
  });
}

}  // namespace eaglex::bench
