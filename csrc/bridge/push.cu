// push: message = pack(results), one block per receiver packs it and stores it as packets into that receiver's inbox.
// receive: one block polls its inbox until all packets have this epoch's flag, checks the message and unpacks it.
// Called by the bridge behind the draft and in front of `tree`. Bytes: twice the message, to each receiver.
// Thread per packet; lane by lane for packing, since a lane's tree is checked in order.
#include <cuda_runtime.h>

#include "bridge/packet.cuh"
#include "bridge/push.h"
#include "core/error.h"

namespace eaglex::bridge {
namespace {

constexpr unsigned kThreads = 512;

// Flags are never zero, which is what an inbox begins with.
__device__ std::uint32_t flag_of(std::uint64_t epoch) {
  return static_cast<std::uint32_t>(epoch % 0xffffffffULL) + 1;
}

__device__ std::size_t slot_at(const MessageShape& shape, std::uint64_t epoch) {
  return epoch % kInboxDepth * packets_of(shape.max_bytes());
}

__global__ void __launch_bounds__(kThreads)
    push_kernel(const __grid_constant__ PushChannel channel, const __grid_constant__ TreeSource source,
                const __grid_constant__ PushLanes lanes) {
  const MessageShape shape = channel.shape;
  const auto count = static_cast<std::uint32_t>(lanes.lanes.count);
  const std::uint64_t epoch = channel.epochs[blockIdx.x] + 1;
  std::byte* const bytes = channel.staging + blockIdx.x * packets_of(shape.max_bytes()) * 8;
  const MessageView<std::byte> message(bytes, shape, count);
  const Verdict verdict = *lanes.verdict;
  if (threadIdx.x == 0) *message.header = {epoch, verdict, count};
  for (std::uint32_t lane = threadIdx.x; lane < count; lane += kThreads) {
    pack_lane(source, lanes.lanes.slots[lane], lanes.lanes.new_lens[lane], verdict, message.lanes + lane,
              message.nodes + static_cast<std::size_t>(lane) * shape.num_drafted);
  }
  __syncthreads();
  const auto* const words = reinterpret_cast<const std::uint32_t*>(bytes);
  Packet* const to = channel.inboxes[blockIdx.x] + slot_at(shape, epoch);
  const std::uint32_t flag = flag_of(epoch);
  for (std::size_t i = threadIdx.x; i < packets_of(shape.bytes(count)); i += kThreads) {
    store_packet(to + i, {words[2 * i], flag, words[2 * i + 1], flag});
  }
  __syncthreads();
  if (threadIdx.x == 0) channel.epochs[blockIdx.x] = epoch;
}

__device__ bool differs(const MessageLane& lane, const LaneList& lanes, std::uint32_t i, int num_slots, int most) {
  return lane.slot != lanes.slots[i] || lane.slot < 0 || lane.slot >= num_slots ||
         lane.drafted_for != lanes.new_lens[i] || lane.num_nodes < 0 || lane.num_nodes > most;
}

__global__ void __launch_bounds__(kThreads)
    receive_kernel(const __grid_constant__ PushChannel channel, const __grid_constant__ DraftResults results,
                   int num_slots, const __grid_constant__ PushLanes lanes) {
  const MessageShape shape = channel.shape;
  const auto count = static_cast<std::uint32_t>(lanes.lanes.count);
  const std::uint64_t epoch = channel.epochs[0] + 1;
  const std::uint32_t flag = flag_of(epoch);
  const Packet* const from = channel.inbox + slot_at(shape, epoch);
  auto* const words = reinterpret_cast<std::uint32_t*>(channel.staging);
  bool failed = channel.status->code != PushCode::kFine;
  const std::uint64_t begun = now_ns();
  for (std::size_t i = threadIdx.x; i < packets_of(shape.bytes(count)) && !failed; i += kThreads) {
    Packet packet = load_packet(from + i);
    while (packet.flag0 != flag || packet.flag1 != flag) {
      if (now_ns() - begun > channel.deadline_ns) {
        failed = true;
        break;
      }
      packet = load_packet(from + i);
    }
    words[2 * i] = packet.data0;
    words[2 * i + 1] = packet.data1;
  }
  const MessageView<std::byte> message(channel.staging, shape, count);
  PushCode code = __syncthreads_or(static_cast<int>(failed)) != 0 ? PushCode::kLate : PushCode::kFine;
  int bad = 0;
  if (code == PushCode::kFine) {
    const MessageHeader header = *message.header;
    const int most = header.verdict == Verdict::kDraft ? shape.num_drafted : 0;
    if (header.epoch != epoch || header.num_lanes != count) bad = 1;
    for (std::uint32_t lane = threadIdx.x; lane < count; lane += kThreads) {
      if (differs(message.lanes[lane], lanes.lanes, lane, num_slots, most)) bad = static_cast<int>(lane) + 1;
    }
    if (__syncthreads_or(bad) != 0) code = PushCode::kSplit;
  }
  for (std::uint32_t lane = threadIdx.x; lane < count; lane += kThreads) {
    const std::int64_t slot = lanes.lanes.slots[lane];
    if (slot < 0 || slot >= num_slots) continue;
    if (code == PushCode::kFine) {
      unpack_lane(message.lanes[lane], message.nodes + static_cast<std::size_t>(lane) * shape.num_drafted,
                  shape.num_drafted, results);
    } else {
      results.num_nodes[slot] = 0;
      results.drafted_for[slot] = -1;
    }
  }
  if (bad != 0) channel.status->lane = static_cast<std::uint32_t>(bad - 1);  // one of those that differ
  __syncthreads();
  if (threadIdx.x != 0) return;
  channel.epochs[0] = epoch;
  if (channel.status->code != PushCode::kFine) return;
  channel.status->epoch = epoch;
  __threadfence_system();  // the host must not see a failure without its epoch
  channel.status->code = code;
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(ErrorCode::kDevice, what, ": expected a launch, got ", cudaGetErrorString(status));
}

template <typename... Params, typename... Args>
void launch(const char* what, void (*kernel)(Params...), int blocks, Stream stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, Params(args)...), what);
}

}  // namespace

void launch_push(const PushChannel& channel, const TreeSource& source, const PushLanes& lanes, Stream stream) {
  expect_range("push lanes", lanes.lanes.count, 1, channel.shape.max_lanes);
  launch("push", push_kernel, channel.num_receivers, stream, channel, source, lanes);
}

void launch_receive(const PushChannel& channel, const DraftResults& results, int num_slots, const PushLanes& lanes,
                    Stream stream) {
  expect_range("receive lanes", lanes.lanes.count, 1, channel.shape.max_lanes);
  launch("receive", receive_kernel, 1, stream, channel, results, num_slots, lanes);
}

}  // namespace eaglex::bridge
