// How messages travel, and the one place that makes the ends of each way.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bridge/bridge.h"

namespace eaglex::bridge {

enum class Transport : std::uint8_t {
  kShm,      // results in host memory, hosts read and write
  kP2p,      // results on GPUs; rank 0's GPU writes into the others' memory (CUDA IPC)
  kMailbox,  // results on GPUs, which meet in pinned host memory
  kNccl,     // results on GPUs; a broadcast of a communicator of our own
};

[[nodiscard]] const char* name_of(Transport transport) noexcept;
// Throws ErrorCode::kConfig for an unknown name.
[[nodiscard]] Transport transport_of(const std::string& name);

struct BridgeSetup {
  Transport transport = Transport::kShm;
  int device = 0;              // CUDA device of the results, with all but kShm
  Clock::duration deadline{};  // of every wait for another rank
};

// Throws ErrorCode::kDevice where this build, or this machine, has no such transport.
[[nodiscard]] std::unique_ptr<Bridge> make_bridge(Group& group, const BridgeSetup& setup);

}  // namespace eaglex::bridge
