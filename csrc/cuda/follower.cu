// `tree` for a rank that does not draft: the kernel of the draft's own backend, without weights, workspace or graphs.
#include "cuda/backend.h"
#include "cuda/factory.h"
#include "cuda/kernels.h"

namespace eaglex::cuda {
namespace {

class Follower final : public CudaBackend {
 public:
  explicit Follower(int device) : CudaBackend(device), device_(device) {
    EAGLEX_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device));
  }
  void bind(const EngineContext& context) override { context_ = context; }
  void tree(const VerifyBatch& batch, Stream stream) override {
    const DeviceGuard guard(device_);
    launch_tree(context_, batch, num_sms_, static_cast<cudaStream_t>(stream));
  }

 private:
  int device_;
  int num_sms_ = 0;
  EngineContext context_;
};

}  // namespace
}  // namespace eaglex::cuda

namespace eaglex {

std::unique_ptr<Backend> make_cuda_follower(int device) {
  return std::make_unique<cuda::Follower>(device);
}

}  // namespace eaglex
