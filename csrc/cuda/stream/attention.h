// How decode attention is cut: pure host arithmetic, as config.h is for the matrices.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cuda/stream/steps.h"

namespace eaglex::stream {

inline constexpr int kAttentionWarps = 4;
inline constexpr int kPackedRows = 16;  // query heads of one KV head, of all rows of a lane, that one block works on
inline constexpr int kMaxSplits = 16;

struct AttentionGrid {
  int width = 1;   // rows of one lane, which share its prefix
  int lanes = 0;
  int packs = 1;   // of 16 packed query rows per lane and KV head
  int tasks = 0;   // lanes · packs · kv_heads
  int splits = 1;  // parts of the keys
};

// Two blocks per SM where the tasks alone do not give that many; few parts, since somebody must add them up.
[[nodiscard]] constexpr AttentionGrid attention_grid(int num_sms, int rows, int width, int group, int kv_heads) {
  AttentionGrid grid;
  grid.width = width;
  grid.lanes = (rows + width - 1) / width;
  grid.packs = (width * group + kPackedRows - 1) / kPackedRows;
  grid.tasks = grid.lanes * grid.packs * kv_heads;
  grid.splits = std::clamp(2 * num_sms / std::max(grid.tasks, 1), 1, kMaxSplits);
  return grid;
}

// Per block that shares its keys with others: 16 rows of head_dim sums, a maximum and a Σ exp; and a counter per task.
[[nodiscard]] constexpr std::size_t attention_slot_floats(int head_dim) {
  return static_cast<std::size_t>(kPackedRows) * (static_cast<std::size_t>(head_dim) + 2);
}
[[nodiscard]] inline std::size_t attention_counter_bytes(const DeviceLimits& device) {
  return static_cast<std::size_t>(2 * device.num_sms) * sizeof(std::uint32_t) / 256 * 256 + 256;
}
[[nodiscard]] inline std::size_t attention_partial_bytes(const DeviceLimits& device, const StreamNeeds& needs) {
  return attention_counter_bytes(device) +
         static_cast<std::size_t>(2 * device.num_sms) * attention_slot_floats(needs.head_dim) * sizeof(float);
}

}  // namespace eaglex::stream
