// The bridge's push between two GPUs: two processes, one word each way per round, all rounds of a run in one graph.
//
//   bench_bridge [rounds [replays]]     from 2 rounds on; needs two GPUs; with one, both processes share it
//
// A round is push, receive on the other side, push back, receive: half of it is one way, launches included, as in the
// cycle. As many rounds before, at most 200, are checked. Prints one JSON row per transport and size; times are of rank 0's %globaltimer
// between the ends of two rounds. push_us is what a push costs the stream that it is on, receivers being elsewhere.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bridge/device.h"
#include "bridge/packet.cuh"
#include "bridge/push.h"
#include "bridge/segment.h"
#include "core/error.h"
#include "two_processes.h"

using namespace eaglex;          // NOLINT(google-build-using-namespace)
using namespace eaglex::bridge;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int kSlots = 130;
constexpr std::uint64_t kDeadlineNs = 2'000'000'000;
constexpr std::size_t kAcks = 4096;               // in front of each inbox
constexpr int kPushes = kInboxDepth - kAckEvery;  // without a word from the other side

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(ErrorCode::kDevice, what, ": ", cudaGetErrorString(status));
}

template <typename T>
T* device(std::size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "memory");
  check(cudaMemset(memory, 0, count * sizeof(T)), "memory");
  return static_cast<T*>(memory);
}

template <typename T>
T* device(const std::vector<T>& values) {
  T* const memory = device<T>(values.size());
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return memory;
}

// What the two processes share: inboxes for the mailbox, handles for the other transport, and where they are.
struct Shared {
  std::atomic<int> arrived[2];
  cudaIpcMemHandle_t handles[2];
};

struct Case {
  const char* transport;
  int lanes;
  int nodes;  // N - 1
  int rounds;
  int replays;
};

__global__ void stamp_kernel(std::uint64_t* to, const PushState* state) {
  to[(state->epoch - 1) % 4096] = now_ns();
}

// Draft of the next round, so that each message differs: token = round * 8 + slot + node.
__global__ void draft_kernel(DraftResults results, LaneList lanes, int nodes, const PushState* state) {
  const std::int64_t slot = lanes.slots[threadIdx.x];
  for (int i = 0; i < nodes; ++i) {
    results.draft_tokens[slot * nodes + i] = static_cast<std::int64_t>(state->epoch % 1000) * 8 + slot + i;
    results.parents[slot * nodes + i] = i;
  }
  results.num_nodes[slot] = nodes;
  results.drafted_for[slot] = lanes.new_len(static_cast<std::int32_t>(threadIdx.x));
}

__global__ void check_kernel(DraftResults results, LaneList lanes, int nodes, const PushState* state, int* wrong) {
  const std::int64_t slot = lanes.slots[threadIdx.x];
  bool good = results.num_nodes[slot] == nodes &&
              results.drafted_for[slot] == lanes.new_len(static_cast<std::int32_t>(threadIdx.x));
  for (int i = 0; i < nodes; ++i) {
    good = good && results.draft_tokens[slot * nodes + i] ==
                       static_cast<std::int64_t>((state->epoch - 1) % 1000) * 8 + slot + i;
  }
  if (!good) atomicAdd(wrong, 1);
}

struct Side {
  Side(int rank, const Case& which, Shared& shared, std::byte* mailbox) : rank_(rank), case_(which), shared_(shared) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "devices");
    check(cudaSetDevice(rank % count), "device");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    connect(mailbox);
    std::vector<std::int64_t> slots, lens;
    for (int i = 0; i < which.lanes; ++i) slots.push_back(i + 1), lens.push_back(100 + i);
    lanes_ = {which.lanes, device(slots), device(lens)};
    results_.draft_tokens = device<std::int64_t>(static_cast<std::size_t>(kSlots * which.nodes));
    results_.parents = device<std::int32_t>(static_cast<std::size_t>(kSlots * which.nodes));
    results_.num_nodes = device<std::int32_t>(kSlots);
    results_.drafted_for = device<std::int64_t>(kSlots);
    stamps_ = device<std::uint64_t>(4096);
    wrong_ = device<int>(1);
    check(cudaHostAlloc(&status_, sizeof(PushStatus), cudaHostAllocMapped), "status");
    *status_ = {};
    for (PushChannel* const channel : {&out_, &in_}) {
      channel->shape = {which.lanes, which.nodes};
      channel->state = device<PushState>(1);
      channel->staging = device<std::byte>(channel->shape.max_bytes() + 16);
      channel->status = status_;
      channel->deadline_ns = kDeadlineNs;
      channel->overlaps = may_overlap(rank % count);
    }
    out_.num_receivers = 1;
    out_.inboxes[0] = reinterpret_cast<Packet*>(theirs_ + kAcks);
    out_.acks = reinterpret_cast<const std::uint64_t*>(own_);
    in_.inbox = reinterpret_cast<const Packet*>(own_ + kAcks);
    in_.ack = reinterpret_cast<std::uint64_t*>(theirs_);
  }

  // Half a round in ns, one per round of all replays.
  std::vector<double> run() {
    cudaGraphExec_t const exec = captured([this] {
      for (int i = 0; i < case_.rounds; ++i) round(false);
    });
    // Rounds whose content is checked, and which load every kernel before two devices wait for each other.
    meet();
    for (int i = 0; i < std::min(case_.rounds, 200); ++i) round(true);
    check(cudaStreamSynchronize(stream_), "checked rounds");
    std::vector<double> found;
    for (int replay = 0; replay < case_.replays; ++replay) {
      meet();
      check(cudaGraphLaunch(exec, stream_), "launch");
      check(cudaStreamSynchronize(stream_), "replay");
      collect(found);
    }
    time_pushes();
    int wrong = 0;
    check(cudaMemcpy(&wrong, wrong_, sizeof wrong, cudaMemcpyDeviceToHost), "copy");
    if (wrong != 0 || status_->code != PushCode::kFine) {
      fail(ErrorCode::kBridge, case_.transport, " on rank ", rank_, ": ", wrong, " wrong lanes, status ",
           static_cast<std::uint32_t>(status_->code), " at epoch ", status_->epoch);
    }
    return found;
  }

  [[nodiscard]] double push_us() const { return push_us_; }

 private:
  cudaGraphExec_t captured(const std::function<void()>& body) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    body();
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    return exec;
  }

  // As many pushes as an inbox takes, then as many receives: rank 0's stream alone, between two events.
  void time_pushes() {
    cudaEvent_t begin = nullptr, end = nullptr;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    cudaGraphExec_t const exec = captured([this] {
      for (int i = 0; i < kPushes; ++i) rank_ == 0 ? push(false) : receive(false);
    });
    std::vector<float> found;
    for (int i = 0; i < 2 * case_.replays; ++i) {
      meet();
      if (rank_ == 1) meet();
      check(cudaEventRecord(begin, stream_), "event");
      check(cudaGraphLaunch(exec, stream_), "launch");
      check(cudaEventRecord(end, stream_), "event");
      check(cudaStreamSynchronize(stream_), "pushes");
      if (rank_ == 0) meet();
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      found.push_back(ms * 1e3F / kPushes);
    }
    std::sort(found.begin(), found.end());
    push_us_ = found[found.size() / 2];
  }

  void connect(std::byte* mailbox) {
    const std::size_t bytes = kAcks + inbox_bytes({case_.lanes, case_.nodes});
    if (std::strcmp(case_.transport, "mailbox") == 0) {
      if (rank_ == 0) std::memset(mailbox, 0, 2 * bytes);
      void* mapped = nullptr;
      check(cudaHostRegister(mailbox, 1 << 20, cudaHostRegisterMapped | cudaHostRegisterPortable), "register");
      check(cudaHostGetDevicePointer(&mapped, mailbox, 0), "register");
      own_ = static_cast<std::byte*>(mapped) + static_cast<std::size_t>(rank_) * bytes;
      theirs_ = static_cast<std::byte*>(mapped) + static_cast<std::size_t>(1 - rank_) * bytes;
      meet();
      return;
    }
    own_ = device<std::byte>(std::size_t{2} << 20);  // an exported block takes what shares it along
    check(cudaDeviceSynchronize(), "memory");
    check(cudaIpcGetMemHandle(&shared_.handles[rank_], own_), "handle");
    meet();
    void* opened = nullptr;
    check(cudaIpcOpenMemHandle(&opened, shared_.handles[1 - rank_], cudaIpcMemLazyEnablePeerAccess), "open handle");
    theirs_ = static_cast<std::byte*>(opened);
    meet();
  }

  void round(bool checked) {
    if (rank_ == 0) push(checked);
    receive(checked);
    if (rank_ == 1) push(checked);
    if (!checked) stamp_kernel<<<1, 1, 0, stream_>>>(stamps_, in_.state);
  }
  void push(bool checked) {
    if (checked) draft_kernel<<<1, case_.lanes, 0, stream_>>>(results_, lanes_, case_.nodes, out_.state);
    const TreeSource source = {results_, kSlots, case_.nodes, 1 << 20, case_.nodes};
    launch_push(out_, source, lanes_, Verdict::kDraft, stream_);
  }
  void receive(bool checked) {
    launch_receive(in_, results_, kSlots, lanes_, stream_);
    if (checked) check_kernel<<<1, case_.lanes, 0, stream_>>>(results_, lanes_, case_.nodes, in_.state, wrong_);
  }
  // The differences between the stamps of this replay's rounds but the first ones, which wait for the other side.
  void collect(std::vector<double>& found) {
    std::uint64_t last = 0;
    std::vector<std::uint64_t> stamps(4096);
    check(cudaMemcpy(&last, &in_.state->epoch, sizeof last, cudaMemcpyDeviceToHost), "copy");
    check(cudaMemcpy(stamps.data(), stamps_, 4096 * sizeof last, cudaMemcpyDeviceToHost), "copy");
    const int first = std::min(10, case_.rounds / 2);
    for (std::uint64_t epoch = last - static_cast<std::uint64_t>(case_.rounds - first); epoch < last; ++epoch) {
      found.push_back(static_cast<double>(stamps[epoch % 4096] - stamps[(epoch - 1) % 4096]) / 2);
    }
  }
  void meet() {
    const int mine = ++shared_.arrived[rank_];
    for (int i = 0; shared_.arrived[1 - rank_] < mine; ++i) {
      if (i > 60'000) fail(ErrorCode::kBridge, "rank ", 1 - rank_, ": expected within 60 s, got no word");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  int rank_;
  Case case_;
  Shared& shared_;
  cudaStream_t stream_ = nullptr;
  std::byte* own_ = nullptr;
  std::byte* theirs_ = nullptr;
  LaneList lanes_;
  DraftResults results_;
  std::uint64_t* stamps_ = nullptr;
  int* wrong_ = nullptr;
  PushStatus* status_ = nullptr;
  PushChannel out_, in_;
  double push_us_ = 0;
};

int run(int rank, const Case& which, Shared& shared, std::byte* mailbox) {
  try {
    Side side(rank, which, shared, mailbox);
    std::vector<double> ns = side.run();
    if (rank != 0) return 0;
    std::sort(ns.begin(), ns.end());
    int devices = 0;
    check(cudaGetDeviceCount(&devices), "devices");
    const MessageShape shape = {which.lanes, which.nodes};
    std::printf(
        "{\"transport\": \"%s\", \"placement\": \"rank0\", \"ranks\": 2, \"gpus\": %d, \"bytes\": %zu, "
        "\"one_way_us\": %.2f, \"one_way_p99_us\": %.2f, \"push_us\": %.2f}\n",
        which.transport, std::min(devices, 2), shape.bytes(static_cast<std::uint32_t>(which.lanes)),
        ns[ns.size() / 2] / 1e3, ns[ns.size() * 99 / 100] / 1e3, side.push_us());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s on rank %d: %s\n", which.transport, rank, error.what());
    return 1;
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 500;
  const int replays = count > 2 ? std::atoi(arguments[2]) : 20;
  if (rounds < 2 || replays < 1) {
    std::fprintf(stderr, "expected from 2 rounds and 1 replay on, got %d and %d\n", rounds, replays);
    return 2;
  }
  // 16 + lanes * (16 + 8 nodes): 72, 464, 1168 and 4112 bytes.
  std::vector<Case> cases;
  for (const char* transport : {"p2p", "mailbox"}) {
    for (const auto& [lanes, nodes] : {std::pair{1, 5}, std::pair{8, 5}, std::pair{8, 16}, std::pair{64, 6}})
      cases.push_back({transport, lanes, nodes, rounds, replays});
  }
  // Before any use of CUDA, which does not survive a fork.
  std::vector<Segment> memory;
  for (std::size_t i = 0; i < cases.size(); ++i) memory.push_back(Segment::create(2 << 20, "bench-bridge"));
  return in_two_processes([&](int rank) {
    int code = 0;
    for (std::size_t i = 0; i < cases.size() && code == 0; ++i) {
      std::byte* const shared = memory[i].data();
      code = run(rank, cases[i], *reinterpret_cast<Shared*>(shared), shared + (1 << 20));
      std::fflush(stdout);
    }
    return code;
  });
}
