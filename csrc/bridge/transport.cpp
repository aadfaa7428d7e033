#include "bridge/transport.h"

#include "bridge/relay_ends.h"

#ifdef EAGLEX_WITH_CUDA
#include "bridge/device.h"
#include "bridge/relay.h"
#endif

namespace eaglex::bridge {
namespace {

constexpr const char* kNames[] = {"shm", "p2p", "mailbox", "nccl"};

}  // namespace

const char* name_of(Transport transport) noexcept {
  return kNames[static_cast<std::size_t>(transport)];
}

Transport transport_of(const std::string& name) {
  for (std::uint8_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<Transport>(i);
  }
  fail(ErrorCode::kConfig, "transport: expected shm, p2p, mailbox or nccl, got ", name);
}

std::unique_ptr<Bridge> make_bridge(Group& group, const BridgeSetup& setup) {
  if (setup.transport == Transport::kShm) return make_shm_bridge(group, setup.deadline);
#ifdef EAGLEX_WITH_CUDA
  if (setup.transport == Transport::kNccl) return make_nccl_bridge(group, setup);
  return make_inbox_bridge(group, setup);
#else
  fail(ErrorCode::kDevice, "transport: expected shm, since this build of eaglex has no CUDA, got ",
       name_of(setup.transport));
#endif
}

#ifdef EAGLEX_WITH_CUDA
std::unique_ptr<RelayClient> make_relay_client(Group& group, LinkTiming timing, const RelayHost& host) {
  return std::make_unique<DeviceRelayClient>(group, timing, host);
}
std::unique_ptr<RelayServer> make_relay_server(Group& group, const RelayHost& own, const std::string& offer) {
  return std::make_unique<DeviceRelayServer>(group, own, offer);
}
#else
std::unique_ptr<RelayClient> make_relay_client(Group&, LinkTiming, const RelayHost&) {
  fail(ErrorCode::kDevice, "a drafter on a GPU: expected a build with CUDA, got one without");
}
std::unique_ptr<RelayServer> make_relay_server(Group&, const RelayHost&, const std::string&) {
  fail(ErrorCode::kDevice, "a drafter on a GPU: expected a build with CUDA, got one without");
}
#endif

}  // namespace eaglex::bridge
