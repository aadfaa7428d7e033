// nccl: the message as one broadcast of a communicator of our own, over any ranks, in the library that torch has loaded.
// Every wait is ours: the communicator is non-blocking, its errors are asked for, and an abort ends kernels that hang.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <mutex>

#include "bridge/nccl_threads.h"

namespace eaglex::bridge {
namespace {

using Comm = NcclLibrary::Comm;

constexpr auto kPoll = std::chrono::microseconds(50);
constexpr int kBusyPolls = 1000;  // without a pause in between: an eager call takes some ten microseconds
// An abort waits for captured graphs that hold the communicator; beyond this it is left to them.
constexpr auto kAbort = std::chrono::seconds(2);
// NCCL is called by one thread at a time. One that has not come back after this sits in CUDA, which an abort ends.
constexpr auto kTurn = std::chrono::milliseconds(200);

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
  NcclBridge(Group& group, const BridgeSetup& setup)
      : DeviceBridge(group, setup),
        library_(NcclLibrary::open()),
        aborter_(library_, device()),
        look_(device(), channel().state) {}
  ~NcclBridge() override {
    stop_watching();
    // Not destroyed but aborted: that waits for no other rank.
    if (comm_ == nullptr) return;
    settle();
    abandon();
    aborter_.wait(kAbort);
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
    opened_ = true;
  }

  void before_receive(int lanes, Stream stream) override {
    launch_mark(channel(), Mark::kBegun, stream);
    broadcast(lanes, stream);
  }
  void after_push(int lanes, Stream stream) override {
    broadcast(lanes, stream);
    launch_mark(channel(), Mark::kDone, stream);
  }

  // Its kernels know no deadline, so this does. No call of CUDA here: see nccl_threads.h.
  void look() override {
    ask_for_errors();
    const DeviceLook::Found found = look_.found();
    const Progress now = progress(found.state);
    const bool waits = now.begun > now.done && now.begun == waited_for_;
    if (!waits) {
      waited_for_ = now.begun;
      waits_since_ = Clock::now();
    }
    if (Clock::now() - (waits ? waits_since_ : found.at) < std::chrono::duration<double>(seconds())) return;
    // A device that does not answer may sit in a collective of the target, behind yet another rank.
    const std::vector<Suspect> suspects = waits || sends() ? std::vector<Suspect>{} : group().suspects();
    if (!suspects.empty() && suspects.front().rank != 0) group().end(suspects.front().rank, suspects.front().why);
    end_late();
  }
  void abandon() override {
    const std::unique_lock turn(turn_, kTurn);
    if (const Comm comm = comm_.exchange(nullptr); comm != nullptr) aborter_.abort(comm);
  }

 private:
  // Messages that this side has begun to send or to wait for, and that have gone or come.
  struct Progress {
    std::uint64_t begun = 0, done = 0;
  };
  [[nodiscard]] Progress progress(const PushState& state) const {
    return sends() ? Progress{state.epoch, state.marked} : Progress{state.marked, state.epoch};
  }

  [[noreturn]] void end_late() {
    if (sends()) group().end(culprit(), concat("it took no message of rank 0 within ", seconds(), " s"));
    group().end(0, concat("no message to rank ", group().rank(), " within ", seconds(), " s"));
  }

  // Unless another thread is in NCCL, which then hears of them itself.
  void ask_for_errors() {
    const std::unique_lock turn(turn_, std::try_to_lock);
    const Comm comm = comm_;
    if (!turn || comm == nullptr) return;
    int error = kNcclSuccess;
    const int result = library_.comm_async_error(comm, &error);
    for (const int found : {result, error}) {
      if (found != kNcclSuccess && found != kNcclInProgress)
        group().end(culprit(), concat("nccl: ", library_.error_string(found)));
    }
  }

  // As many bytes on all ranks, although rank 0's graph is for up to `lanes` of them and the others know how many there
  // are: the next power of two, since the sizes that cycles are captured for divide at those.
  void broadcast(int lanes, Stream stream) {
    const MessageShape shape = channel().shape;
    const auto whole_lanes =
        std::min(std::bit_ceil(static_cast<unsigned>(lanes)), static_cast<unsigned>(shape.max_lanes));
    const std::size_t whole = packets_of(shape.bytes(whole_lanes)) * 8;
    std::byte* const message = channel().staging;
    int result = kNcclSuccess;
    {
      const std::unique_lock turn(turn_);
      const Comm comm = comm_;
      if (comm == nullptr) return;  // the next check() says why
      result = library_.broadcast(message, message, whole, kNcclBytes, 0, comm, stream);
    }
    finish(result, "broadcast");
  }

  // A non-blocking call goes on in a thread of NCCL's; until it has ended, nothing may follow it.
  void finish(int result, const char* what) {
    library_.check(result, what);
    const Time deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds()));
    for (int polls = 0; result == kNcclInProgress; ++polls) {
      result = still_to_do(what);
      library_.check(result, what);
      if (result != kNcclInProgress) return;
      if (Clock::now() > deadline) {
        abandon();
        if (opened_) end_late();
        fail(ErrorCode::kBridge, "nccl ", what, ": expected all ranks within ", seconds(), " s, got none of rank ",
             culprit());
      }
      if (polls > kBusyPolls) std::this_thread::sleep_for(kPoll);
    }
  }
  int still_to_do(const char* what) {
    const std::unique_lock turn(turn_);
    const Comm comm = comm_;
    if (comm == nullptr) {
      check();
      fail(ErrorCode::kBridge, "nccl ", what, ": expected it to end, got an abort");
    }
    int result = kNcclSuccess;
    library_.check(library_.comm_async_error(comm, &result), what);
    return result;
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
    const Time begun = Clock::now();
    while (Clock::now() < begun + kAbort) {
      const DeviceLook::Found found = look_.found();
      const Progress now = progress(found.state);
      if (found.at > begun && now.done >= now.begun) return;
      std::this_thread::sleep_for(kPoll);
    }
  }

  [[nodiscard]] int culprit() {
    if (!sends()) return 0;
    const std::vector<Suspect> suspects = group().suspects();
    return suspects.empty() ? 1 : suspects.front().rank;
  }

  NcclLibrary library_;
  std::timed_mutex turn_;
  std::atomic<Comm> comm_ = nullptr;
  Aborter aborter_;
  DeviceLook look_;
  bool opened_ = false;
  std::uint64_t waited_for_ = 0;
  Time waits_since_{};
};

}  // namespace

std::unique_ptr<Bridge> make_nccl_bridge(Group& group, const BridgeSetup& setup) {
  return std::make_unique<NcclBridge>(group, setup);
}

}  // namespace eaglex::bridge
