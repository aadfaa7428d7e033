// The checks at the door: what the host hands over, checked once against what the engine was made for.
#pragma once

#include <vector>

#include "core/batch.h"
#include "core/config.h"
#include "core/tensor.h"

namespace eaglex {

// The results that `tree` reads: what the bridge sends, and all that a follower has.
struct FollowerTensors {
  TensorView draft_tokens;  // [num_slots, N-1] int64
  TensorView parents;       // [num_slots, N-1] int32
  TensorView num_nodes;     // [num_slots] int32
  TensorView drafted_for;   // [num_slots] int64

  void check(const SpeculationConfig& speculation, const EngineLimits& limits, Device device) const;
  [[nodiscard]] DraftResults results() const noexcept;
};

// Bound once. Memory stays the host's; it must outlive the engine.
struct EngineTensors {
  TensorView req_to_token;          // [num_slots, max_context] int32
  std::vector<TensorView> draft_k;  // num_layers × [num_kv_slots, kv_heads, head_dim]
  std::vector<TensorView> draft_v;
  TensorView draft_tokens;  // [num_slots, N-1] int64
  TensorView parents;       // [num_slots, N-1] int32
  TensorView scores;        // [num_slots, N-1] float32
  TensorView num_nodes;     // [num_slots] int32
  TensorView drafted_for;   // [num_slots] int64
  TensorView draft_probs;   // [num_slots, K, Vd] float32, only with Sampling::kRejection
  TensorView counters;      // [kNumLaneStatus] int64

  // The host's own tensors, which can be checked before results are allocated; and the results.
  void check_host(const DraftConfig& config, const EngineLimits& limits, Device device) const;
  void check_results(const DraftConfig& config, const SpeculationConfig& speculation, const EngineLimits& limits,
                     Device device) const;
  [[nodiscard]] DraftResults results() const noexcept;
};

// One cycle's input as tensors; see DraftBatch for the meaning of each.
struct BatchTensors {
  TensorView aux_hidden_states;  // [rows, A·Ht], rows may be strided
  TensorView input_ids;          // [rows]
  TensorView row_start;          // [B+1] int32
  TensorView num_valid;          // [B] int32
  TensorView draft_from;         // [B] bool
  TensorView req_pool_indices;   // [B]
  TensorView seq_lens;           // [B]
  TensorView out_cache_loc;      // [rows] or empty
  TensorView temperatures;       // [B] float32 or empty
  TensorView uniforms;           // [B, K] float32 or empty

  [[nodiscard]] DraftBatch check(const DraftConfig& config, const SpeculationConfig& speculation,
                                 const EngineLimits& limits, Device device) const;
  // Where those that differ from cycle to cycle lie now, in a block that was checked with the same shapes and types, all
  // of them dense: a check reads a hundred lines of memory that a busy CPU no longer has in its caches.
  void readdress(DraftBatch& block) const noexcept;
};

// The verifier's side of the next cycle; see VerifyBatch.
struct VerifyTensors {
  MaskMode mask_mode = MaskMode::kQlenOnly;
  TensorView req_pool_indices;       // [B]
  TensorView seq_lens;               // [B]
  TensorView bonus_tokens;           // [B]
  TensorView draft_tokens;           // [B, N] int64
  TensorView positions;              // [B, N] int64
  TensorView retrieve_index;         // [B, N] int64
  TensorView retrieve_next_token;    // [B, N] int64
  TensorView retrieve_next_sibling;  // [B, N] int64
  TensorView mask;                   // by mask_mode; kFull is flat, and at least as long as its requests need

  [[nodiscard]] VerifyBatch check(const EngineLimits& limits, Device device) const;
  // As BatchTensors', of the ids.
  void readdress(VerifyBatch& block) const noexcept;
};

}  // namespace eaglex
