// push: message = pack(results), written as packets into every receiver's inbox, straight from the results.
// receive: polls this rank's inbox until all packets have this epoch's flag, checks the message and unpacks it.
// Called by the bridge behind the draft and in front of `tree`. Bytes: twice the message, to each receiver.
// One block; thread per packet. Loads of one message depend on each other once, on the slot: latency is all there is.
#include "bridge/push.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "bridge/packet.cuh"
#include "core/error.h"

namespace eaglex::bridge {
namespace {

constexpr unsigned kThreads = 512;
constexpr int kTileNodes = 1024;  // so many nodes, and lanes, are worked on at a time
constexpr int kTileLanes = 512;
static_assert(kTileNodes >= kMaxDraftTokens);
// So many packets are polled for from the beginning; the rest, by all threads, once those are there: a receiver may wait
// for as long as a draft takes, and must not fill the bus meanwhile.
constexpr unsigned kFirst = 64;
// Polls between two looks at the clock.
constexpr unsigned kPolls = 32;
constexpr std::uint64_t kStopAfterNs = 100'000;  // a look at the host's word goes over the bus: not in a short wait

static_assert(sizeof(MessageHeader) == 16 && sizeof(MessageLane) == 16 && sizeof(MessageNode) == 8,
              "a message is words of 8 bytes: two of the header, two per lane, one per node");

// Flags are never zero, which is what an inbox begins with.
__device__ std::uint32_t flag_of(std::uint64_t epoch) {
  return static_cast<std::uint32_t>(epoch % 0xffffffffULL) + 1;
}
__device__ std::size_t slot_at(const MessageShape& shape, std::uint64_t epoch) {
  return epoch % kInboxDepth * packets_of(shape.max_bytes());
}

__device__ int thread() {
  return static_cast<int>(threadIdx.x);
}
__device__ int threads() {
  return static_cast<int>(blockDim.x);
}

// Lets the kernel behind this one begin to start, and waits for the end of the one in front: nothing of the device's memory
// is touched before it.
__device__ void after_producers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename T>
__device__ T read_now(const T* from) {
  return *static_cast<const volatile T*>(from);
}
template <typename T>
__device__ void write_now(T* to, T value) {
  *static_cast<volatile T*>(to) = value;
}

// Until `done()`; false where the deadline passes, or a thread that `asks` hears that the group has ended.
template <typename Done>
__device__ bool wait_for(const PushChannel& channel, bool asks, const Done& done) {
  if (done()) return true;
  const std::uint64_t begun = now_ns();
  for (;;) {
    for (unsigned i = 0; i < kPolls; ++i) {
      if (done()) return true;
    }
    const std::uint64_t waited = now_ns() - begun;
    if (waited > channel.deadline_ns) return done();
    if (asks && waited > kStopAfterNs && read_now(&channel.status->stop) != 0) return false;
  }
}

// Thread 0: what has happened, for the host; returns when it has ended the group, so that no other rank can take this
// cycle's work for good.
struct Failure {
  PushCode code = PushCode::kLate;
  std::uint32_t who = 0;
  SplitField field = SplitField::kEpoch;
  std::int64_t expected = 0, got = 0;
};
__device__ void tell(const PushChannel& channel, std::uint64_t epoch, const Failure& failure) {
  PushStatus& status = *channel.status;
  channel.state->failed = 1;
  status.who = failure.who;
  status.field = failure.field;
  status.expected = failure.expected;
  status.got = failure.got;
  status.epoch = epoch;
  __threadfence_system();  // the host must not see a failure without its facts
  write_now(&status.code, read_now(&status.stop) != 0 ? PushCode::kEnded : failure.code);
  const std::uint64_t begun = now_ns();
  while (read_now(&status.stop) == 0 && now_ns() - begun < kTellNs) {
  }
}

__device__ bool in_range(std::int64_t slot, int num_slots) {
  return slot > 0 && slot < num_slots;
}

__device__ void no_drafts(const DraftResults& results, int num_slots, const LaneList& lanes) {
  for (int lane = thread(); lane < lanes.count; lane += threads()) {
    const std::int64_t slot = lanes.slots[lane];
    if (!in_range(slot, num_slots)) continue;
    results.num_nodes[slot] = 0;
    results.drafted_for[slot] = -1;
  }
}

// Word `i` of the message to all receivers, or into staging where there are no inboxes.
struct Sender {
  const PushChannel& channel;
  std::size_t slot;
  std::uint32_t flag;

  __device__ void put(std::size_t i, std::uint64_t word) const {
    const auto low = static_cast<std::uint32_t>(word);
    const auto high = static_cast<std::uint32_t>(word >> 32);
    if (channel.acks == nullptr) {
      reinterpret_cast<std::uint64_t*>(channel.staging)[i] = word;
      return;
    }
    for (int r = 0; r < channel.num_receivers; ++r)
      store_packet(channel.inboxes[r] + slot + i, {low, flag, high, flag});
  }
};

__device__ std::uint64_t word_of(std::int32_t low, std::int32_t high) {
  return static_cast<std::uint32_t>(low) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32;
}

// Until this receiver has let go of what lies where this message goes. An acknowledgement that was seen is not read again:
// it may lie behind a bus.
__device__ bool await_room(const PushChannel& channel, std::uint64_t epoch, int receiver) {
  std::uint64_t& acked = channel.state->acked[receiver];
  return wait_for(channel, true, [&] {
    acked = read_now(channel.acks + receiver);
    return epoch <= acked + kInboxDepth;
  });
}

// The drafts of some lanes as they will be sent, by lane and node: token and parent, -1 where one of them is out of range.
struct Tile {
  std::uint64_t words[kTileNodes];
  std::int32_t counts[kTileLanes];
  std::int32_t bad[kTileLanes];

  [[nodiscard]] __device__ std::int32_t parent(int at) const { return static_cast<std::int32_t>(words[at] >> 32); }

  __device__ void load(const TreeSource& source, const LaneList& lanes, int first, int here, Verdict verdict) {
    const int nodes = source.num_drafted;
    for (int i = thread(); i < here * nodes; i += threads()) {
      const std::int64_t slot = lanes.slots[first + i / nodes];
      std::int64_t token = -1;
      std::int32_t up = -1;
      if (in_range(slot, source.num_slots)) {
        token = source.results.draft_tokens[slot * nodes + i % nodes];
        up = source.results.parents[slot * nodes + i % nodes];
      }
      const bool good = token >= 0 && token < source.vocab_size && up >= 0 && up <= i % nodes;
      words[i] = word_of(static_cast<std::int32_t>(token), good ? up : -1);
    }
    // From the last thread on: of a small message other warps, which need not wait for what the first ones do.
    for (int lane = threads() - 1 - thread(); lane < here; lane += threads()) {
      const std::int64_t slot = lanes.slots[first + lane];
      const std::int64_t new_len = lanes.new_len(first + lane);
      int count = 0;
      if (verdict == Verdict::kDraft && in_range(slot, source.num_slots) && new_len >= 0) {
        const int found = source.results.num_nodes[slot];
        if (source.results.drafted_for[slot] == new_len && found >= 0 && found <= nodes) count = found;
      }
      counts[lane] = count;
      bad[lane] = 0;
    }
  }
  // As core's usable_nodes judges one lane in order: here each node walks up by itself.
  __device__ void judge(int here, int nodes, int num_steps) {
    for (int i = thread(); i < here * nodes; i += threads()) {
      const int lane = i / nodes;
      if (i % nodes >= counts[lane]) continue;
      std::int32_t up = parent(i);
      int depth = 1;
      for (; up > 0 && depth <= num_steps; ++depth) up = parent(lane * nodes + up - 1);
      if (up != 0 || depth > num_steps) bad[lane] = 1;
    }
  }
  __device__ void send(const Sender& sender, const TreeSource& source, const LaneList& lanes, int first,
                       int here) const {
    const int nodes = source.num_drafted;
    for (int lane = thread(); lane < here; lane += threads()) {
      const std::int64_t slot = lanes.slots[first + lane];
      const std::int64_t new_len = lanes.new_len(first + lane);
      const int count = bad[lane] != 0 ? 0 : counts[lane];
      const auto at = 2 + 2 * static_cast<std::size_t>(first + lane);
      sender.put(at, static_cast<std::uint64_t>(new_len));
      sender.put(at + 1, word_of(static_cast<std::int32_t>(slot), count));
      // Rank 0 itself must verify what it has sent and nothing else.
      if (in_range(slot, source.num_slots)) {
        source.results.num_nodes[slot] = count;
        source.results.drafted_for[slot] = new_len;
      }
    }
    const std::size_t at = 2 + 2 * static_cast<std::size_t>(lanes.count) + static_cast<std::size_t>(first) * nodes;
    for (int i = thread(); i < here * nodes; i += threads()) {
      const int lane = i / nodes;
      sender.put(at + i, bad[lane] == 0 && i % nodes < counts[lane] ? words[i] : 0);
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    push_kernel(const __grid_constant__ LaneList lanes, Verdict verdict, const __grid_constant__ TreeSource source,
                const __grid_constant__ PushChannel channel) {
  __shared__ Tile tile;
  after_producers();
  const int nodes = source.num_drafted;
  const int tile_lanes = nodes > 0 ? min(kTileLanes, kTileNodes / nodes) : kTileLanes;
  // All that this side counts, on its way while the drafts are.
  const bool waits = channel.acks != nullptr && thread() < channel.num_receivers;
  const std::uint64_t acked = waits ? channel.state->acked[thread()] : 0;
  const std::uint64_t drafts = channel.state->drafts;
  const std::uint64_t epoch = channel.state->epoch + 1;
  const bool failed = channel.state->failed != 0;
  tile.load(source, lanes, 0, min(lanes.count, tile_lanes), verdict);
  int late = 0;
  if (waits && !failed && epoch > acked + kInboxDepth) late = await_room(channel, epoch, thread()) ? 0 : 1;
  if (__syncthreads_or(late) != 0 || failed) {
    if (threadIdx.x == 0 && !failed) {
      int who = 0;
      while (who + 1 < channel.num_receivers && epoch <= channel.state->acked[who] + kInboxDepth) ++who;
      tell(channel, epoch, {PushCode::kLate, static_cast<std::uint32_t>(who)});
    }
    no_drafts(source.results, source.num_slots, lanes);
    return;
  }
  const Sender sender = {channel, slot_at(channel.shape, epoch), flag_of(epoch)};
  if (threadIdx.x == 0) {
    sender.put(0, epoch);
    sender.put(1, word_of(static_cast<std::int32_t>(verdict), lanes.count));
  }
  for (int first = 0; first < lanes.count; first += tile_lanes) {
    const int here = min(lanes.count - first, tile_lanes);
    if (first > 0) {
      __syncthreads();
      tile.load(source, lanes, first, here, verdict);
      __syncthreads();
    }
    tile.judge(here, nodes, source.num_steps);
    __syncthreads();
    tile.send(sender, source, lanes, first, here);
  }
  if (threadIdx.x != 0) return;
  channel.state->epoch = epoch;
  channel.state->drafts = drafts + (verdict == Verdict::kDraft ? 1 : 0);
  if (channel.acks == nullptr) write_now(&channel.status->begun, epoch);
}

constexpr std::int32_t kLeave = -1;

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
    if (i == 1 && packet.flag1 == flag) *sent_lanes = static_cast<std::int32_t>(packet.data1);
    if (!there) *sent_lanes = kLeave;  // whoever sees first that there will be no message tells the rest
    return there;
  }
  // Whether all have come, on every thread.
  __device__ bool take_all(std::size_t count) const {
    bool there = threadIdx.x >= kFirst || threadIdx.x >= count || take(threadIdx.x);
    if (__syncthreads_or(there && *sent_lanes == num_lanes ? 0 : 1) != 0) return false;
    if (count <= kFirst) return true;
    for (std::size_t i = kFirst + threadIdx.x; i < count && there; i += blockDim.x) there = take(i);
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

__device__ void unpack(const Message& message, const LaneList& lanes, int nodes, int num_slots,
                       const DraftResults& results) {
  for (int lane = thread(); lane < lanes.count; lane += threads()) {
    const MessageLane& found = message.lanes[lane];
    if (!in_range(found.slot, num_slots)) continue;
    results.num_nodes[found.slot] = found.num_nodes;
    results.drafted_for[found.slot] = found.drafted_for;
  }
  for (int i = thread(); i < lanes.count * nodes; i += threads()) {
    const MessageLane& found = message.lanes[i / nodes];
    if (!in_range(found.slot, num_slots) || i % nodes >= found.num_nodes) continue;
    const std::int64_t at = static_cast<std::int64_t>(found.slot) * nodes + i % nodes;
    results.draft_tokens[at] = message.nodes[i].token;
    results.parents[at] = message.nodes[i].parent;
  }
}

__global__ void __launch_bounds__(kThreads)
    receive_kernel(const __grid_constant__ LaneList lanes, int num_slots, const __grid_constant__ DraftResults results,
                   const __grid_constant__ PushChannel channel) {
  __shared__ std::uint64_t small[kTileNodes];
  __shared__ std::int32_t sent_lanes;
  after_producers();
  const MessageShape shape = channel.shape;
  const auto count = static_cast<std::uint32_t>(lanes.count);
  const std::size_t packets = packets_of(shape.bytes(count));
  const std::uint64_t epoch = channel.state->epoch + 1;
  const std::uint64_t drafts = channel.state->drafts;
  const Expected own = expected_of(lanes, thread());  // here before the message is
  if (channel.state->failed != 0) {
    no_drafts(results, num_slots, lanes);
    return;
  }
  if (threadIdx.x == 0) sent_lanes = lanes.count;
  __syncthreads();
  auto* words = reinterpret_cast<std::uint64_t*>(channel.staging);
  bool there = true;
  if (channel.inbox != nullptr) {
    if (packets <= kTileNodes) words = small;
    const Incoming incoming = {channel,    channel.inbox + slot_at(shape, epoch), flag_of(epoch), words, lanes.count,
                               &sent_lanes};
    there = incoming.take_all(packets);
    // The inbox may be written again: all of it that is read has been.
    if (there && threadIdx.x == 0 && epoch % kAckEvery == 0) write_now(channel.ack, epoch);
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
      tell(channel, epoch, failure);
    }
    no_drafts(results, num_slots, lanes);
    return;
  }
  unpack(message, lanes, shape.num_drafted, num_slots, results);
  if (threadIdx.x != 0) return;
  channel.state->epoch = epoch;
  channel.state->drafts = drafts + (message.header->verdict == Verdict::kDraft ? 1 : 0);
  if (channel.inbox == nullptr) write_now(&channel.status->done, epoch);
}

__global__ void mark_kernel(PushState* state, PushStatus* status, Mark mark) {
  if (mark == Mark::kBegun) {
    write_now(&status->begun, state->epoch + 1);
  } else {
    write_now(&status->done, state->epoch);
  }
}

enum class Overlap : bool { kOff, kOn };

template <typename... Params, typename... Args>
void launch(const char* what, void (*kernel)(Params...), unsigned num_threads, Overlap overlap, Stream stream,
            const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(num_threads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = overlap == Overlap::kOn ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it must not surface again in somebody else's check
  fail(ErrorCode::kDevice, what, ": expected a launch, got ", cudaGetErrorString(status));
}

Overlap overlap_of(const PushChannel& channel) {
  return channel.overlaps ? Overlap::kOn : Overlap::kOff;
}

// One per packet; barriers of fewer threads are shorter.
unsigned threads_for(const PushChannel& channel, const LaneList& lanes) {
  const std::size_t packets = packets_of(channel.shape.bytes(static_cast<std::uint32_t>(lanes.count)));
  return static_cast<unsigned>(std::clamp<std::size_t>((packets + 31) / 32 * 32, 2 * kFirst, kThreads));
}

}  // namespace

void launch_push(const PushChannel& channel, const TreeSource& source, const LaneList& lanes, Verdict verdict,
                 Stream stream) {
  expect_range("push lanes", lanes.count, 1, channel.shape.max_lanes);
  launch("push", push_kernel, threads_for(channel, lanes), overlap_of(channel), stream, lanes, verdict, source,
         channel);
}

void launch_receive(const PushChannel& channel, const DraftResults& results, int num_slots, const LaneList& lanes,
                    Stream stream) {
  expect_range("receive lanes", lanes.count, 1, channel.shape.max_lanes);
  launch("receive", receive_kernel, threads_for(channel, lanes), overlap_of(channel), stream, lanes, num_slots, results,
         channel);
}

void launch_mark(const PushChannel& channel, Mark mark, Stream stream) {
  launch("mark", mark_kernel, 1U, Overlap::kOff, stream, channel.state, channel.status, mark);
}

}  // namespace eaglex::bridge
