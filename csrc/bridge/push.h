// Rank 0's word from one GPU to the others in one kernel each. Transports differ only in where the inbox lies: `p2p` in
// the receiver's memory, opened over CUDA IPC, `mailbox` in pinned host memory; `nccl` has none and carries the packed
// message itself. Launches may be captured; nothing waits for a host but to tell it of a failure.
#pragma once

#include <cstdint>

#include "bridge/message.h"
#include "bridge/terms.h"

namespace eaglex::bridge {

struct Packet;

// An inbox holds this many messages, and a receiver says every so often how far it is, since its word has a way to go that
// its kernel's end waits for. So rank 0 may be ahead of any receiver by the difference, and one, before it waits.
inline constexpr int kInboxDepth = 16;
inline constexpr int kAckEvery = 8;
// How long a kernel that has failed waits for its host to end the group, so that no other rank uses this cycle.
inline constexpr std::uint64_t kTellNs = 2'000'000'000;

[[nodiscard]] constexpr std::size_t packets_of(std::size_t message_bytes) {
  return (message_bytes + 7) / 8;  // 8 bytes of message each
}
[[nodiscard]] constexpr std::size_t inbox_bytes(const MessageShape& shape) {
  return kInboxDepth * packets_of(shape.max_bytes()) * 16;
}

enum class PushCode : std::uint32_t {
  kFine = 0,
  kLate,   // no message by the deadline; on rank 0: a receiver that takes none
  kSplit,  // a message for another batch
  kEnded,  // the host said that the group has ended
};

// What of a message differs; the words are in push_host.cpp.
enum class SplitField : std::uint32_t { kEpoch, kNumLanes, kVerdict, kSlot, kLength, kNumNodes };

// In pinned memory: the first line is the device's, the second the host's. The first failure stays, and later launches
// return at once.
struct alignas(64) PushStatus {
  PushCode code = PushCode::kFine;
  std::uint32_t who = 0;  // kLate on rank 0: the receiver; kSplit: the lane
  SplitField field = SplitField::kEpoch;
  std::uint32_t padding = 0;
  std::int64_t expected = 0, got = 0;  // kSplit
  std::uint64_t epoch = 0;             // of the failure
  alignas(64) std::uint32_t stop = 0;  // nonzero: the group has ended, leave every wait
};

// What a side counts on its device, so that a replayed graph goes on counting. Begins at zero.
struct PushState {
  std::uint64_t epoch;
  std::uint64_t drafts;  // of the messages so far, with a verdict "draft"
  std::uint64_t failed;
  // Without inboxes, where the host watches over deadlines: on rank 0 the last message that has gone, elsewhere the last
  // that was begun to wait for. In device memory, since a word for the host costs a kernel a microsecond at its end.
  std::uint64_t marked;
  std::uint64_t acked[kMaxRanks];  // rank 0: the last acknowledgement seen of each receiver
};

// What has become of a request to a dedicated drafter, in pinned memory; the epoch is written last.
struct RelayOutcome {
  std::uint64_t epoch = 0;
  PushCode code = PushCode::kFine;
  Verdict verdict = Verdict::kNoDraft;
};

// One side's fixed part; all pointers are as the device of this side reaches them. `p2p` and `mailbox` have inboxes and
// acknowledgements; without them the message is packed into, or taken from, `staging` alone. What every message needs
// comes first: a kernel's parameters arrive line by line.
struct PushChannel {
  PushState* state = nullptr;
  MessageShape shape;
  std::uint64_t epoch = 0;  // of this launch; 0: counted on the device
  RelayOutcome* outcome =
      nullptr;            // a receiver that goes on without: a message that does not come, or fit, is told here
  int num_receivers = 0;  // rank 0
  const std::uint64_t* acks = nullptr;  // rank 0: [receivers], an epoch up to which each has taken all
  const Packet* inbox = nullptr;        // elsewhere: this rank's own
  std::uint64_t* ack = nullptr;         // elsewhere: this rank's word for rank 0
  std::byte* staging = nullptr;         // one message of max_bytes(), rounded up to 8
  Packet* inboxes[kMaxRanks] = {};      // rank 0: each receiver's
  PushStatus* status = nullptr;
  std::uint64_t deadline_ns = 0;
  bool overlaps = false;  // launches may begin while the kernel in front of them ends (PDL, from sm_90 on)
};

// Packs these lanes out of the results and sends them; afterwards the results hold exactly what was sent.
void launch_push(const PushChannel& channel, const TreeSource& source, const LaneList& lanes, Verdict verdict,
                 Stream stream);
// The next message into the results, once it is there and fits these lanes; else no drafts, and the status.
void launch_receive(const PushChannel& channel, const DraftResults& results, int num_slots, const LaneList& lanes,
                    Stream stream);
// For a transport whose own kernels cannot: marks that the next message begins, or that the last has ended.
enum class Mark { kBegun, kDone };
void launch_mark(const PushChannel& channel, Mark mark, Stream stream);

}  // namespace eaglex::bridge
