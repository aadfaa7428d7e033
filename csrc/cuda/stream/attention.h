// How decode attention is cut: pure host arithmetic, as config.h is for the matrices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/stream/config.h"

namespace eaglex::stream {

inline constexpr int kAttentionWarps = 4;
inline constexpr int kPackedRows = 16;  // query heads of one KV head, of all rows of a lane, that one block works on
inline constexpr int kMaxSplits = 32;
inline constexpr int kLengths = 8;  // classes of the batch's longest context: to 1,536 keys, to twice that, and so on

[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int length_class(std::int64_t longest) {
  int at = 0;
  while (at + 1 < kLengths && longest > std::int64_t{1536} << at) ++at;
  return at;
}

struct AttentionGrid {
  int width = 1;                       // rows of one lane, which share its prefix
  int packs = 1;                       // of 16 packed query rows per lane and KV head
  int tasks = 0;                       // lanes · packs · kv_heads
  std::uint8_t splits[kLengths] = {};  // parts of the keys of a task, by length_class()
};

// Two blocks per SM work through tasks · splits items. More parts spread them more evenly, but somebody must add them
// up: the fewest µs by a rough model (15 µs per task and 1,000 keys on one SM, 1 µs and a quarter per part for a sum,
// and for the room that the part takes from the next kernel).
[[nodiscard]] constexpr AttentionGrid attention_grid(int blocks, int rows, int width, int group, int kv_heads) {
  AttentionGrid grid;
  grid.width = width;
  grid.packs = (width * group + kPackedRows - 1) / kPackedRows;
  grid.tasks = (rows + width - 1) / width * grid.packs * kv_heads;
  for (int length = 0; length < kLengths; ++length) {
    float best = 1e30F;
    for (int splits = 1; splits <= kMaxSplits && (splits == 1 || grid.tasks * splits <= 4 * blocks); ++splits) {
      const int rounds = (grid.tasks * splits + blocks - 1) / blocks;
      const float cost = 15.0F * static_cast<float>(rounds << length) / static_cast<float>(splits) +
                         (splits > 1 ? 1.0F + 0.25F * static_cast<float>(splits) : 0.0F);
      if (cost < best) best = cost, grid.splits[length] = static_cast<std::uint8_t>(splits);
    }
  }
  return grid;
}

// Whether no context that may come is cut into more or fewer parts than another.
[[nodiscard]] constexpr bool same_splits(const AttentionGrid& grid, std::int64_t max_context) {
  for (int length = 1; length <= length_class(max_context); ++length) {
    if (grid.splits[length] != grid.splits[0]) return false;
  }
  return true;
}

// Two blocks per SM at most, and not more than the longest context that may come gives work to.
[[nodiscard]] constexpr int attention_blocks(const DeviceLimits& device, const AttentionGrid& grid,
                                             std::int64_t max_context) {
  int splits = 1;
  for (int length = 0; length <= length_class(max_context); ++length)
    splits = std::max<int>(splits, grid.splits[length]);
  return std::min(slots_of(device), grid.tasks * splits);
}

inline constexpr int kKeys = 16;                    // of one step of a warp
inline constexpr int kAttentionStaticBytes = 3072;  // masks and weights
inline constexpr int kMaxRing = 3;                  // steps that a warp has under way

// Bytes of a key in shared memory: an odd number of 16-byte units, so that ldmatrix has no bank conflicts.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int key_bytes(int head_dim) {
  return head_dim * 2 + 16;
}
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int ring_bytes(int head_dim, int ring) {
  return kAttentionWarps * ring * 2 * kKeys * key_bytes(head_dim);
}
// The deepest ring that leaves the other half of the SM to the kernels around; 1 where none does.
[[nodiscard]] constexpr int attention_ring(const DeviceLimits& device, int head_dim) {
  int ring = head_dim <= 128 ? kMaxRing : 2;
  while (ring > 1 && ring_bytes(head_dim, ring) + kAttentionStaticBytes > slot_bytes(device)) --ring;
  return ring;
}

[[nodiscard]] constexpr std::size_t attention_slot_floats(int head_dim) {
  return static_cast<std::size_t>(kPackedRows) * (static_cast<std::size_t>(head_dim) + 2);
}
[[nodiscard]] inline std::size_t attention_counter_bytes(const DeviceLimits& device) {
  return static_cast<std::size_t>(4 * slots_of(device)) * sizeof(std::uint32_t) / 256 * 256 + 256;
}
[[nodiscard]] inline std::size_t attention_partial_bytes(const DeviceLimits& device, int head_dim) {
  return attention_counter_bytes(device) +
         static_cast<std::size_t>(4 * slots_of(device)) * attention_slot_floats(head_dim) * sizeof(float);
}

}  // namespace eaglex::stream
