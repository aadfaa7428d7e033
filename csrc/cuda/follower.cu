// `tree` for a rank that does not draft: the kernel of the draft's own backend, without weights, workspace or graphs.
#include "cuda/backend.h"
#include "cuda/factory.h"

namespace eaglex::cuda {
namespace {

// Nothing but the context is bound: `tree` needs no more, and nothing else may be called.
class Follower final : public CudaBackend {
 public:
  using CudaBackend::CudaBackend;
  void bind(const EngineContext& context) override { context_ = context; }
};

}  // namespace
}  // namespace eaglex::cuda

namespace eaglex {

std::unique_ptr<Backend> make_cuda_follower(int device) {
  return std::make_unique<cuda::Follower>(device);
}

}  // namespace eaglex
