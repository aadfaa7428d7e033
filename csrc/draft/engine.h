// DraftEngine: the public C++ class. Owns the backend, its workspace and the loop; borrows weights, KV pool and result
// buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "core/backend.h"
#include "draft/door.h"
#include "draft/loop.h"

namespace eaglex {

// All that can be wrong before memory is taken for results and workspace; throws Error.
void check_inputs(const DraftConfig& config, const SpeculationConfig& speculation, const EngineLimits& limits,
                  const DraftWeights& weights, const EngineTensors& tensors, Device device);

// For one thread at a time: a cycle uses the engine's workspace.
class DraftEngine {
 public:
  // Checks everything before the first byte of device memory is taken; throws Error. All tensors must outlive the
  // engine.
  DraftEngine(std::unique_ptr<Backend> backend, const DraftConfig& config, const SpeculationConfig& speculation,
              const EngineLimits& limits, const DraftWeights& weights, const EngineTensors& tensors);

  // To be called where the host has written other embeddings into embed_tokens, before the next cycle. Waits for the
  // device, whose streams may still be writing them.
  void embeddings_changed() { loop_.know_tokens(); }

  // To be called once at start, before the first cycle: whatever a backend prepares for its first run (graphs of all
  // batch sizes) is made here instead.
  void warm_up();
  // What every cycle ends with from now on, in its graph: `tail` enqueues it. To be called before the graphs are captured,
  // so before warm_up and the first run; throws ErrorCode::kConfig afterwards.
  using Tail = std::function<void(const CycleEnd&)>;
  void end_with(Tail tail);
  // One cycle as raw launches on `stream`; a host may capture them. Results appear by request slot.
  void enqueue(const BatchTensors& batch, Stream stream);
  // One cycle as one launch: the backend replays its graph of this batch size.
  void run(const BatchTensors& batch, Stream stream) { run(admit(batch), stream); }
  // The drafts of these slots as the verifier's tensors.
  void tree(const VerifyTensors& batch, Stream stream) { tree(admit(batch), stream); }

  // The two halves of `run` and of `tree`: the checks, and what follows them, which takes what was checked, or that at
  // other addresses.
  [[nodiscard]] DraftBatch admit(const BatchTensors& batch) const;
  [[nodiscard]] VerifyBatch admit(const VerifyTensors& batch) const;
  void run(const DraftBatch& block, Stream stream);
  void tree(const VerifyBatch& block, Stream stream) { backend_->tree(block, stream); }

  // After each of the calls above, on its stream: see Backend::mark.
  std::uint64_t mark(Stream stream) { return backend_->mark(stream); }
  [[nodiscard]] std::uint64_t reached() { return backend_->reached(); }

  // Whether this weight matrix is still read where it lies; else its owner may free it.
  [[nodiscard]] bool reads_original(const void* matrix) const { return backend_->reads_original(matrix); }
  [[nodiscard]] const char* backend_name() const noexcept { return backend_->name(); }
  // Device memory beside weights, KV pool and results: activations and whatever the backend planned for itself.
  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    return loop_.workspace_bytes() + backend_->own_workspace_bytes();
  }
  // Weights in the backend's own order.
  [[nodiscard]] std::size_t prepared_bytes() const noexcept { return backend_->own_weight_bytes(); }

 private:
  void cycle(int lanes, int rows) const;

  std::unique_ptr<Backend> backend_;
  Loop loop_;
  Tail tail_;
  bool begun_ = false;
};

}  // namespace eaglex
