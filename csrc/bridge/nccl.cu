// nccl: the message as one broadcast of a communicator of our own, over any ranks, in the library that torch has loaded.
// Every wait is ours: the communicator is non-blocking, its errors are asked for, and an abort ends kernels that hang.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <future>

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
  }

  void before_receive(std::size_t bytes, Stream stream) override {
    launch_mark(channel(), Mark::kBegun, stream);
    broadcast(bytes, stream);
  }
  void after_push(std::size_t bytes, Stream stream) override {
    broadcast(bytes, stream);
    launch_mark(channel(), Mark::kDone, stream);
  }

  // Its kernels know no deadline, so this does.
  void look() override {
    const volatile PushStatus& now = status();
    const std::uint64_t begun = now.begun;
    if (const Comm comm = comm_; comm != nullptr) {
      int error = kNcclSuccess;
      const int result = library_.comm_async_error(comm, &error);
      for (const int found : {result, error}) {
        if (found != kNcclSuccess && found != kNcclInProgress)
          group().end(culprit(), concat("nccl: ", library_.error_string(found)));
      }
    }
    if (begun <= now.done || begun != waited_for_) {
      waited_for_ = begun;
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
  void broadcast(std::size_t bytes, Stream stream) {
    const Comm comm = comm_;
    if (comm == nullptr) return;  // the next check() says why
    const std::size_t whole = packets_of(bytes) * 8;
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
    for (const std::size_t bytes : {shape.bytes(1), shape.max_bytes()}) broadcast(bytes, stream);
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
    const volatile PushStatus& now = status();
    const Time until = Clock::now() + kAbort;
    while (now.done < now.begun && Clock::now() < until) std::this_thread::sleep_for(kPoll);
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
  std::uint64_t waited_for_ = 0;
  Time waits_since_{};
};

}  // namespace

std::unique_ptr<Bridge> make_nccl_bridge(Group& group, const BridgeSetup& setup) {
  return std::make_unique<NcclBridge>(group, setup);
}

}  // namespace eaglex::bridge
