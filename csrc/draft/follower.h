// DraftFollower: a rank that does not draft. Results by slot, filled by the bridge, and the `tree` step; no weights.
#pragma once

#include <memory>

#include "core/backend.h"
#include "draft/door.h"

namespace eaglex {

struct FollowerTensors {
  TensorView draft_tokens;  // [num_slots, N-1] int64
  TensorView parents;       // [num_slots, N-1] int32
  TensorView num_nodes;     // [num_slots] int32
  TensorView drafted_for;   // [num_slots] int64

  void check(const SpeculationConfig& speculation, const EngineLimits& limits, Device device) const;
  [[nodiscard]] DraftResults results() const noexcept;
};

class DraftFollower {
 public:
  // The tensors outlive the follower. Throws Error; ErrorCode::kDevice for a backend that binds no context without
  // weights.
  DraftFollower(std::unique_ptr<Backend> backend, const SpeculationConfig& speculation, const EngineLimits& limits,
                int vocab_size, const FollowerTensors& tensors);

  // The drafts of these slots as the verifier's tensors, as DraftEngine::tree.
  void tree(const VerifyTensors& batch, Stream stream);

 private:
  std::unique_ptr<Backend> backend_;
  EngineLimits limits_;
};

}  // namespace eaglex
