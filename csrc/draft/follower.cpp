#include "draft/follower.h"

#include <utility>

#include "core/error.h"

namespace eaglex {

DraftFollower::DraftFollower(std::unique_ptr<Backend> backend, const SpeculationConfig& speculation,
                             const EngineLimits& limits, int vocab_size, const FollowerTensors& tensors)
    : backend_(std::move(backend)), limits_(limits) {
  const Device device = backend_->device();
  limits.check();
  expect_range("num_draft_tokens", speculation.num_draft_tokens, 1, kMaxDraftTokens);
  expect_range("num_steps", speculation.num_steps, 0, kMaxSteps);
  tensors.check(speculation, limits, device);
  EngineContext context;
  context.config.vocab_size = vocab_size;
  context.speculation = speculation;
  context.limits = limits;
  context.results = tensors.results();
  backend_->bind(context);
}

VerifyBatch DraftFollower::admit(const VerifyTensors& batch) const {
  return batch.check(limits_, backend_->device());
}

}  // namespace eaglex
