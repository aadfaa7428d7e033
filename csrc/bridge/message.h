// What rank 0 tells every rank once per cycle, the same bytes on every transport: header, lanes, nodes. Packing and
// reading are plain loops over one lane, so that a kernel can run them too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/tree.h"

// A constexpr function runs on a device as it is; one that reads memory as another type cannot be constexpr.
#ifdef __CUDACC__
#define EAGLEX_HOST_DEVICE __host__ __device__
#else
#define EAGLEX_HOST_DEVICE
#endif

namespace eaglex::bridge {

enum class Verdict : std::uint32_t { kNoDraft = 0, kDraft = 1 };

struct MessageHeader {
  std::uint64_t epoch = 0;  // cycles since the group began, from 1
  Verdict verdict = Verdict::kNoDraft;
  std::uint32_t num_lanes = 0;
};

struct MessageLane {
  std::int64_t drafted_for =
      -1;  // the request's new length, with or without a draft: ranks that disagree on it have split
  std::int32_t slot = 0;
  std::int32_t num_nodes = 0;  // 0 = no draft
};

struct MessageNode {
  std::int32_t token = 0;
  std::int32_t parent = 0;
};

// Sizes that all members of a group agree on; nodes of lane i begin at i * num_drafted.
struct MessageShape {
  int max_lanes = 0;
  int num_drafted = 0;  // N - 1

  [[nodiscard]] constexpr std::size_t lanes_at() const { return sizeof(MessageHeader); }
  [[nodiscard]] constexpr std::size_t nodes_at(std::uint32_t num_lanes) const {
    return lanes_at() + num_lanes * sizeof(MessageLane);
  }
  [[nodiscard]] constexpr std::size_t bytes(std::uint32_t num_lanes) const {
    return nodes_at(num_lanes) + num_lanes * (static_cast<std::size_t>(num_drafted) * sizeof(MessageNode));
  }
  [[nodiscard]] constexpr std::size_t max_bytes() const { return bytes(static_cast<std::uint32_t>(max_lanes)); }
};

// The cycle's requests as this rank knows them, in the memory that the results are in. A draft of this cycle is for
// lens + num_valid where a host has those two, else for lens.
struct LaneIds {
  std::int32_t count = 0;
  IdView slots;                             // [count]
  IdView lens;                              // [count]
  const std::int32_t* num_valid = nullptr;  // [count] or absent

  [[nodiscard]] constexpr std::int64_t slot(std::int32_t i) const { return slots[i]; }
  [[nodiscard]] constexpr std::int64_t new_len(std::int32_t i) const {
    return lens[i] + (num_valid != nullptr ? num_valid[i] : 0);
  }
};

// The same as a call brings it, or where a cycle's own graph finds it: in the parameter block, and then `count` is the
// most that it may say.
struct LaneList {
  std::int32_t count = 0;
  const std::int64_t* slots = nullptr;
  const std::int64_t* lens = nullptr;
  const std::int32_t* num_valid = nullptr;
  const DraftBatch* block = nullptr;

  [[nodiscard]] constexpr std::int64_t new_len(std::int32_t i) const {
    return lens[i] + (num_valid != nullptr ? num_valid[i] : 0);
  }
  [[nodiscard]] constexpr LaneIds ids() const {
    if (block != nullptr) return {block->batch, block->req_pool_indices, block->seq_lens, block->num_valid};
    return {count, {nullptr, slots}, {nullptr, lens}, num_valid};
  }
};

// Pointers into one message of `num_lanes` lanes, aligned to 8 bytes.
template <typename Byte>
struct MessageView {
  template <typename T>
  using Pointer = std::conditional_t<std::is_const_v<Byte>, const T*, T*>;

  EAGLEX_HOST_DEVICE MessageView(Byte* bytes, const MessageShape& shape, std::uint32_t num_lanes)
      : header(reinterpret_cast<Pointer<MessageHeader>>(bytes)),
        lanes(reinterpret_cast<Pointer<MessageLane>>(bytes + shape.lanes_at())),
        nodes(reinterpret_cast<Pointer<MessageNode>>(bytes + shape.nodes_at(num_lanes))) {}

  Pointer<MessageHeader> header;
  Pointer<MessageLane> lanes;
  Pointer<MessageNode> nodes;
};

// One lane out of the results. A draft that is for another length, or not a tree of known tokens, is none.
constexpr void pack_lane(const TreeSource& source, std::int64_t slot, std::int64_t new_len, Verdict verdict,
                         MessageLane* lane, MessageNode* nodes) {
  const int count = verdict == Verdict::kDraft ? usable_nodes(source, slot, new_len, source.num_drafted) : 0;
  *lane = {new_len, static_cast<std::int32_t>(slot), count};
  for (int i = 0; i < count; ++i) {
    const std::int64_t at = slot * source.num_drafted + i;
    nodes[i] = {static_cast<std::int32_t>(source.results.draft_tokens[at]), source.results.parents[at]};
  }
}

// One lane into this rank's results; the lane was checked.
constexpr void unpack_lane(const MessageLane& lane, const MessageNode* nodes, int num_drafted,
                           const DraftResults& results) {
  for (int i = 0; i < lane.num_nodes; ++i) {
    const std::int64_t at = static_cast<std::int64_t>(lane.slot) * num_drafted + i;
    results.draft_tokens[at] = nodes[i].token;
    results.parents[at] = nodes[i].parent;
  }
  results.num_nodes[lane.slot] = lane.num_nodes;
  results.drafted_for[lane.slot] = lane.drafted_for;
}

}  // namespace eaglex::bridge
