// p2p and mailbox: where the inboxes and the acknowledgements lie. No kernels: those are in push.cu.
#include <algorithm>
#include <cstring>

#include "bridge/device.h"
#include "bridge/packet.cuh"

namespace eaglex::bridge {
namespace {

// An exported allocation takes the whole block that the driver carves small ones from: so it gets one to itself.
constexpr std::size_t kExported = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;

std::size_t rounded(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

std::string to_hex(const cudaIpcMemHandle_t& handle) {
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

cudaIpcMemHandle_t from_hex(const std::string& text, int rank) {
  cudaIpcMemHandle_t handle;
  unsigned char bytes[sizeof handle];
  expect(text.size() == 2 * sizeof handle && text.find_first_not_of("0123456789abcdef") == std::string::npos,
         ErrorCode::kBridge, concat("p2p handle of rank ", rank).c_str(), "128 hexadecimal digits", text);
  for (std::size_t i = 0; i < sizeof handle; ++i) {
    bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  std::memcpy(&handle, bytes, sizeof handle);
  return handle;
}

struct CloseHandle {
  void operator()(void* opened) const { static_cast<void>(cudaIpcCloseMemHandle(opened)); }
};
using OpenedMemory = std::unique_ptr<void, CloseHandle>;

// Each receiver's inbox in its own memory, the acknowledgements in rank 0's.
class P2pBridge final : public DeviceBridge {
 public:
  P2pBridge(Group& group, const BridgeSetup& setup) : DeviceBridge(group, setup) {
    const OnDevice here(device());
    const std::size_t bytes = sends() ? kMaxRanks * sizeof(std::uint64_t) : inbox_bytes(group.terms().shape());
    own_ = device_memory(rounded(bytes, kExported));
  }
  ~P2pBridge() override {
    stop_watching();
    const OnDevice here(device());
    opened_.clear();
    own_.reset();
  }

  [[nodiscard]] std::string offer() override {
    const OnDevice here(device());
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, own_.get()), "p2p: exporting memory over CUDA IPC");
    return to_hex(handle);
  }

 protected:
  void open(const std::vector<std::string>& offers) override {
    if (!sends()) {
      channel().inbox = static_cast<const Packet*>(own_.get());
      channel().ack = static_cast<std::uint64_t*>(reach(offers, 0)) + (group().rank() - 1);
      return;
    }
    channel().acks = static_cast<const std::uint64_t*>(own_.get());
    for (int r = 0; r < channel().num_receivers; ++r) {
      channel().inboxes[r] = static_cast<Packet*>(reach(offers, r + 1));
    }
  }

 private:
  void* reach(const std::vector<std::string>& offers, int rank) {
    void* opened = nullptr;
    const cudaIpcMemHandle_t handle = from_hex(offers[static_cast<std::size_t>(rank)], rank);
    check_cuda(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess),
               concat("p2p: opening the memory of rank ", rank, " over CUDA IPC").c_str());
    opened_.emplace_back(opened);
    return opened;
  }

  DeviceMemory own_;
  std::vector<OpenedMemory> opened_;
};

// All of it in memory that the hosts share and every device maps: a page of acknowledgements, then the inboxes.
class MailboxBridge final : public DeviceBridge {
 public:
  MailboxBridge(Group& group, const BridgeSetup& setup) : DeviceBridge(group, setup) {
    if (sends()) segment_ = std::make_unique<Segment>(Segment::create(bytes(), "eaglex-mailbox"));
  }
  ~MailboxBridge() override {
    stop_watching();
    const OnDevice here(device());
    if (registered_) static_cast<void>(cudaHostUnregister(segment_->data()));
  }

  [[nodiscard]] std::string offer() override { return sends() ? segment_->address() : ""; }

 protected:
  void open(const std::vector<std::string>& offers) override {
    if (!sends()) segment_ = std::make_unique<Segment>(Segment::open(offers[0]));
    expect(segment_->size() == bytes(), ErrorCode::kBridge, "mailbox bytes", bytes(), segment_->size());
    check_cuda(cudaHostRegister(segment_->data(), bytes(), cudaHostRegisterPortable | cudaHostRegisterMapped),
               "mailbox: pinning shared memory");
    registered_ = true;
    void* mapped = nullptr;
    check_cuda(cudaHostGetDevicePointer(&mapped, segment_->data(), 0), "mailbox: mapping shared memory");
    auto* const acks = static_cast<std::uint64_t*>(mapped);
    const auto inbox = [&](int receiver) {
      return reinterpret_cast<Packet*>(static_cast<std::byte*>(mapped) + kPage +
                                       static_cast<std::size_t>(receiver) * stride());
    };
    if (!sends()) {
      channel().inbox = inbox(group().rank() - 1);
      channel().ack = acks + (group().rank() - 1);
      return;
    }
    channel().acks = acks;
    for (int r = 0; r < channel().num_receivers; ++r) channel().inboxes[r] = inbox(r);
  }

 private:
  [[nodiscard]] std::size_t stride() { return rounded(inbox_bytes(group().terms().shape()), kPage); }
  [[nodiscard]] std::size_t bytes() { return kPage + static_cast<std::size_t>(group().terms().num_ranks) * stride(); }

  std::unique_ptr<Segment> segment_;
  bool registered_ = false;
};

}  // namespace

std::unique_ptr<Bridge> make_inbox_bridge(Group& group, const BridgeSetup& setup) {
  if (setup.transport == Transport::kP2p) return std::make_unique<P2pBridge>(group, setup);
  return std::make_unique<MailboxBridge>(group, setup);
}

}  // namespace eaglex::bridge
