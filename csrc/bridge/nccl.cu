// nccl: the message as one broadcast of a communicator of our own, over any ranks, in the library that torch has loaded.
// Every wait is ours: the communicator is non-blocking, its errors are asked for, and an abort ends kernels that hang.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <future>
#include <new>

#include "bridge/device.h"
#include "bridge/nccl_library.h"

namespace eaglex::bridge {
namespace {

using Comm = NcclLibrary::Comm;

constexpr auto kPoll = std::chrono::microseconds(50);
constexpr int kBusyPolls = 1000;  // without a pause in between: an eager call takes some ten microseconds
// An abort waits for captured graphs that hold the communicator; beyond this it is left to them.
constexpr auto kAbort = std::chrono::seconds(2);

std::string to_text(int version, const NcclUniqueId& id) {
  std::string text = concat(version, ' ');
  for (const char byte : id.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

NcclUniqueId id_of(const std::string& offer) {
  NcclUniqueId id{};
  const std::size_t at = offer.find(' ') + 1;
  expect(offer.size() == at + 2 * sizeof id.bytes, ErrorCode::kBridge, "nccl id of rank 0", "256 digits", offer);
  for (std::size_t i = 0; i < sizeof id.bytes; ++i) {
    id.bytes[i] = static_cast<char>(std::strtol(offer.substr(at + 2 * i, 2).c_str(), nullptr, 16));
  }
  return id;
}

class NcclBridge final : public DeviceBridge {
 public:
  NcclBridge(Group& group, const BridgeSetup& setup) : DeviceBridge(group, setup), library_(NcclLibrary::open()) {}
  ~NcclBridge() override {
    stop_watching();
    const OnDevice here(device());
    // Not destroyed but aborted: that waits for no other rank.
    if (const Comm comm = comm_.exchange(nullptr); comm != nullptr) {
      settle();
      abort(comm, true);
    }
    look_stream_.reset();
    static_cast<void>(cudaFreeHost(seen_));
  }

  [[nodiscard]] std::string offer() override {
    NcclUniqueId id{};
    if (sends()) library_.check(library_.get_unique_id(&id), "unique id");
    return to_text(library_.version, id);
  }

 protected:
  void open(const std::vector<std::string>& offers) override {
    for (std::size_t rank = 0; rank < offers.size(); ++rank) {
      const int theirs = std::atoi(offers[rank].c_str());
      if (theirs != library_.version) {
        fail(ErrorCode::kBridge, "libnccl version: expected ", library_.version, " as on rank ", group().rank(),
             ", got ", theirs, " on rank ", rank);
      }
    }
    NcclConfig config;
    config.size = library_.version >= kGraphUsageNccl ? sizeof config : offsetof(NcclConfig, graph_usage_mode);
    config.version = static_cast<unsigned>(library_.version);
    config.blocking = 0;
    config.min_ctas = 1;
    config.max_ctas = 2;
    config.comm_name = "eaglex";
    config.graph_usage_mode = 1;  // one graph at a time, and no eager call while it runs: no events between them
    Comm comm = nullptr;
    const int result = library_.comm_init(&comm, group().terms().num_ranks, id_of(offers[0]), group().rank(), &config);
    comm_ = comm;
    finish(result, "communicator");
    warm_up();
    void* seen = nullptr;
    check_cuda(cudaHostAlloc(&seen, sizeof(PushState), cudaHostAllocPortable), "nccl: memory");
    seen_ = new (seen) PushState{};
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    look_stream_.reset(stream);
  }

  void before_receive(int lanes, Stream stream) override {
    launch_mark(channel(), Mark::kBegun, stream);
    broadcast(lanes, stream);
  }
  void after_push(int lanes, Stream stream) override {
    broadcast(lanes, stream);
    launch_mark(channel(), Mark::kDone, stream);
  }

  // Its kernels know no deadline, so this does.
  void look() override {
    if (const Comm comm = comm_; comm != nullptr) {
      int error = kNcclSuccess;
      const int result = library_.comm_async_error(comm, &error);
      for (const int found : {result, error}) {
        if (found != kNcclSuccess && found != kNcclInProgress)
          group().end(culprit(), concat("nccl: ", library_.error_string(found)));
      }
    }
    const Progress now = last_seen();
    if (now.begun <= now.done || now.begun != waited_for_) {
      waited_for_ = now.begun;
      waits_since_ = Clock::now();
      return;
    }
    if (Clock::now() - waits_since_ < std::chrono::duration<double>(seconds())) return;
    if (sends()) group().end(culprit(), concat("it took no message of rank 0 within ", seconds(), " s"));
    group().end(0, concat("no message to rank ", group().rank(), " within ", seconds(), " s"));
  }
  void abandon() override {
    if (const Comm comm = comm_.exchange(nullptr); comm != nullptr) abort(comm, false);
  }

 private:
  // Messages that this side has begun to send or to wait for, and that have gone or come.
  struct Progress {
    std::uint64_t begun = 0, done = 0;
  };
  [[nodiscard]] Progress progress(const PushState& state) const {
    return sends() ? Progress{state.epoch, state.marked} : Progress{state.marked, state.epoch};
  }
  // As the last look has asked for it, since the watching thread must not wait for a device that hangs.
  [[nodiscard]] Progress last_seen() {
    const OnDevice here(device());
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the host may be capturing
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    if (cudaStreamQuery(look_stream_.get()) == cudaSuccess) {
      seen_now_ = *seen_;
      static_cast<void>(
          cudaMemcpyAsync(seen_, channel().state, sizeof *seen_, cudaMemcpyDeviceToHost, look_stream_.get()));
    }
    static_cast<void>(cudaGetLastError());  // a real one surfaces at the next launch
    return progress(seen_now_);
  }

  // As many bytes on all ranks, although rank 0's graph is for up to `lanes` of them and the others know how many there
  // are: the next power of two, since the sizes that cycles are captured for divide at those.
  void broadcast(int lanes, Stream stream) {
    const Comm comm = comm_;
    if (comm == nullptr) return;  // the next check() says why
    const MessageShape shape = channel().shape;
    const auto whole_lanes =
        std::min(std::bit_ceil(static_cast<unsigned>(lanes)), static_cast<unsigned>(shape.max_lanes));
    const std::size_t whole = packets_of(shape.bytes(whole_lanes)) * 8;
    std::byte* const message = channel().staging;
    finish(library_.broadcast(message, message, whole, kNcclBytes, 0, comm, stream), "broadcast");
  }

  // A non-blocking call goes on in a thread of NCCL's; until it has ended, nothing may follow it.
  void finish(int result, const char* what) {
    library_.check(result, what);
    const Time deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds()));
    for (int polls = 0; result == kNcclInProgress; ++polls) {
      const Comm comm = comm_;
      if (comm == nullptr) fail(ErrorCode::kBridge, "nccl ", what, ": expected it to end, got an abort");
      library_.check(library_.comm_async_error(comm, &result), what);
      library_.check(result, what);
      if (result != kNcclInProgress) return;
      if (Clock::now() > deadline) {
        abandon();
        fail(ErrorCode::kBridge, "nccl ", what, ": expected all ranks within ", seconds(), " s, got none of rank ",
             culprit());
      }
      if (polls > kBusyPolls) std::this_thread::sleep_for(kPoll);
    }
  }

  // Connections are made by the first call of each size and protocol, which must not be a captured one.
  void warm_up() {
    const MessageShape shape = channel().shape;
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const OwnStream owner(stream);
    const Time deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds()));
    for (const int lanes : {1, shape.max_lanes}) broadcast(lanes, stream);
    cudaError_t state = cudaErrorNotReady;
    while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady) {
      if (Clock::now() > deadline) {
        abandon();
        fail(ErrorCode::kBridge, "nccl: expected a first broadcast within ", seconds(), " s, got none");
      }
      std::this_thread::sleep_for(kPoll);
    }
    check_cuda(state, "nccl: a first broadcast");
  }

  // What this side has begun may end in its own time, which is short where the group is well.
  void settle() {
    const Time until = Clock::now() + kAbort;
    for (Progress now = progress(state()); now.done < now.begun && Clock::now() < until; now = progress(state()))
      std::this_thread::sleep_for(kPoll);
  }

  void abort(Comm comm, bool wait) {
    std::promise<void> ended;
    std::future<void> end = ended.get_future();
    std::thread([call = library_.comm_abort, comm, device = device(), ended = std::move(ended)]() mutable {
      static_cast<void>(cudaSetDevice(device));
      static_cast<void>(call(comm));
      ended.set_value();
    }).detach();
    if (wait) static_cast<void>(end.wait_for(kAbort));
  }

  [[nodiscard]] int culprit() {
    if (!sends()) return 0;
    const std::vector<Suspect> suspects = group().suspects();
    return suspects.empty() ? 1 : suspects.front().rank;
  }

  NcclLibrary library_;
  std::atomic<Comm> comm_ = nullptr;
  OwnStream look_stream_;
  PushState* seen_ = nullptr;  // pinned
  PushState seen_now_{};
  std::uint64_t waited_for_ = 0;
  Time waits_since_{};
};

}  // namespace

std::unique_ptr<Bridge> make_nccl_bridge(Group& group, const BridgeSetup& setup) {
  return std::make_unique<NcclBridge>(group, setup);
}

}  // namespace eaglex::bridge
