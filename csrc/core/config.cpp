#include "core/config.h"

#include <algorithm>

#include "core/error.h"

namespace eaglex {

void DraftConfig::check() const {
  constexpr int kLarge = 1 << 30;
  expect_range("hidden_size", hidden_size, 1, kLarge);
  expect_range("target_hidden_size", target_hidden_size, 1, kLarge);
  expect_range("intermediate_size", intermediate_size, 1, kLarge);
  expect_range("num_heads", num_heads, 1, kLarge);
  expect_range("num_kv_heads", num_kv_heads, 1, num_heads);
  expect_range("head_dim", head_dim, 2, kLarge);
  expect_range("vocab_size", vocab_size, 1, kLarge);
  expect_range("draft_vocab_size", draft_vocab_size, 1, vocab_size);
  expect_range("max_positions", max_positions, 1, kLarge);
  expect_range("num_layers", num_layers, 1, kLarge);
  expect_range("num_aux", num_aux, 1, kLarge);
  expect_range("rotary_dim", rotary_dim, 2, head_dim);
  expect(head_dim % 2 == 0, ErrorCode::kConfig, "head_dim", "an even number", head_dim);
  expect(rotary_dim % 2 == 0, ErrorCode::kConfig, "rotary_dim", "an even number", rotary_dim);
  expect(num_heads % num_kv_heads == 0, ErrorCode::kConfig, "num_heads",
         concat("a multiple of num_kv_heads=", num_kv_heads), num_heads);
  expect(rms_norm_eps > 0 && rms_norm_eps < 1, ErrorCode::kConfig, "rms_norm_eps", "in (0, 1)", rms_norm_eps);
  expect(rope_factor > 0, ErrorCode::kConfig, "rope_factor", "> 0", rope_factor);
}

void SpeculationConfig::check(const DraftConfig& config) const {
  expect_range("num_steps", num_steps, 0, std::min(kMaxSteps, config.max_positions - 1));
  expect_range("topk", topk, 1, std::min(kMaxTopk, config.draft_vocab_size));
  const int high = std::min(num_candidates() + 1, kMaxDraftTokens);
  expect(num_steps + 1 <= num_draft_tokens && num_draft_tokens <= high, ErrorCode::kConfig, "num_draft_tokens",
         concat("in ", num_steps + 1, "..", high, " for num_steps=", num_steps, ", topk=", topk), num_draft_tokens);
  expect(sampling == Sampling::kGreedy || topk == 1, ErrorCode::kConfig, "topk", "1 with rejection sampling", topk);
  expect(stop_score <= 0, ErrorCode::kConfig, "stop_score", "a log-probability, at most 0", stop_score);
}

void EngineLimits::check() const {
  constexpr int kLarge = 1 << 30;
  expect_range("max_batch", max_batch, 1, kLarge);
  expect_range("max_rows", max_rows, max_batch, kLarge);
  expect_range("num_slots", num_slots, 2, kLarge);
  expect_range("token_table_bytes", static_cast<long long>(token_table_bytes), 0LL, 1LL << 40);
}

}  // namespace eaglex
