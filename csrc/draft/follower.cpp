#include "draft/follower.h"

#include <utility>

#include "core/error.h"

namespace eaglex {

void FollowerTensors::check(const SpeculationConfig& speculation, const EngineLimits& limits, Device device) const {
  const std::int64_t slots = limits.num_slots;
  const std::int64_t nodes = speculation.num_draft_tokens - 1;
  num_nodes.expect("num_nodes", device, {DType::kI32}, {slots});
  drafted_for.expect("drafted_for", device, {DType::kI64}, {slots});
  if (nodes == 0) return;
  draft_tokens.expect("draft_tokens", device, {DType::kI64}, {slots, nodes});
  parents.expect("parents", device, {DType::kI32}, {slots, nodes});
}

DraftResults FollowerTensors::results() const noexcept {
  DraftResults made;
  made.draft_tokens = draft_tokens.as<std::int64_t>();
  made.parents = parents.as<std::int32_t>();
  made.num_nodes = num_nodes.as<std::int32_t>();
  made.drafted_for = drafted_for.as<std::int64_t>();
  return made;
}

DraftFollower::DraftFollower(std::unique_ptr<Backend> backend, const SpeculationConfig& speculation,
                             const EngineLimits& limits, int vocab_size, const FollowerTensors& tensors)
    : backend_(std::move(backend)), limits_(limits) {
  const Device device = backend_->device();
  expect(device.kind == DeviceKind::kCpu, ErrorCode::kDevice, "follower", "results in host memory", name_of(device));
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

void DraftFollower::tree(const VerifyTensors& batch, Stream stream) {
  backend_->tree(batch.check(limits_, backend_->device()), stream);
}

}  // namespace eaglex
