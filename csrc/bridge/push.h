// Rank 0's word from one GPU to the others in one kernel each: `p2p` (the receiver's memory, opened over CUDA IPC) and
// `mailbox` (pinned host memory) differ only in where the inbox lies. Launches may be captured; nothing waits for a host.
#pragma once

#include <cstdint>

#include "bridge/message.h"

namespace eaglex::bridge {

struct Packet;

// An inbox holds this many messages. The target's collectives keep rank 0 at most one cycle ahead of any receiver, so two
// would do.
inline constexpr int kInboxDepth = 4;

[[nodiscard]] constexpr std::size_t packets_of(std::size_t message_bytes) {
  return (message_bytes + 7) / 8;  // 8 bytes of message each
}
[[nodiscard]] constexpr std::size_t inbox_bytes(const MessageShape& shape) {
  return kInboxDepth * packets_of(shape.max_bytes()) * 16;
}

enum class PushCode : std::uint32_t {
  kFine = 0,
  kLate,   // no message by the deadline
  kSplit,  // a message for another batch
};

// Sticky: the first failure stays, and later launches return at once. In memory that the host reads without a sync.
struct PushStatus {
  PushCode code = PushCode::kFine;
  std::uint32_t lane = 0;
  std::uint64_t epoch = 0;
};

// One side's fixed part; all pointers are the device's. `epochs` begins at zero and counts launches, so that a replayed
// graph goes on counting.
struct PushChannel {
  MessageShape shape;
  std::uint64_t* epochs = nullptr;   // [receivers] on rank 0, [1] elsewhere
  std::byte* staging = nullptr;      // [receivers] messages of max_bytes() on rank 0, one elsewhere
  Packet* const* inboxes = nullptr;  // [receivers] on rank 0: each receiver's, as this device reaches it
  int num_receivers = 0;             // rank 0
  const Packet* inbox = nullptr;     // elsewhere: this rank's own
  PushStatus* status = nullptr;
  std::uint64_t deadline_ns = 0;  // elsewhere
};

// The cycle's lanes on the device; `verdict` is read there, since the draft decides it.
struct PushLanes {
  LaneList lanes;
  const Verdict* verdict = nullptr;  // rank 0
};

void launch_push(const PushChannel& channel, const TreeSource& source, const PushLanes& lanes, Stream stream);
void launch_receive(const PushChannel& channel, const DraftResults& results, int num_slots, const PushLanes& lanes,
                    Stream stream);

}  // namespace eaglex::bridge
