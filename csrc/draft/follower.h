// DraftFollower: a rank that does not draft. Results by slot, filled by the bridge, and the `tree` step; no weights.
#pragma once

#include <cstdint>
#include <memory>

#include "core/backend.h"
#include "draft/door.h"

namespace eaglex {

class DraftFollower {
 public:
  // The tensors outlive the follower, and lie where the backend is, which must bind a context without weights: the CPU's
  // does, and make_cuda_follower's. Throws Error.
  DraftFollower(std::unique_ptr<Backend> backend, const SpeculationConfig& speculation, const EngineLimits& limits,
                int vocab_size, const FollowerTensors& tensors);

  // The drafts of these slots as the verifier's tensors, as DraftEngine::tree.
  void tree(const VerifyTensors& batch, Stream stream) { tree(admit(batch), stream); }
  // Its halves, as the engine has them.
  [[nodiscard]] VerifyBatch admit(const VerifyTensors& batch) const;
  void tree(const VerifyBatch& block, Stream stream) { backend_->tree(block, stream); }

  // After `tree`, on its stream: see Backend::mark.
  std::uint64_t mark(Stream stream) { return backend_->mark(stream); }
  [[nodiscard]] std::uint64_t reached() { return backend_->reached(); }

 private:
  std::unique_ptr<Backend> backend_;
  EngineLimits limits_;
};

}  // namespace eaglex
