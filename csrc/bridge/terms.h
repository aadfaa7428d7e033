// What the members of a group must agree on before the first message.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "bridge/message.h"
#include "core/error.h"

namespace eaglex::bridge {

// Raised whenever the bytes or the order of messages change: members of different versions refuse each other.
inline constexpr std::int32_t kProtocolVersion = 4;
inline constexpr int kMaxRanks = 64;

using GroupId = std::array<std::uint64_t, 2>;  // random, so that no two groups of a host can meet
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

struct Terms {
  std::int32_t version = kProtocolVersion;
  std::int32_t num_ranks = 0;  // of the target; a dedicated drafter is a further member
  std::int32_t max_lanes = 0;
  std::int32_t num_draft_tokens = 0;
  std::int32_t num_steps = 0;
  std::int32_t num_slots = 0;
  std::int32_t vocab_size = 0;
  std::int32_t aux_width = 0;  // of a row to a dedicated drafter; 0 with placement rank0
  std::int32_t max_rows = 0;   // rows of one cycle to a dedicated drafter; 0 with placement rank0
  // A dedicated drafter whose K and V lie in the host's KV slots: how many there are, and the positions of a row of
  // req_to_token. Both 0: its K and V lie by request slot and position, and no table travels.
  std::int32_t num_kv_slots = 0;
  std::int32_t table_width = 0;

  // Throws ErrorCode::kConfig for sizes that cannot be.
  void check() const;
  [[nodiscard]] MessageShape shape() const { return {max_lanes, num_draft_tokens - 1}; }
  [[nodiscard]] bool dedicated() const { return max_rows > 0; }
  [[nodiscard]] bool pooled() const { return num_kv_slots > 0; }
};

// "field: expected … as in the group, got …", or nothing where both agree.
[[nodiscard]] std::string difference(const Terms& group, const Terms& member);

}  // namespace eaglex::bridge
