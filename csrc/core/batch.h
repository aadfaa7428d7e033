// The contract (docs/design.md): what the host hands over, what it gets back. All pointers are readable by the
// backend's kernels. B requests, K num_steps, k topk, N num_draft_tokens, Vd draft vocabulary, A auxiliary layers, Ht
// target hidden.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace eaglex {

// Ids as the host has them, int32 or int64: exactly one pointer is set.
struct IdView {
  const std::int32_t* i32 = nullptr;
  const std::int64_t* i64 = nullptr;

  [[nodiscard]] constexpr explicit operator bool() const { return i32 != nullptr || i64 != nullptr; }
  [[nodiscard]] constexpr std::int64_t operator[](std::int64_t i) const { return i64 != nullptr ? i64[i] : i32[i]; }
};

// The parameter block of one cycle: all that changes from one launch to the next.
struct DraftBatch {
  std::int32_t batch = 0;                   // B, padded lanes included
  std::int32_t num_rows = 0;                // rows of aux_hidden_states
  const void* aux_hidden_states = nullptr;  // [num_rows, A·Ht], target layers in the order of the draft's ids
  DType aux_type = DType::kF32;
  std::int64_t aux_stride = 0;               // elements from row to row
  IdView input_ids;                          // [num_rows], for each row the token after it
  const std::int32_t* row_start = nullptr;   // [B+1]
  const std::int32_t* num_valid = nullptr;   // [B], rows that count: the accept length, all of a prompt chunk
  const std::uint8_t* draft_from = nullptr;  // [B] bool; false for a prompt chunk that is not the last
  IdView req_pool_indices;                   // [B], request slot; 0 for padded lanes
  IdView seq_lens;                           // [B], length before these rows
  // [num_rows] or absent: the KV slot that each row's K and V go to; absent, that of its position in req_to_token. A
  // host that may give a finished request's slot away while its last draft still runs must say it here: a row read late
  // could send the write into a prefix that others share.
  IdView out_cache_loc;
  const float* temperatures = nullptr;  // [B], only with Sampling::kRejection
  const float* uniforms = nullptr;      // [B, K] in [0, 1), only with Sampling::kRejection
};

// The draft's prefix K and V in the host's slots. Written by the engine alone.
struct KvPool {
  const std::int32_t* req_to_token = nullptr;  // [num_slots, max_context]: position → KV slot, < 0 none
  std::int64_t max_context = 0;
  std::int64_t num_kv_slots = 0;
  DType dtype = DType::kF32;
  void* const* k = nullptr;  // [num_layers] → [num_kv_slots, kv_heads, head_dim], after RoPE
  void* const* v = nullptr;  // [num_layers] → [num_kv_slots, kv_heads, head_dim]
};

// What becomes of a lane in a cycle; all but the first and the last draft nothing.
enum class LaneStatus : std::int32_t {
  kLive = 0,
  kPadded,     // request slot 0: touches nothing
  kHeld,       // draft_from is false, or K is 0: K and V are written
  kNoRoom,     // the context has no room for K more tokens: K and V are written
  kNotFinite,  // NaN or infinity reached the logits
  kBadIndex,   // an id, length or slot out of range: no K and V, no draft
  kStopped,    // drafted fewer steps than K: the score fell below stop_score
};
inline constexpr int kNumLaneStatus = 7;

// Drafts by request slot, nodes in ascending grid index; valid until the slot's next cycle.
struct DraftResults {
  std::int64_t* draft_tokens = nullptr;  // [num_slots, N-1], target vocabulary
  std::int32_t* parents = nullptr;       // [num_slots, N-1], node in 0..N-1, 0 the root
  float* scores = nullptr;               // [num_slots, N-1], cumulative log-probability
  std::int32_t* num_nodes = nullptr;     // [num_slots], nodes that count; 0 = no draft, fewer than N-1 where it stopped
  std::int64_t* drafted_for = nullptr;   // [num_slots], seq_lens + num_valid; another length means "no draft"
  float* draft_probs = nullptr;          // [num_slots, K, Vd], only with Sampling::kRejection
  std::int64_t* counters = nullptr;      // [kNumLaneStatus], lanes per LaneStatus since the start
};

// SGLang's tree mask modes.
enum class MaskMode : std::uint8_t {
  kFull,             // per request [N, seq_len + N] bool, all requests flattened
  kQlenOnly,         // [B, N, N] bool
  kQlenOnlyBitpack,  // [B, N, bytes] uint8, node j in bit j % 8 of byte j / 8; 1, 2, 4 or 8 bytes
};

// The parameter block of one `tree`: the new batch, and the verifier's own buffers that it fills.
struct VerifyBatch {
  std::int32_t batch = 0;             // B
  std::int32_t num_draft_tokens = 0;  // the verifier's N; may differ from the one that was drafted with
  MaskMode mask_mode = MaskMode::kQlenOnly;
  IdView req_pool_indices;                        // [B]
  IdView seq_lens;                                // [B], where the bonus token will sit
  IdView bonus_tokens;                            // [B], root of the tree
  std::int64_t* draft_tokens = nullptr;           // out [B, N]
  std::int64_t* positions = nullptr;              // out [B, N]
  std::int64_t* retrieve_index = nullptr;         // out [B, N]: b·N + node
  std::int64_t* retrieve_next_token = nullptr;    // out [B, N]: first child, -1 none
  std::int64_t* retrieve_next_sibling = nullptr;  // out [B, N]: next child of the same parent, -1 none
  std::uint8_t* mask = nullptr;                   // out, by mask_mode
  std::int64_t mask_size = 0;                     // bytes behind `mask`; kFull needs the sum of N·(seq_len + N)
};

}  // namespace eaglex
