// push: message = pack(results), written as packets into every receiver's inbox, straight from the results.
// Called by the bridge behind the draft. Bytes: twice the message, to each receiver.
// One block; thread per node, and per lane. Loads depend on each other once, on the slot: latency is all there is.
#include "bridge/push.cuh"

namespace eaglex::bridge {
namespace {

constexpr int kTileNodes = 1024;  // so many nodes, and lanes, are worked on at a time
constexpr int kTileLanes = 512;
static_assert(kTileNodes >= kMaxDraftTokens);

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

// Until this receiver has let go of what lies where this message goes. An acknowledgement that was seen is not read again:
// it may lie behind a bus.
__device__ bool await_room(const PushChannel& channel, std::uint64_t epoch, int receiver) {
  std::uint64_t& acked = channel.state->acked[receiver];
  return wait_for(channel, true, [&] {
    acked = read_now(channel.acks + receiver);
    return epoch <= acked + kInboxDepth;
  });
}

// The drafts of some lanes as they will be sent: nodes that do not count are zero.
struct Tile {
  std::uint64_t words[kTileNodes];  // token and parent; of a node that is out of range, -1
  std::int64_t slots[kTileLanes];
  std::int64_t new_lens[kTileLanes];
  std::int32_t counts[kTileLanes];
  std::int32_t bad[kTileLanes];

  __device__ void clear() {
    for (int lane = thread(); lane < kTileLanes; lane += threads()) bad[lane] = 0;
  }
  __device__ void load(const TreeSource& source, const LaneIds& lanes, int first, int here, Verdict verdict,
                       const Place& own) {
    const int nodes = source.num_drafted;
    for (int i = thread(); i < here * nodes; i += threads()) {
      const Place at = i == thread() ? own : place_of(i, nodes);
      const std::int64_t slot = lanes.slot(first + at.lane);
      words[i] = 0;
      if (!in_range(slot, source.num_slots)) continue;
      const std::int64_t token = source.results.draft_tokens[slot * nodes + at.node];
      const std::int32_t up = source.results.parents[slot * nodes + at.node];
      if (at.node >= usable(source, slot, lanes.new_len(first + at.lane), verdict)) continue;
      const bool good = token >= 0 && token < source.vocab_size && up >= 0 && up <= at.node;
      words[i] = word_of(static_cast<std::int32_t>(token), good ? up : -1);
      if (!good) bad[at.lane] = 1;
    }
    // From the last thread on: of a small message other warps, which need not wait for what the first ones do.
    for (int lane = threads() - 1 - thread(); lane < here; lane += threads()) {
      slots[lane] = lanes.slot(first + lane);
      new_lens[lane] = lanes.new_len(first + lane);
      counts[lane] = in_range(slots[lane], source.num_slots) ? usable(source, slots[lane], new_lens[lane], verdict) : 0;
    }
  }
  // As core's usable_nodes judges the depth of one lane in order: here each node walks up by itself. Node i of a tree
  // whose parents come first is no deeper than i + 1, so only those behind the first K need to.
  __device__ void judge(int here, const TreeSource& source) {
    const int nodes = source.num_drafted;
    for (int i = thread(); i < here * nodes; i += threads()) {
      const Place at = place_of(i, nodes);
      if (at.node < source.num_steps || at.node >= counts[at.lane]) continue;
      std::int32_t up = parent(i);
      int depth = 1;
      for (; up > 0 && depth <= source.num_steps; ++depth) up = parent(at.lane * nodes + up - 1);
      if (up != 0 || depth > source.num_steps) bad[at.lane] = 1;
    }
  }
  __device__ void send(const Sender& sender, const TreeSource& source, const LaneIds& lanes, int first, int here,
                       const Place& own) const {
    const int nodes = source.num_drafted;
    const std::size_t nodes_at =
        2 + 2 * static_cast<std::size_t>(lanes.count) + static_cast<std::size_t>(first) * nodes;
    for (int i = thread(); i < here * nodes; i += threads()) {
      const Place at = i == thread() ? own : place_of(i, nodes);
      sender.put(nodes_at + i, bad[at.lane] == 0 ? words[i] : 0);
    }
    for (int lane = threads() - 1 - thread(); lane < here; lane += threads()) {
      const std::int64_t slot = slots[lane];
      const int count = bad[lane] != 0 ? 0 : counts[lane];
      const auto lane_at = 2 + 2 * static_cast<std::size_t>(first + lane);
      sender.put(lane_at, static_cast<std::uint64_t>(new_lens[lane]));
      sender.put(lane_at + 1, word_of(static_cast<std::int32_t>(slot), count));
      // Rank 0 itself must verify what it has sent and nothing else.
      if (in_range(slot, source.num_slots)) {
        source.results.num_nodes[slot] = count;
        source.results.drafted_for[slot] = new_lens[lane];
      }
    }
  }

 private:
  [[nodiscard]] __device__ std::int32_t parent(int at) const { return static_cast<std::int32_t>(words[at] >> 32); }
  // Nodes of this slot's draft where it is for this length.
  __device__ static int usable(const TreeSource& source, std::int64_t slot, std::int64_t new_len, Verdict verdict) {
    const int found = source.results.num_nodes[slot];
    const bool fits = source.results.drafted_for[slot] == new_len && new_len >= 0;
    return verdict == Verdict::kDraft && fits && found >= 0 && found <= source.num_drafted ? found : 0;
  }
};

__global__ void __launch_bounds__(kThreads)
    push_kernel(const __grid_constant__ LaneList given, Verdict verdict, const __grid_constant__ TreeSource source,
                const __grid_constant__ PushChannel channel) {
  __shared__ Tile tile;
  let_next_begin();
  fetch<sizeof(LaneList)>(given);
  fetch<sizeof(TreeSource)>(source);
  fetch<kEveryMessage>(channel);
  const int nodes = source.num_drafted;
  const int tile_lanes = nodes > 0 ? min(kTileLanes, kTileNodes / nodes) : kTileLanes;
  const Place own = nodes > 0 ? place_of(thread(), nodes) : Place{};
  tile.clear();
  __syncthreads();
  wait_for_producers();

  // All that this side counts, on its way while the drafts are.
  const bool waits = channel.acks != nullptr && thread() < channel.num_receivers;
  const std::uint64_t acked = waits ? channel.state->acked[thread()] : 0;
  const std::uint64_t drafts = channel.state->drafts;
  const std::uint64_t epoch = channel.epoch != 0 ? channel.epoch : channel.state->epoch + 1;
  const bool failed = channel.state->failed != 0;
  const LaneIds lanes = given.ids();
  tile.load(source, lanes, 0, min(lanes.count, tile_lanes), verdict, own);
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
      tile.clear();
      __syncthreads();
      tile.load(source, lanes, first, here, verdict, own);
      __syncthreads();
    }
    if (nodes > source.num_steps) {
      tile.judge(here, source);
      __syncthreads();
    }
    tile.send(sender, source, lanes, first, here, own);
  }
  if (threadIdx.x != 0) return;
  channel.state->epoch = epoch;
  channel.state->drafts = drafts + (verdict == Verdict::kDraft ? 1 : 0);
}

__global__ void mark_kernel(PushState* state, Mark mark) {
  let_next_begin();
  wait_for_producers();
  write_now(&state->marked, mark == Mark::kBegun ? state->epoch + 1 : state->epoch);
}

}  // namespace

void launch_push(const PushChannel& channel, const TreeSource& source, const LaneList& lanes, Verdict verdict,
                 Stream stream) {
  expect_range("push lanes", lanes.count, 1, channel.shape.max_lanes);
  launch("push", push_kernel, threads_for(channel, lanes), overlap_of(channel), stream, lanes, verdict, source,
         channel);
}

void launch_mark(const PushChannel& channel, Mark mark, Stream stream) {
  launch("mark", mark_kernel, 1U, overlap_of(channel), stream, channel.state, mark);
}

}  // namespace eaglex::bridge
