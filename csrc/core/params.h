// What each step's launch gets: pointers that stay valid across replays, shapes beside them. Sizes as in core/batch.h;
// R rows of the launch, L lanes (max_batch), G candidates of one cycle, S scratch nodes.
#pragma once

#include <cstdint>

#include "core/batch.h"
#include "core/config.h"
#include "core/tensor.h"
#include "core/weights.h"

namespace eaglex {

// A weight matrix as the backend wants it: the parts that are read together (q|k|v, gate|up), or what it made of them.
struct Linear {
  Matrix parts[3];
  int num_parts = 0;
  const void* prepared = nullptr;
};

// Which rows a launch works on, and which lane, position and source row each has (core/lane.h: locate).
enum class Pass : std::uint8_t {
  kExtendAll,   // every row of the batch
  kExtendLast,  // one row per lane: its last valid row, from which is drafted
  kStep,        // topk rows per lane: the frontier of one step
};

struct Rows {
  Pass pass = Pass::kExtendAll;
  int step = 0;  // kStep: 1..K-1
  int max_rows = 0;
};

// What the cycle keeps per lane; in the workspace, so in the backend's memory.
struct LaneState {
  std::int32_t* status = nullptr;            // [L] LaneStatus
  std::int64_t* new_len = nullptr;           // [L] seq_lens + num_valid
  std::int64_t* frontier_tokens = nullptr;   // [L, k] target vocabulary
  std::int32_t* frontier_nodes = nullptr;    // [L, k] grid index + 1; 0 is the root
  float* frontier_scores = nullptr;          // [L, k]
  std::int32_t* frontier_parents = nullptr;  // [L, k] row of the pass before, within the lane
  std::int32_t* ancestors[2] = {};  // [L, k, K] scratch nodes from depth 1 to the node itself; by parity of draft step
  std::int64_t* grid_tokens = nullptr;   // [L, G]
  std::int32_t* grid_parents = nullptr;  // [L, G] grid index + 1
  float* grid_scores = nullptr;          // [L, G]
  std::int32_t* grid_nodes = nullptr;    // [L, G] node of the re-ranked tree, 0 = not kept
  float* top_scores = nullptr;           // [L·k, k] log-probabilities of one step, by row and rank
  std::int32_t* top_ids = nullptr;       // [L·k, k] draft vocabulary
};

// What every launch needs to know; fixed when the engine is bound.
struct EngineContext {
  DraftConfig config;
  SpeculationConfig speculation;
  EngineLimits limits;
  KvPool kv;
  DraftResults results;
  LaneState lanes;
};

struct FuseParams {
  Rows rows;
  Linear fc;                              // [H, A·Ht]
  const TensorView* aux_norms = nullptr;  // by AuxNorm
  void* hidden = nullptr;                 // out [R, H]
};

// What is known of the tokens that can be drafted, whatever the request.
struct DraftedTokens {
  Linear qkv;                         // of the first layer
  TensorView embed_tokens;            // [V, H]
  TensorView input_layernorm;         // [H], or empty with EmbeddingNorm::kNone
  const std::int64_t* d2t = nullptr;  // [Vd] or null
};

enum class QkvParts : std::uint8_t { kAll, kQuery, kKeyValue };
enum class KvTarget : std::uint8_t { kPool, kScratch };

struct QkvParams {
  Rows rows;
  int layer = 0;
  QkvParts parts = QkvParts::kAll;
  KvTarget target = KvTarget::kPool;
  Linear qkv;                       // [heads·D | kv_heads·D | kv_heads·D, 2H or H]
  TensorView embed_tokens;          // [V, H], first layer
  TensorView input_layernorm;       // [H]
  TensorView hidden_norm;           // [H], first layer
  const float* inv_freq = nullptr;  // [rotary_dim / 2]
  const void* hidden = nullptr;     // [rows of the pass before, H]; gathered through locate().source where `gather`
  bool gather = false;
  void* q = nullptr;          // out [R, heads·D], after RoPE; not with kKeyValue
  void* residual = nullptr;   // out [R, H]: where hidden came from, by Residual; not with kKeyValue
  void* scratch_k = nullptr;  // [L, S, kv_heads, D] of this layer, with KvTarget::kScratch
  void* scratch_v = nullptr;  // [L, S, kv_heads, D]
};

struct AttentionParams {
  Rows rows;
  int layer = 0;
  const void* q = nullptr;          // [R, heads·D]
  const void* scratch_k = nullptr;  // [L, S, kv_heads, D]
  const void* scratch_v = nullptr;  // [L, S, kv_heads, D]
  void* out = nullptr;              // [R, heads·D]
};

// o_proj and down: out = residual + x Wᵀ.
struct ProjectionParams {
  Rows rows;
  Linear weight;                   // [H, heads·D] or [H, I]
  const void* x = nullptr;         // [R, heads·D] or [R, I]
  const void* residual = nullptr;  // [R, H]
  void* out = nullptr;             // [R, H]
};

struct GateUpParams {
  Rows rows;
  Linear gate_up;           // [I | I, H]
  TensorView norm;          // [H]
  const void* x = nullptr;  // [R, H]
  void* out = nullptr;      // [R, I] silu(gate) · up
};

struct HeadParams {
  Rows rows;
  Linear lm_head;          // [Vd, H]
  TensorView norm;         // [H]
  void* hidden = nullptr;  // [R, H]; with NextHidden::kNormed replaced by its norm
  int draft_step = 0;      // 0..K-1: which uniform and which row of draft_probs
  // [Vd, H] of the weights' plain type, or empty. Not empty (lm_head is INT4 then): the best of lm_head's scores are
  // replaced by these rows' (core/rescore.h).
  TensorView rescore_rows = {};
};

// Merges one step's top-k into the grid, chooses the next frontier; after the last step writes the results.
struct SelectParams {
  int draft_step = 0;
  const std::int64_t* d2t = nullptr;  // [Vd] or null
};

}  // namespace eaglex
