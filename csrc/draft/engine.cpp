#include "draft/engine.h"

#include <utility>
#include <vector>

#include "core/error.h"

namespace eaglex {

void check_inputs(const DraftConfig& config, const SpeculationConfig& speculation, const EngineLimits& limits,
                  const DraftWeights& weights, const EngineTensors& tensors, Device device) {
  config.check();
  speculation.check(config);
  limits.check();
  if (device.kind == DeviceKind::kCuda) {  // what its launches have room for
    expect_range("head_dim", config.head_dim, 2, 256);
    expect_range("max_batch * topk", static_cast<long long>(limits.max_batch) * speculation.topk, 1, 65535);
  }
  weights.check(config, device);
  tensors.check_host(config, limits, device);
}

namespace {

Loop make_loop(Backend& backend, const DraftConfig& config, const SpeculationConfig& speculation,
               const EngineLimits& limits, const DraftWeights& weights, const EngineTensors& tensors) {
  check_inputs(config, speculation, limits, weights, tensors, backend.device());
  tensors.check_results(config, speculation, limits, backend.device());
  const auto pointers = [](const std::vector<TensorView>& layers) {
    std::vector<void*> data;
    for (const TensorView& layer : layers) data.push_back(layer.data);
    return data;
  };
  KvPool pool;
  pool.req_to_token = tensors.req_to_token.as<const std::int32_t>();
  pool.max_context = tensors.req_to_token.shape[1];
  pool.num_kv_slots = tensors.draft_k[0].shape[0];
  pool.dtype = tensors.draft_k[0].dtype;
  return {backend,
          config,
          speculation,
          limits,
          weights,
          pool,
          {pointers(tensors.draft_k), pointers(tensors.draft_v)},
          tensors.results()};
}

}  // namespace

DraftEngine::DraftEngine(std::unique_ptr<Backend> backend, const DraftConfig& config,
                         const SpeculationConfig& speculation, const EngineLimits& limits, const DraftWeights& weights,
                         const EngineTensors& tensors)
    : backend_(std::move(backend)), loop_(make_loop(*backend_, config, speculation, limits, weights, tensors)) {}

DraftBatch DraftEngine::admit(const BatchTensors& batch) const {
  const EngineContext& context = loop_.context();
  return batch.check(context.config, context.speculation, context.limits, backend_->device());
}

void DraftEngine::end_with(Tail tail) {
  expect(!begun_, ErrorCode::kConfig, "engine", "one that has not run, since its graphs are captured", "one that has");
  tail_ = std::move(tail);
}

void DraftEngine::cycle(int lanes, int rows) const {
  loop_.cycle(lanes, rows);
  if (tail_) tail_(backend_->cycle_end());
}

void DraftEngine::enqueue(const BatchTensors& batch, Stream stream) {
  const DraftBatch block = admit(batch);
  begun_ = true;
  backend_->begin(block, stream);
  cycle(block.batch, block.num_rows);
}

void DraftEngine::warm_up() {
  begun_ = true;
  backend_->warm_up([this](int lanes, int rows) { cycle(lanes, rows); });
}

void DraftEngine::run(const DraftBatch& block, Stream stream) {
  begun_ = true;
  backend_->begin(block, stream);
  // The backend rounds the batch up to one of its buckets and captures the cycle of that many lanes and rows.
  backend_->replay(block.batch, block.num_rows, [this](int lanes, int rows) { cycle(lanes, rows); });
}

VerifyBatch DraftEngine::admit(const VerifyTensors& batch) const {
  return batch.check(loop_.context().limits, backend_->device());
}

}  // namespace eaglex
