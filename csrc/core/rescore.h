// The rescored head: an INT4 lm_head scans all ids, the best few are scored again by the checkpoint's own rows
// (eaglex/reference.py: rescore; reference_low_bit.py: offered, with_exact_best). Which ids those are, as plain constants that the backends share.
#pragma once

#include <algorithm>

namespace eaglex {

// Draft ids that offer their topk best together; the last group is shorter where 64 does not divide Vd.
inline constexpr int kRescoreGroup = 64;

// Ids of a row that are scored again, or all that the groups offer where those are fewer.
[[nodiscard]] constexpr int rescored(int topk) noexcept {
  return std::max(8, 2 * topk);
}

// Ids that a vocabulary of that size offers: topk of each group, or the whole group.
[[nodiscard]] constexpr int rescore_offers(int draft_vocab_size, int topk) noexcept {
  const int rest = draft_vocab_size % kRescoreGroup;
  return draft_vocab_size / kRescoreGroup * std::min(topk, kRescoreGroup) + std::min(topk, rest);
}

}  // namespace eaglex
