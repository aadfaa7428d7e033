// p2p and mailbox: where the inboxes and the acknowledgements lie. No kernels: those are in push.cu.
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
    return exported(own_.get());
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
    opened_.push_back(opened(offers[static_cast<std::size_t>(rank)], concat("rank ", rank)));
    return opened_.back().get();
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
