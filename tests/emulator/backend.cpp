// The emulated module's one backend. It takes the CPU backend's place, so that bindings and eaglex/engine.py drive it
// unchanged: the emulated device's memory is the CPU's, and so is the device that it asks of its tensors.
#include "cuda/backend.h"

#include "cpu/factory.h"
#include "cuda/factory.h"

namespace eaglex {
namespace {

class EmulatedBackend final : public cuda::CudaBackend {
 public:
  EmulatedBackend() : CudaBackend(0) {}
  [[nodiscard]] const char* name() const noexcept override { return "emulated cuda"; }
  [[nodiscard]] Device device() const noexcept override { return {DeviceKind::kCpu, 0}; }
  void bind(const EngineContext& context) override {
    if (context.kv.k != nullptr) return CudaBackend::bind(context);
    follower_ = make_cuda_follower(0);  // a rank that does not draft: `tree` alone
    follower_->bind(context);
  }
  void tree(const VerifyBatch& batch, Stream stream) override {
    follower_ ? follower_->tree(batch, stream) : CudaBackend::tree(batch, stream);
  }

 private:
  std::unique_ptr<Backend> follower_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend() {
  return std::make_unique<EmulatedBackend>();
}

}  // namespace eaglex
