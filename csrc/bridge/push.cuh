// What the bridge's kernels share: how they begin and wait, how they tell of a failure, and how the next kernel begins early.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "bridge/packet.cuh"
#include "bridge/push.h"
#include "core/error.h"

namespace eaglex::bridge {

inline constexpr unsigned kThreads = 1024;
// Of a channel, what every message needs, to eight receivers.
inline constexpr std::size_t kEveryMessage = offsetof(PushChannel, inboxes) + 8 * sizeof(Packet*);
// So many packets are polled for as long as it takes; the others for a moment, then once those are there: a receiver may
// wait for as long as a draft takes, and must not fill the bus meanwhile.
inline constexpr unsigned kFirst = 64;
// Polls between two looks at the clock.
inline constexpr unsigned kPolls = 32;
inline constexpr std::uint64_t kStopAfterNs =
    100'000;  // a look at the host's word goes over the bus: not in a short wait

static_assert(sizeof(MessageHeader) == 16 && sizeof(MessageLane) == 16 && sizeof(MessageNode) == 8,
              "a message is words of 8 bytes: two of the header, two per lane, one per node");

// Flags are never zero, which is what an inbox begins with.
__device__ inline std::uint32_t flag_of(std::uint64_t epoch) {
  return static_cast<std::uint32_t>(epoch % 0xffffffffULL) + 1;
}
__device__ inline std::size_t slot_at(const MessageShape& shape, std::uint64_t epoch) {
  return epoch % kInboxDepth * packets_of(shape.max_bytes());
}

__device__ inline int thread() {
  return static_cast<int>(threadIdx.x);
}
__device__ inline int threads() {
  return static_cast<int>(blockDim.x);
}

// Which node of which lane a thread works on first; found before the wait, since a division takes its time.
struct Place {
  int lane = 0, node = 0;
};
__device__ inline Place place_of(int i, int nodes) {
  return {i / nodes, i % nodes};
}

// The first `Bytes` of a kernel's parameters, on their way before they are needed: each line of them that is read for the
// first time takes as long as a read of memory, and there is time for it while the kernel in front ends.
template <std::size_t Bytes, typename T>
__device__ void fetch([[maybe_unused]] const T& parameters) {
#ifdef __CUDA_ARCH__
  const auto* const words = reinterpret_cast<const std::uint32_t*>(&parameters);
#pragma unroll
  for (std::size_t i = 0; i < Bytes / 4; i += 16) asm volatile("" ::"r"(words[i]) : "memory");
#endif
}

// Lets the kernel behind this one begin to start, and waits for the end of the one in front: nothing of the device's memory
// is touched before it.
__device__ inline void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_producers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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
__device__ inline void tell(const PushChannel& channel, std::uint64_t epoch, const Failure& failure) {
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

__device__ inline bool in_range(std::int64_t slot, int num_slots) {
  return slot > 0 && slot < num_slots;
}

__device__ inline void no_drafts(const DraftResults& results, int num_slots, const LaneIds& lanes) {
  for (int lane = thread(); lane < lanes.count; lane += threads()) {
    const std::int64_t slot = lanes.slot(lane);
    if (!in_range(slot, num_slots)) continue;
    results.num_nodes[slot] = 0;
    results.drafted_for[slot] = -1;
  }
}

__device__ inline std::uint64_t word_of(std::int32_t low, std::int32_t high) {
  return static_cast<std::uint32_t>(low) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32;
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

inline Overlap overlap_of(const PushChannel& channel) {
  return channel.overlaps ? Overlap::kOn : Overlap::kOff;
}

// One per packet; barriers of fewer threads are shorter.
inline unsigned threads_for(const PushChannel& channel, const LaneList& lanes) {
  const std::size_t packets = packets_of(channel.shape.bytes(static_cast<std::uint32_t>(lanes.count)));
  return static_cast<unsigned>(std::clamp<std::size_t>((packets + 31) / 32 * 32, kFirst, kThreads));
}

}  // namespace eaglex::bridge
