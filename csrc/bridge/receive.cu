// receive: polls this rank's inbox until all packets have this epoch's flag, checks the message and unpacks it.
// Called by the bridge in front of `tree`. Bytes: twice the message.
// One block; thread per packet, then per lane, then per node.
#include "bridge/push.cuh"

namespace eaglex::bridge {
namespace {

constexpr std::int32_t kLeave = -1;
constexpr std::size_t kSmallPackets = 1024;  // a larger message is put together in device memory

// A message whose packets are on their way.
struct Incoming {
  const PushChannel& channel;
  const Packet* from;
  std::uint32_t flag;
  std::uint64_t* words;    // where to
  std::int32_t num_lanes;  // as this rank expects
  // As the message says, once that is known, since fewer would never all come; kLeave once the group has ended.
  volatile std::int32_t* sent_lanes;

  // Word `i`, once it is there.
  __device__ bool take(std::size_t i) const {
    Packet packet;
    const bool there = wait_for(channel, threadIdx.x == 0, [&] {
      packet = load_packet(from + i);
      return (packet.flag0 == flag && packet.flag1 == flag) || *sent_lanes != num_lanes;
    });
    words[i] = packet.data0 | static_cast<std::uint64_t>(packet.data1) << 32;
    const auto sent = static_cast<std::int32_t>(packet.data1);
    if (i == 1 && packet.flag1 == flag && sent != num_lanes) *sent_lanes = sent;
    if (!there) *sent_lanes = kLeave;  // whoever sees first that there will be no message tells the rest
    return there;
  }
  // The same, for a moment.
  __device__ bool glance(std::size_t i) const {
    for (unsigned polls = 0; polls < kPolls; ++polls) {
      const Packet packet = load_packet(from + i);
      if (packet.flag0 != flag || packet.flag1 != flag) continue;
      words[i] = packet.data0 | static_cast<std::uint64_t>(packet.data1) << 32;
      return true;
    }
    return false;
  }
  // Whether all have come, on every thread. Where the message is there already, this is one trip to the inbox.
  __device__ bool take_all(std::size_t count) const {
    const std::size_t own = threadIdx.x;
    bool there = true, took = true;
    if (own < count) own < kFirst ? there = take(own) : took = glance(own);
    if (__syncthreads_or(there && *sent_lanes == num_lanes ? 0 : 1) != 0) return false;
    if (count <= kFirst) return true;
    if (!took) there = take(own);
    for (std::size_t i = own + blockDim.x; i < count && there; i += blockDim.x) there = take(i);
    return __syncthreads_or(there ? 0 : 1) == 0;
  }
};

// What this rank expects of a lane.
struct Expected {
  std::int64_t slot = 0, new_len = 0;
};
__device__ Expected expected_of(const LaneList& lanes, int i) {
  return i < lanes.count ? Expected{lanes.slots[i], lanes.new_len(i)} : Expected{};
}

__device__ bool lane_fits(const MessageLane& lane, const Expected& expected, int num_slots, int most) {
  return lane.slot == expected.slot && lane.slot >= 0 && lane.slot < num_slots &&
         lane.drafted_for == expected.new_len && lane.num_nodes >= 0 && lane.num_nodes <= most;
}

__device__ bool header_fits(const MessageHeader& header, std::uint64_t epoch, const LaneList& lanes) {
  return header.epoch == epoch && header.num_lanes == static_cast<std::uint32_t>(lanes.count) &&
         (header.verdict == Verdict::kDraft || header.verdict == Verdict::kNoDraft);
}

__device__ void conclude(const PushChannel& channel, std::uint64_t epoch, PushCode code, Verdict verdict) {
  if (code != PushCode::kFine) channel.state->failed = 1;  // requests behind this one are off
  channel.outcome->code = code;
  channel.outcome->verdict = verdict;
  __threadfence_system();
  write_now(&channel.outcome->epoch, epoch);
}

using Message = MessageView<const std::byte>;

// Thread 0: what exactly does not fit. Without an inbox an older message means that none has come.
__device__ Failure complaint(const PushChannel& channel, std::uint64_t epoch, const LaneList& lanes, int num_slots,
                             const Message& message) {
  const MessageHeader header = *message.header;
  if (channel.inbox == nullptr && header.epoch < epoch) return {};
  const auto split = [](SplitField field, std::uint32_t lane, std::int64_t expected, std::int64_t got) {
    return Failure{PushCode::kSplit, lane, field, expected, got};
  };
  if (header.epoch != epoch)
    return split(SplitField::kEpoch, 0, static_cast<std::int64_t>(epoch), static_cast<std::int64_t>(header.epoch));
  if (header.num_lanes != static_cast<std::uint32_t>(lanes.count))
    return split(SplitField::kNumLanes, 0, lanes.count, header.num_lanes);
  if (!header_fits(header, epoch, lanes))
    return split(SplitField::kVerdict, 0, 1, static_cast<std::int64_t>(header.verdict));
  const int most = header.verdict == Verdict::kDraft ? channel.shape.num_drafted : 0;
  for (std::int32_t i = 0; i < lanes.count; ++i) {
    const MessageLane& lane = message.lanes[i];
    if (lane_fits(lane, expected_of(lanes, i), num_slots, most)) continue;
    const auto at = static_cast<std::uint32_t>(i);
    if (lane.slot != lanes.slots[i] || lane.slot < 0 || lane.slot >= num_slots)
      return split(SplitField::kSlot, at, lanes.slots[i], lane.slot);
    if (lane.drafted_for != lanes.new_len(i)) return split(SplitField::kLength, at, lanes.new_len(i), lane.drafted_for);
    return split(SplitField::kNumNodes, at, most, lane.num_nodes);
  }
  return {};
}

__device__ void unpack(const Message& message, int count, int nodes, int num_slots, const Place& own,
                       const DraftResults& results) {
  for (int lane = thread(); lane < count; lane += threads()) {
    const MessageLane& found = message.lanes[lane];
    if (!in_range(found.slot, num_slots)) continue;
    results.num_nodes[found.slot] = found.num_nodes;
    results.drafted_for[found.slot] = found.drafted_for;
  }
  for (int i = thread(); i < count * nodes; i += threads()) {
    const Place at = i == thread() ? own : place_of(i, nodes);
    const MessageLane& found = message.lanes[at.lane];
    if (!in_range(found.slot, num_slots) || at.node >= found.num_nodes) continue;
    const std::int64_t to = static_cast<std::int64_t>(found.slot) * nodes + at.node;
    results.draft_tokens[to] = message.nodes[i].token;
    results.parents[to] = message.nodes[i].parent;
  }
}

__global__ void __launch_bounds__(kThreads)
    receive_kernel(const __grid_constant__ LaneList lanes, int num_slots, const __grid_constant__ DraftResults results,
                   const __grid_constant__ PushChannel channel) {
  __shared__ std::uint64_t small[kSmallPackets];
  __shared__ std::int32_t sent_lanes;
  let_next_begin();
  fetch<sizeof(LaneList)>(lanes);
  fetch<sizeof(DraftResults)>(results);
  fetch<offsetof(PushChannel, inboxes)>(channel);
  const MessageShape shape = channel.shape;
  const auto count = static_cast<std::uint32_t>(lanes.count);
  const std::size_t packets = packets_of(shape.bytes(count));
  const Place place = shape.num_drafted > 0 ? place_of(thread(), shape.num_drafted) : Place{};
  if (threadIdx.x == 0) sent_lanes = lanes.count;
  __syncthreads();
  wait_for_producers();

  const std::uint64_t epoch = channel.epoch != 0 ? channel.epoch : channel.state->epoch + 1;
  const std::uint64_t drafts = channel.state->drafts;
  const Expected own = expected_of(lanes, thread());  // here before the message is
  if (channel.state->failed != 0) {
    if (threadIdx.x == 0 && channel.outcome != nullptr) conclude(channel, epoch, PushCode::kEnded, {});
    no_drafts(results, num_slots, lanes.ids());
    return;
  }
  auto* words = reinterpret_cast<std::uint64_t*>(channel.staging);
  bool there = true;
  if (channel.inbox != nullptr) {
    if (packets <= kSmallPackets) words = small;
    const Incoming incoming = {channel,    channel.inbox + slot_at(shape, epoch), flag_of(epoch), words, lanes.count,
                               &sent_lanes};
    there = incoming.take_all(packets);
    // The inbox may be written again: all of it that is read has been.
    if (there && threadIdx.x == 0 && channel.ack != nullptr && epoch % kAckEvery == 0) write_now(channel.ack, epoch);
  }
  const Message message(reinterpret_cast<const std::byte*>(words), shape, count);
  int bad = there && header_fits(*message.header, epoch, lanes) ? 0 : 1;
  const int most = message.header->verdict == Verdict::kDraft ? shape.num_drafted : 0;
  for (int lane = thread(); lane < lanes.count && bad == 0; lane += threads()) {
    const Expected expected = lane == thread() ? own : expected_of(lanes, lane);
    bad = lane_fits(message.lanes[lane], expected, num_slots, most) ? 0 : 1;
  }
  if (__syncthreads_or(bad) != 0) {
    if (threadIdx.x == 0) {
      Failure failure;
      if (sent_lanes != lanes.count && sent_lanes != kLeave) {
        failure = {PushCode::kSplit, 0, SplitField::kNumLanes, lanes.count, sent_lanes};
      } else if (there) {  // else none came in time
        failure = complaint(channel, epoch, lanes, num_slots, message);
      }
      channel.outcome == nullptr ? tell(channel, epoch, failure) : conclude(channel, epoch, failure.code, {});
    }
    no_drafts(results, num_slots, lanes.ids());
    return;
  }
  unpack(message, lanes.count, shape.num_drafted, num_slots, place, results);
  if (threadIdx.x != 0) return;
  if (channel.outcome != nullptr) return conclude(channel, epoch, PushCode::kFine, message.header->verdict);
  channel.state->epoch = epoch;
  channel.state->drafts = drafts + (message.header->verdict == Verdict::kDraft ? 1 : 0);
}

}  // namespace

void launch_receive(const PushChannel& channel, const DraftResults& results, int num_slots, const LaneList& lanes,
                    Stream stream) {
  expect_range("receive lanes", lanes.count, 1, channel.shape.max_lanes);
  launch("receive", receive_kernel, threads_for(channel, lanes), overlap_of(channel), stream, lanes, num_slots, results,
         channel);
}

}  // namespace eaglex::bridge
