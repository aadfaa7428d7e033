// What p2p, mailbox and nccl share; see device.h. No kernels: those are in push.cu.
#include "bridge/device.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace eaglex::bridge {
namespace {

template <typename T>
T read_now(const T& from) {
  return *static_cast<const volatile T*>(&from);
}

// As the shared-memory transport words it (protocol.cpp).
std::string words_of(const PushStatus& status) {
  const auto lane = [&](const char* field) { return concat(field, " of lane ", status.who); };
  std::string field;
  switch (status.field) {
    case SplitField::kEpoch:
      field = "epoch";
      break;
    case SplitField::kNumLanes:
      field = "num_lanes";
      break;
    case SplitField::kVerdict:
      return concat("verdict: expected 0 or 1, got ", status.got);
    case SplitField::kSlot:
      field = lane("slot");
      break;
    case SplitField::kLength:
      field = lane("length");
      break;
    case SplitField::kNumNodes:
      return concat(lane("num_nodes"), ": expected in 0..", status.expected, ", got ", status.got);
  }
  return concat(field, ": expected ", status.expected, ", got ", status.got);
}

std::uint64_t ns_of(Clock::duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
}

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it must not surface again in somebody else's check
  fail(ErrorCode::kDevice, what, ": ", cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}

DeviceMemory device_memory(std::size_t bytes) {
  void* block = nullptr;
  check_cuda(cudaMalloc(&block, bytes), "device memory of the bridge");
  DeviceMemory memory(block);
  check_cuda(cudaMemset(block, 0, bytes), "device memory of the bridge");
  check_cuda(cudaDeviceSynchronize(), "device memory of the bridge");
  return memory;
}

std::string exported(void* memory) {
  cudaIpcMemHandle_t handle;
  check_cuda(cudaIpcGetMemHandle(&handle, memory), "p2p: exporting memory over CUDA IPC");
  constexpr const char* kDigits = "0123456789abcdef";
  unsigned char bytes[sizeof handle];
  std::memcpy(bytes, &handle, sizeof handle);
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

OpenedMemory opened(const std::string& text, const std::string& whose) {
  cudaIpcMemHandle_t handle;
  unsigned char bytes[sizeof handle];
  expect(text.size() == 2 * sizeof handle && text.find_first_not_of("0123456789abcdef") == std::string::npos,
         ErrorCode::kBridge, concat("p2p handle of ", whose).c_str(), "128 hexadecimal digits", text);
  for (std::size_t i = 0; i < sizeof handle; ++i) {
    bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  std::memcpy(&handle, bytes, sizeof handle);
  void* memory = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
             concat("p2p: opening the memory of ", whose, " over CUDA IPC").c_str());
  return OpenedMemory(memory);
}

bool may_overlap(int device) {
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  const char* const set = std::getenv("EAGLEX_PDL");
  return major >= 9 && (set == nullptr || std::string(set) != "0");
}

DeviceBridge::DeviceBridge(Group& group, const BridgeSetup& setup)
    : group_(group), setup_(setup), deadline_(setup.deadline) {
  const OnDevice here(setup.device);
  const MessageShape shape = group.terms().shape();
  state_ = device_memory(sizeof(PushState));
  staging_ = device_memory(packets_of(shape.max_bytes()) * 8);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  stream_.reset(stream);
  void* status = nullptr;
  check_cuda(cudaHostAlloc(&status, sizeof(PushStatus), cudaHostAllocPortable | cudaHostAllocMapped), "status");
  status_ = new (status) PushStatus;
  channel_.shape = shape;
  channel_.state = static_cast<PushState*>(state_.get());
  channel_.staging = static_cast<std::byte*>(staging_.get());
  channel_.status = status_;
  channel_.overlaps = may_overlap(setup.device);
  channel_.num_receivers = group.terms().num_ranks - 1;
  set_deadline(setup.deadline);
}

DeviceBridge::~DeviceBridge() {
  watcher_.stop();
  static_cast<volatile PushStatus*>(status_)->stop = 1;  // a kernel that still waits leaves
  const OnDevice here(setup_.device);
  state_.reset();  // waits for the device
  staging_.reset();
  stream_.reset();
  static_cast<void>(cudaFreeHost(status_));
}

void DeviceBridge::connect(const std::vector<std::string>& offers) {
  const int ranks = group_.terms().num_ranks;
  expect(static_cast<int>(offers.size()) == ranks, ErrorCode::kBridge, "offers", concat(ranks, " of them"),
         offers.size());
  const OnDevice here(setup_.device);
  open(offers);
  connected_ = true;
  watcher_.start([this] { return watch(); });
}

void DeviceBridge::admit(const LaneList& lanes, const char* what) {
  expect(connected_, ErrorCode::kBridge, what, "a bridge that is connected", "one that is not");
  check();
  expect_range(concat(what, " lanes").c_str(), lanes.count, 1, group_.terms().max_lanes);
}

void DeviceBridge::push(const LaneList& lanes, const DraftResults& results, Verdict verdict, Stream stream) {
  expect(sends(), ErrorCode::kBridge, "push", "rank 0", group_.rank());
  admit(lanes, "push");
  const OnDevice here(setup_.device);
  const Terms& terms = group_.terms();
  const TreeSource source = {results, terms.num_slots, channel_.shape.num_drafted, terms.vocab_size, terms.num_steps};
  launch_push(channel_, source, lanes, verdict, stream);
  after_push(lanes.count, stream);
}

std::optional<Verdict> DeviceBridge::receive(const LaneList& lanes, const DraftResults& results, Stream stream) {
  expect(!sends(), ErrorCode::kBridge, "receive", "a rank above 0", group_.rank());
  admit(lanes, "receive");
  const OnDevice here(setup_.device);
  before_receive(lanes.count, stream);
  launch_receive(channel_, results, group_.terms().num_slots, lanes, stream);
  return std::nullopt;
}

void DeviceBridge::set_deadline(Clock::duration deadline) {
  deadline_ = deadline;
  channel_.deadline_ns = ns_of(deadline);
}

void DeviceBridge::check() {
  group_.check();
  const PushCode code = read_now(status_->code);
  if (code != PushCode::kFine) end_by(code);
}

void DeviceBridge::end_by(PushCode code) {
  std::atomic_thread_fence(std::memory_order_acquire);
  const int rank = group_.rank();
  switch (code) {
    case PushCode::kLate:
      if (!sends()) group_.end(0, concat("no message to rank ", rank, " within ", seconds(), " s"));
      group_.end(static_cast<int>(status_->who) + 1, concat("it took no message of rank 0 within ", seconds(), " s"));
    case PushCode::kSplit:
      group_.end(rank, concat("it has split from rank 0: ", words_of(*status_)));
    default:
      group_.end(rank, "its bridge was stopped");
  }
}

PushState DeviceBridge::state() const {
  const OnDevice here(setup_.device);
  PushState found{};
  check_cuda(cudaMemcpyAsync(&found, state_.get(), sizeof found, cudaMemcpyDeviceToHost, stream_.get()), "counters");
  check_cuda(cudaStreamSynchronize(stream_.get()), "counters");
  return found;
}

Counters DeviceBridge::counters() const {
  const PushState now = state();
  Counters found;
  (group_.rank() == 0 ? found.pushed : found.received) = static_cast<std::int64_t>(now.epoch);
  found.drafts = static_cast<std::int64_t>(now.drafts);
  return found;
}

void DeviceBridge::look_around() {
  check();
  const int ranks = group_.terms().num_ranks;
  for (int rank = sends() ? 1 : 0; rank < (sends() ? ranks : 1); ++rank) {
    if (group_.gone(rank)) group_.end(rank, "its process has ended");
  }
  look();
}

bool DeviceBridge::watch() {
  try {
    look_around();
    return true;
  } catch (const Error&) {  // the group has ended; its words are in the group's memory
    static_cast<volatile PushStatus*>(status_)->stop = 1;
    abandon();
    return false;
  }
}

}  // namespace eaglex::bridge
