// The passes of `extend` and the switches of the drafts against the plain steps. Lanes hold one row each (model.cuh).
#pragma once

#include "check.cuh"

namespace eaglex::bench {

inline void synchronize(cudaStream_t stream) {
  stream::check(cudaStreamSynchronize(stream), "extend");
}

// How many rows of a pool of K or V two buffers have different.
static __global__ void differing_rows_kernel(const std::uint32_t* a, const std::uint32_t* b, std::int64_t rows,
                                             int words, unsigned long long* count) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    bool differs = false;
    for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
      differs = differs || a[row * words + i] != b[row * words + i];
    if (__syncthreads_or(differs) != 0 && threadIdx.x == 0) atomicAdd(count, 1ULL);
  }
}

inline std::size_t differing_rows(const Buffer<bf16>& a, const Buffer<bf16>& b, int width) {  // of all of `a`
  const Buffer<unsigned long long>& count = reused<unsigned long long, 0>(1);
  count.set({0});
  differing_rows_kernel<<<1024, 128>>>(reinterpret_cast<const std::uint32_t*>(a.get()),
                                       reinterpret_cast<const std::uint32_t*>(b.get()),
                                       static_cast<std::int64_t>(a.size()) / width, width / 2, count.get());
  stream::check(cudaGetLastError(), "differing_rows");
  return count.host(1)[0];
}

inline Floats plain_norm_parts(const Floats& x, int tokens, const Floats& gamma, int parts, bool round) {
  const std::size_t width = gamma.size() / static_cast<std::size_t>(parts);
  Floats out(x.size());
  for (int p = 0; p < parts; ++p) {
    const int from = p * static_cast<int>(width);
    const Floats piece =
        plain_norm(columns(x, tokens, static_cast<int>(gamma.size()), from, static_cast<int>(width)), tokens,
                   Floats(gamma.begin() + from, gamma.begin() + from + static_cast<std::int64_t>(width)), round);
    for (std::size_t t = 0; t < Model::size(tokens); ++t)
      std::copy_n(piece.begin() + static_cast<std::int64_t>(t * width), width,
                  out.begin() + static_cast<std::int64_t>(t * gamma.size()) + from);
  }
  return out;
}

// Of every four rows the target has accepted three; one that counts turns out not to be sound.
inline std::vector<cuda::LiveRow> accepted_rows(int tokens) {
  std::vector<cuda::LiveRow> rows;
  for (int t = 0; t < tokens; ++t) {
    if (t % 4 == 3) continue;
    rows.emplace_back();
    if (t != 6) rows.back().row = t;
  }
  return rows;
}

inline Floats listed_of(const Floats& x, const std::vector<cuda::LiveRow>& rows, std::size_t width) {
  Floats out;
  for (const cuda::LiveRow& each : rows) {
    if (each.row < 0) continue;
    const auto begin = x.begin() + static_cast<std::int64_t>(Model::size(each.row) * width);
    out.insert(out.end(), begin, begin + static_cast<std::int64_t>(width));
  }
  return out;
}

// Rows beyond those of the list keep the bytes 0xFF.
inline bool others_untouched(const Buffer<bf16>& buffer, const std::vector<cuda::LiveRow>& rows, int tokens,
                             int width) {
  std::vector<bool> listed(Model::size(tokens));
  for (const cuda::LiveRow& each : rows) {
    if (each.row >= 0) listed[Model::size(each.row)] = true;
  }
  const std::vector<bf16> host = buffer.host(Model::size(tokens) * Model::size(width));
  const auto* const words = reinterpret_cast<const std::uint16_t*>(host.data());
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (!listed[i / Model::size(width)] && words[i] != 0xFFFF) return false;
  }
  return true;
}

inline void check_fuse(Model& m, int tokens, cudaStream_t stream, Verdict& verdict) {
  const int width = Model::kNumAux * m.shape.hidden;
  const std::vector<cuda::LiveRow> rows = accepted_rows(tokens);
  const stream::StreamPlan plan = m.plan_with(rows);
  TensorView norms[Model::kNumAux];
  for (const AuxNorm kind : {AuxNorm::kNone, AuxNorm::kWhole, AuxNorm::kEach}) {
    m.context.config.aux_norm = kind;
    for (int i = 0; i < Model::kNumAux; ++i) {
      norms[i] = view_of(m.aux_norm, 0, kind == AuxNorm::kWhole ? width : m.shape.hidden);
      norms[i].data = m.aux_norm.get() + (kind == AuxNorm::kWhole ? 0 : i * m.shape.hidden);
    }
    stream::check(cudaMemsetAsync(m.hidden.get(), 0xFF, m.hidden.size() * sizeof(bf16), stream), "poison");
    stream::launch_fuse(plan, {{Pass::kExtendAll, 0, tokens}, m.fc.linear, norms, m.hidden.get()}, m.context,
                        m.batch.get(), stream);
    synchronize(stream);
    const Floats out = floats_of(m.hidden, Model::size(tokens) * m.shape.hidden);
    verdict.take("fuse", listed_of(out, rows, Model::size(m.shape.hidden)), [&](bool round) {
      Floats x = listed_of(floats_of(m.aux, Model::size(tokens) * width), rows, Model::size(width));
      const int count = static_cast<int>(x.size()) / width;
      const Floats gamma = floats_of(m.aux_norm, Model::size(width));
      if (kind != AuxNorm::kNone)
        x = plain_norm_parts(x, count, gamma, kind == AuxNorm::kWhole ? 1 : Model::kNumAux, round);
      return plain_linear(x, count, m.fc, round);
    });
    verdict.require(others_untouched(m.hidden, rows, tokens, m.shape.hidden), "fuse leaves other rows alone");
  }
  m.context.config.aux_norm = AuxNorm::kNone;
}

// [tokens, q | k | v] of rows that are the lanes' own, after RoPE; the embedding normed or not.
inline Floats plain_extend_qkv(const Model& m, int tokens, bool embedding_normed, bool round) {
  const Shape& s = m.shape;
  std::vector<std::int64_t> ids = m.input_ids.host();
  ids.resize(Model::size(tokens));
  const std::vector<std::int64_t> before = m.seq_lens.host();
  const Floats hidden = plain_norm(floats_of(m.hidden_in, Model::size(tokens) * s.hidden), tokens,
                                   floats_of(m.hidden_norm, Model::size(s.hidden)), round);
  Floats e = fetch_rows(m.embed, ids, s.hidden);
  if (embedding_normed) e = plain_norm(e, tokens, floats_of(m.input_norm, Model::size(s.hidden)), round);
  Floats x;
  for (int t = 0; t < tokens; ++t) {
    for (const Floats* const part : {static_cast<const Floats*>(&e), &hidden})
      x.insert(x.end(), part->begin() + static_cast<std::int64_t>(t) * s.hidden,
               part->begin() + static_cast<std::int64_t>(t + 1) * s.hidden);
  }
  Floats y = plain_linear(x, tokens, m.qkv, round);
  const Floats inv_freq = m.inv_freq.host();
  const int width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  for (int t = 0; t < tokens; ++t) {
    for (int head = 0; head < s.heads + s.kv_heads; ++head) {
      plain_rope(y.data() + static_cast<std::int64_t>(t) * width + head * s.head_dim,
                 static_cast<float>(before[Model::size(t)]), s, inv_freq, round);
    }
  }
  return y;
}

// K and V of the rows that count to the pool, then the query of the last row of each lane, as the single-layer identity
// has it; then both by one launch. One lane in eight is held by a prompt chunk (K and V, no query), one is padded
// (nothing).
inline void check_extend_qkv(Model& m, int tokens, cudaStream_t stream, Verdict& verdict) {
  const Shape& s = m.shape;
  const int q = s.heads * s.head_dim;
  const int kv = s.kv_heads * s.head_dim;
  const auto status_of_lane = [](int t) {
    return t % 8 == 5 ? LaneStatus::kHeld : t % 8 == 6 ? LaneStatus::kPadded : LaneStatus::kLive;
  };
  std::vector<std::int32_t> status(Model::kMaxRows);
  for (int t = 0; t < Model::kMaxRows; ++t) status[Model::size(t)] = static_cast<std::int32_t>(status_of_lane(t));
  m.status.set(status);
  const std::vector<std::int32_t> table = m.req_to_token.host();
  const std::vector<std::int64_t> requests = m.slots.host();
  const std::vector<std::int64_t> before = m.seq_lens.host();
  const std::vector<std::int64_t> ids = m.input_ids.host();
  std::vector<std::int64_t> at;
  std::vector<cuda::LiveRow> rows;
  for (int t = 0; t < tokens; ++t) {
    at.push_back(table[Model::size(requests[Model::size(t)] * Model::kContext + before[Model::size(t)])]);
    if (status_of_lane(t) == LaneStatus::kPadded) continue;
    rows.push_back({before[Model::size(t)], at.back(), t, static_cast<std::int32_t>(ids[Model::size(t)]),
                    status_of_lane(t) == LaneStatus::kLive ? t : -1});
  }
  const auto live = [](LaneStatus x) { return x == LaneStatus::kLive; };
  const auto kept = [](LaneStatus x) { return x != LaneStatus::kPadded; };
  const auto rows_where = [&](const Floats& x, int width, int from, int count, auto keep) {
    Floats out;
    for (int t = 0; t < tokens; ++t) {
      if (!keep(status_of_lane(t))) continue;
      const auto begin = x.begin() + static_cast<std::int64_t>(t) * width + from;
      out.insert(out.end(), begin, begin + count);
    }
    return out;
  };
  // All by the one stream: it does not wait for the default one.
  const auto copy = [&](const Buffer<bf16>& to, const Buffer<bf16>& from) {
    const std::size_t bytes = m.pool_k.size() * sizeof(bf16);
    stream::check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, stream), "copy");
  };
  const stream::StreamPlan listed = m.plan_with(rows);
  const bool queries = tokens <= stream::kMaxTokens;  // more are an extend's K and V alone
  for (const bool embedding_normed : {true, false}) {
    m.context.config.residual = embedding_normed ? Residual::kNormed : Residual::kPreNorm;
    const Buffer<bf16>& old_k = reused<bf16, 1>(m.pool_k.size());
    const Buffer<bf16>& old_v = reused<bf16, 2>(m.pool_v.size());
    copy(old_k, m.pool_k), copy(old_v, m.pool_v);
    const Floats exact = plain_extend_qkv(m, tokens, embedding_normed, false);
    const Floats round = plain_extend_qkv(m, tokens, embedding_normed, true);
    const auto check_kv = [&](const char* k, const char* v) {
      verdict.take(k, rows_where(fetch_rows(m.pool_k, at, kv), kv, 0, kv, kept),
                   [&](bool r) { return rows_where(r ? round : exact, q + 2 * kv, q, kv, kept); });
      verdict.take(v, rows_where(fetch_rows(m.pool_v, at, kv), kv, 0, kv, kept),
                   [&](bool r) { return rows_where(r ? round : exact, q + 2 * kv, q + kv, kv, kept); });
      verdict.require(
          differing_rows(m.pool_k, old_k, kv) <= rows.size() && differing_rows(m.pool_v, old_v, kv) <= rows.size(),
          "the pool beside the rows is untouched");
    };
    const auto check_queries = [&](const char* what) {
      verdict.take(what, rows_where(floats_of(m.q, Model::size(tokens) * q), q, 0, q, live),
                   [&](bool r) { return rows_where(r ? round : exact, q + 2 * kv, 0, q, live); });
      const Floats residual = floats_of(m.residual, Model::size(tokens) * s.hidden);
      const Floats hidden = floats_of(m.hidden_in, Model::size(tokens) * s.hidden);
      const Floats gamma = floats_of(m.hidden_norm, Model::size(s.hidden));
      if (embedding_normed) {
        verdict.take("normed residual", rows_where(residual, s.hidden, 0, s.hidden, live), [&](bool r) {
          return rows_where(plain_norm(hidden, tokens, gamma, r), s.hidden, 0, s.hidden, live);
        });
      } else {
        verdict.require(
            rows_where(residual, s.hidden, 0, s.hidden, live) == rows_where(hidden, s.hidden, 0, s.hidden, live),
            "extend residual");
      }
    };
    QkvParams params = m.qkv_params(tokens);
    params.target = KvTarget::kPool;
    params.parts = QkvParts::kKeyValue;
    params.rows = {Pass::kExtendAll, 0, tokens};
    params.gather = false;
    if (!embedding_normed) params.input_layernorm = {};
    stream::launch_qkv(listed, params, m.context, m.batch.get(), stream);
    QkvParams last = params;
    last.parts = QkvParts::kQuery;
    last.rows = {Pass::kExtendLast, 0, tokens};
    last.gather = true;
    if (queries) stream::launch_qkv(m.plan, last, m.context, m.batch.get(), stream);
    synchronize(stream);
    check_kv("extend k", "extend v");
    if (!queries) continue;
    check_queries("extend q");

    copy(m.pool_k, old_k), copy(m.pool_v, old_v);
    for (const Buffer<bf16>* const written : {&m.q, &m.residual})
      stream::check(cudaMemsetAsync(written->get(), 0xFF, written->size() * sizeof(bf16), stream), "poison");
    stream::StreamPlan joined = listed;
    joined.last_queries = true;
    params.parts = QkvParts::kAll;
    stream::launch_qkv(joined, params, m.context, m.batch.get(), stream);
    synchronize(stream);
    check_kv("joined k", "joined v");
    check_queries("joined q");
    std::vector<cuda::LiveRow> drafted = rows;
    std::erase_if(drafted, [](const cuda::LiveRow& each) { return each.query < 0; });
    verdict.require(
        others_untouched(m.q, drafted, tokens, q) && others_untouched(m.residual, drafted, tokens, s.hidden),
        "one launch leaves other lanes' queries alone");
  }
  m.context.config.residual = Residual::kPreNorm;
  m.status.set(std::vector<std::int32_t>(Model::kMaxRows));
  randomise(m.q, 22, 0, 1);  // attention, which is checked next, takes those of all lanes
}

// A row with NaN spoils its own lane and no other; the next hidden state may be the normed one.
inline void check_head_switches(Model& m, int tokens, cudaStream_t stream, Verdict& verdict) {
  const auto width = Model::size(m.shape.hidden);
  const int topk = m.context.speculation.topk;
  randomise(m.hidden, 21, 0, 3);
  stream::check(cudaDeviceSynchronize(), "fill");
  const Floats before = floats_of(m.hidden, Model::size(tokens) * width);
  bf16* const spoiled_one = m.hidden.get() + (Model::size(tokens) - 1) * width + 3;
  stream::check(cudaMemsetAsync(spoiled_one, 0xFF, sizeof(bf16), stream), "NaN");
  m.context.config.next_hidden = NextHidden::kNormed;
  m.launch_head(tokens, stream);
  synchronize(stream);
  m.context.config.next_hidden = NextHidden::kPreNorm;
  const std::vector<std::int32_t> status = m.status.host();
  bool right = true;
  for (int lane = 0; lane < tokens / topk; ++lane) {
    const bool spoiled = lane == tokens / topk - 1;
    right = right && status[Model::size(lane)] ==
                         static_cast<std::int32_t>(spoiled ? LaneStatus::kNotFinite : LaneStatus::kLive);
  }
  verdict.require(right, "NaN marks its own lane");
  if (tokens > 1) {
    const auto first = [&](const Floats& x) {
      return Floats(x.begin(), x.begin() + static_cast<std::int64_t>((Model::size(tokens) - 1) * width));
    };
    const Floats gamma = floats_of(m.norm, width);
    verdict.take("normed hidden", first(floats_of(m.hidden, Model::size(tokens) * width)),
                 [&](bool r) { return plain_norm(first(before), tokens - 1, gamma, r); });
  }
  m.status.set(std::vector<std::int32_t>(Model::kMaxRows));
}

}  // namespace eaglex::bench
