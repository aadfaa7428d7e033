// The cycle, written once for all devices: which step runs on which rows, reading and writing which buffer.
#pragma once

#include <vector>

#include "core/backend.h"
#include "core/workspace.h"

namespace eaglex {

class Loop {
 public:
  // The pool's arrays, one pointer per layer.
  struct PoolArrays {
    std::vector<void*> k, v;
  };

  // Prepares the weights and carves all buffers from the backend's memory; nothing is allocated afterwards.
  Loop(Backend& backend, const DraftConfig& config, const SpeculationConfig& speculation, const EngineLimits& limits,
       const DraftWeights& weights, const KvPool& kv, PoolArrays arrays, const DraftResults& results);

  // admit, extend, select, then K - 1 times: all layers over the frontier, head, select. `rows` bounds the extend rows.
  void cycle(int lanes, int rows) const;

  // What follows from a drafted token alone: once planned, and again where the embeddings have changed.
  void know_tokens() const;

  [[nodiscard]] const EngineContext& context() const noexcept { return context_; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept { return workspace_bytes_; }

 private:
  struct Layer {
    LayerWeights weights;
    Linear qkv, o_proj, gate_up, down;
    void* scratch_k = nullptr;  // [L, S, kv_heads, D]
    void* scratch_v = nullptr;
  };
  // Activations of one pass, [R, …]; R covers every pass that runs whole layers.
  struct Buffers {
    void* rows = nullptr;       // [max_rows, H] fused hidden states of all extend rows
    void* hidden[2] = {};       // [L·k, H] by parity of the step; step 0 is the extend's last rows
    void* q = nullptr;          // [R, heads·D]
    void* residual = nullptr;   // [R, H]
    void* attention = nullptr;  // [R, heads·D]
    void* middle = nullptr;     // [R, H] after o_proj
    void* gated = nullptr;      // [R, I]
  };

  void carve(Workspace& workspace);
  void extend(int lanes, int rows) const;
  void step(int step, int lanes) const;
  // One whole layer: `in` (gathered where `gather`) → `out`, both [R, H].
  void layer(int index, const Rows& rows, QkvParts parts, const void* in, bool gather, void* out) const;
  [[nodiscard]] QkvParams qkv_params(int index, const Rows& rows, QkvParts parts, const void* in, bool gather) const;
  void finish_step(int draft_step, const Rows& rows, void* hidden) const;

  Backend& backend_;
  PoolArrays arrays_;
  EngineContext context_;
  DraftWeights weights_;
  std::vector<Layer> layers_;
  Linear fc_;
  Linear lm_head_;
  Buffers buffers_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace eaglex
