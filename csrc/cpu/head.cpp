// head: final norm, draft vocabulary, log-softmax and its top-k, or one token drawn at the request's temperature; the
// best scores of an INT4 scan are made exact before (core/rescore.h).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/rescore.h"
#include "cpu/backend.h"
#include "cpu/numeric.h"

namespace eaglex::cpu {
namespace {

using Index = std::int64_t;

// log Σ exp(x · scale); not finite if any logit is NaN or +infinity, or all are -infinity.
double log_sum_exp(const float* x, Index count, double scale) {
  double best = -std::numeric_limits<double>::infinity();
  for (Index i = 0; i < count; ++i) {
    if (std::isnan(x[i])) return std::numeric_limits<double>::quiet_NaN();
    best = std::max(best, x[i] * scale);
  }
  double sum = 0;
  for (Index i = 0; i < count; ++i) sum += std::exp(x[i] * scale - best);
  return best + std::log(sum);
}

// The `count` best of ids by (logits descending, id ascending), in that order, to its front.
using Ids = std::vector<std::int32_t>;
void rank(Ids::iterator first, Ids::iterator last, Index count, const float* logits) {
  std::partial_sort(first, first + count, last, [logits](std::int32_t a, std::int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
}

// The ids that are to be scored again, best of the scan first: reference_low_bit.offered.
Ids offered(const float* scan, Index vocab, int topk) {
  Ids group, ids;
  for (Index begin = 0; begin < vocab; begin += kRescoreGroup) {
    group.resize(static_cast<std::size_t>(std::min<Index>(kRescoreGroup, vocab - begin)));
    std::iota(group.begin(), group.end(), static_cast<std::int32_t>(begin));
    const auto count = std::min<Index>(group_offers(topk), static_cast<Index>(group.size()));
    rank(group.begin(), group.end(), count, scan);
    ids.insert(ids.end(), group.begin(), group.begin() + count);
  }
  const auto kept = std::min<Index>(rescored(topk), static_cast<Index>(ids.size()));
  rank(ids.begin(), ids.end(), kept, scan);
  ids.resize(static_cast<std::size_t>(kept));
  return ids;
}

// The first index whose running probability exceeds uniform · total: reference.inverse_cdf.
Index draw(const float* probs, Index count, float uniform) {
  double total = 0;
  for (Index i = 0; i < count; ++i) total += probs[i];
  double running = 0;
  Index last = 0;
  for (Index i = 0; i < count; ++i) {
    if (probs[i] > 0) last = i;
    running += probs[i];
    if (running > uniform * total) return i;
  }
  return last;
}

}  // namespace

void CpuBackend::head(const HeadParams& params) {
  const DraftConfig& config = context_.config;
  const LiveRows live = live_rows(params.rows);
  const Index hidden_size = config.hidden_size;
  const Index vocab = config.draft_vocab_size;
  std::vector<float> x(static_cast<std::size_t>(live.count() * hidden_size));
  auto* const hidden = static_cast<float*>(params.hidden);
  for (Index i = 0; i < live.count(); ++i) {
    float* const from = hidden + live.rows[static_cast<std::size_t>(i)] * hidden_size;
    float* const normed = x.data() + i * hidden_size;
    rms_norm(from, params.norm, config.rms_norm_eps, normed);
    if (config.next_hidden == NextHidden::kNormed) std::copy(normed, normed + hidden_size, from);
  }
  std::vector<float> logits(static_cast<std::size_t>(live.count() * vocab));
  linear({nullptr, live.count(), x.data(), hidden_size}, params.lm_head.parts[0], logits.data(), vocab);
  for (Index i = 0; i < live.count(); ++i) {
    const RowPlace& place = live.places[static_cast<std::size_t>(i)];
    const ScoredRow row{live.rows[static_cast<std::size_t>(i)], x.data() + i * hidden_size, logits.data() + i * vocab};
    if (!rank_row(params, place, row)) {
      context_.lanes.status[place.lane] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
    }
  }
}

// What may be drafted of a row. Without rows to score by that is any id.
std::vector<std::int32_t> CpuBackend::candidates(const HeadParams& params, const ScoredRow& row) const {
  const Index vocab = context_.config.draft_vocab_size;
  if (!params.rescore_rows) {
    Ids all(static_cast<std::size_t>(vocab));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  const Index hidden_size = context_.config.hidden_size;
  Ids ids = offered(row.logits, vocab, context_.speculation.topk);
  std::vector<float> buffer(static_cast<std::size_t>(hidden_size));
  for (const std::int32_t id : ids) {
    const TensorView& rows = params.rescore_rows;
    row.logits[id] =
        dot(row.x, widen(rows.data, rows.dtype, id * hidden_size, hidden_size, buffer.data()), hidden_size);
  }
  return ids;
}

bool CpuBackend::rank_row(const HeadParams& params, const RowPlace& place, const ScoredRow& row) const {
  const Index vocab = context_.config.draft_vocab_size;
  const int k = context_.speculation.topk;
  std::int32_t* const ids = context_.lanes.top_ids + row.row * k;
  float* const scores = context_.lanes.top_scores + row.row * k;
  float* const logits = row.logits;
  if (params.rescore_rows && !std::isfinite(log_sum_exp(logits, vocab, 1.0))) return false;  // before ids are ranked
  Ids order = candidates(params, row);
  const bool sampled = context_.speculation.sampling == Sampling::kRejection && batch_.temperatures[place.lane] > 0;
  const double scale = sampled ? 1.0 / batch_.temperatures[place.lane] : 1.0;
  const double norm = log_sum_exp(logits, vocab, scale);
  if (!std::isfinite(norm)) return false;
  rank(order.begin(), order.end(), k, logits);

  if (context_.speculation.sampling == Sampling::kRejection) {
    const Index slot = batch_.req_pool_indices[place.lane];
    float* const probs =
        context_.results.draft_probs + (slot * context_.speculation.num_steps + params.draft_step) * vocab;
    Index id = 0;
    if (sampled) {
      for (Index i = 0; i < vocab; ++i) probs[i] = static_cast<float>(std::exp(logits[i] * scale - norm));
      id = draw(probs, vocab,
                batch_.uniforms[static_cast<Index>(place.lane) * context_.speculation.num_steps + params.draft_step]);
    } else {  // temperature 0: all mass on the best
      id = order[0];
      std::fill(probs, probs + vocab, 0.0F);
      probs[id] = 1.0F;
    }
    ids[0] = static_cast<std::int32_t>(id);
    scores[0] = static_cast<float>(logits[id] * scale - norm);
    return true;
  }

  for (int i = 0; i < k; ++i) {
    ids[i] = order[static_cast<std::size_t>(i)];
    // A log-probability is never above 0, whatever the rounding: a child must not outrank its parent.
    scores[i] = std::min(0.0F, static_cast<float>(logits[ids[i]] - norm));
  }
  return true;
}

}  // namespace eaglex::cpu
