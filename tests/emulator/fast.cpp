// The emulator has no bulk copies and no dependent launches: every draft takes the plain chain.
#include "cuda/fast.h"

#include "cuda/stream/steps.h"

namespace eaglex::stream {

DeviceLimits current_device() {
  return {};
}

bool attends(const DeviceLimits&, int) {
  return false;
}

}  // namespace eaglex::stream

namespace eaglex::cuda {

std::unique_ptr<FastChain> FastChain::make(const Setup&) {
  return nullptr;
}

std::string FastChain::refusal(const Setup&) {
  return "an emulated device";
}

bool FastChain::reads(const DraftBatch&) noexcept {
  return false;
}

}  // namespace eaglex::cuda
