#include "draft/engine.h"

#include <vector>

namespace eaglex {
namespace {

// The pool's description points into these arrays, so the backend copies what it needs of them in bind().
struct PoolPointers {
  std::vector<void*> k, v;
};

PoolPointers pool_pointers(const EngineTensors& tensors) {
  PoolPointers pointers;
  for (const TensorView& tensor : tensors.draft_k) pointers.k.push_back(tensor.data);
  for (const TensorView& tensor : tensors.draft_v) pointers.v.push_back(tensor.data);
  return pointers;
}

KvPool pool_of(const EngineTensors& tensors, const PoolPointers& pointers) {
  return {tensors.req_to_token.as<const std::int32_t>(), tensors.req_to_token.shape[1], tensors.draft_k[0].shape[0],
          tensors.draft_k[0].dtype, pointers.k.data(), pointers.v.data()};
}

Loop make_loop(Backend& backend, const DraftConfig& config, const SpeculationConfig& speculation, const EngineLimits& limits,
               const DraftWeights& weights, const EngineTensors& tensors) {
  config.check();
  speculation.check(config);
  limits.check();
  weights.check(config, backend.device());
  tensors.check(config, speculation, limits, backend.device());
  const PoolPointers pointers = pool_pointers(tensors);
  return Loop(backend, config, speculation, limits, weights, pool_of(tensors, pointers), tensors.results());
}

}  // namespace

DraftEngine::DraftEngine(std::unique_ptr<Backend> backend, const DraftConfig& config, const SpeculationConfig& speculation,
                         const EngineLimits& limits, const DraftWeights& weights, const EngineTensors& tensors)
    : backend_(std::move(backend)), loop_(make_loop(*backend_, config, speculation, limits, weights, tensors)) {}

DraftBatch DraftEngine::admit(const BatchTensors& batch) const {
  const EngineContext& context = loop_.context();
  return batch.check(context.config, context.speculation, context.limits, backend_->device());
}

void DraftEngine::enqueue(const BatchTensors& batch, Stream stream) {
  const DraftBatch block = admit(batch);
  backend_->begin(block, stream);
  loop_.cycle(block.batch, block.num_rows);
}

void DraftEngine::run(const BatchTensors& batch, Stream stream) {
  const DraftBatch block = admit(batch);
  backend_->begin(block, stream);
  // The backend rounds the batch up to one of its buckets and captures the cycle of that many lanes and rows.
  backend_->replay(block.batch, block.num_rows, [this](int lanes, int rows) { loop_.cycle(lanes, rows); });
}

void DraftEngine::tree(const VerifyTensors& batch, Stream stream) {
  backend_->tree(batch.check(loop_.context().limits, backend_->device()), stream);
}

}  // namespace eaglex
