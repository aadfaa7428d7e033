// The rescored head: an INT4 lm_head scans all ids, the best few are scored again by the checkpoint's own rows
// (reference.py: rescore; reference_low_bit.py: offered, with_exact_best). Which ids those are, as constants that the
// backends share.
#pragma once

#include <algorithm>

namespace eaglex {

// Draft ids that offer their best together; the last group is shorter where 64 does not divide Vd.
inline constexpr int kRescoreGroup = 64;

// How many a group offers, or all of it. Two for a chain: one that the scan puts behind its neighbour would be lost.
[[nodiscard]] constexpr int group_offers(int topk) noexcept {
  return std::max(2, topk);
}

// Ids of a row that are scored again, or all that the groups offer where those are fewer.
[[nodiscard]] constexpr int rescored(int topk) noexcept {
  return std::max(8, 2 * topk);
}

// Ids that all groups of a vocabulary of that size offer.
[[nodiscard]] constexpr int rescore_offers(int draft_vocab_size, int topk) noexcept {
  return draft_vocab_size / kRescoreGroup * group_offers(topk) +
         std::min(group_offers(topk), draft_vocab_size % kRescoreGroup);
}

}  // namespace eaglex
