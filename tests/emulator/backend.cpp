// The emulated module's one backend. It takes the CPU backend's place, so that bindings and eaglex/engine.py drive it
// unchanged: the emulated device's memory is the CPU's, and so is the device that it asks of its tensors.
#include "cuda/backend.h"

#include "cpu/factory.h"

namespace eaglex {
namespace {

class EmulatedBackend final : public cuda::CudaBackend {
 public:
  EmulatedBackend() : CudaBackend(0) {}
  [[nodiscard]] const char* name() const noexcept override { return "emulated cuda"; }
  [[nodiscard]] Device device() const noexcept override { return {DeviceKind::kCpu, 0}; }
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend() {
  return std::make_unique<EmulatedBackend>();
}

}  // namespace eaglex
