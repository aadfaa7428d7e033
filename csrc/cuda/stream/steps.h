// The product's steps on a stream: one function per step of Backend, each one or two launches, all capturable, nothing
// allocated.
//
// A StreamPlan is made once; matrices come from `retile` in the order of a TileOrder; DraftBatch is the device's copy of
// the parameter block (its address stays, its contents change from launch to launch). Rows of a launch are 1..64, of
// fuse and of K and V 1..most_rows(); a pass of more is several launches (StreamPlan::first_row) or the plain kernels'.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/params.h"
#include "cuda/live_rows.h"
#include "cuda/stream/config.h"
#include "cuda/stream/tiles.h"

namespace eaglex::stream {

// What a plan must have room for; the largest over all launches.
struct StreamNeeds {
  int max_rows = 0;      // of any matrix
  int max_k = 0;         // of any row of x
  int max_segments = 2;  // 2 for qkv, num_aux for a fuse with a norm for each layer
  int topk = 1;
  int head_dim = 128;
};

[[nodiscard]] constexpr int num_counters(const StreamNeeds& needs) {
  return needs.max_rows / kBlockRows + 2;
}

struct StreamPlan {
  DeviceLimits device;
  StreamNeeds needs;
  Reduction reduction = Reduction::kOwner;
  bool pdl = true;
  std::byte* partials = nullptr;              // sums that blocks exchange
  std::uint32_t* counters = nullptr;          // [tiles], zero between launches
  std::uint32_t* failed = nullptr;            // [1] nonzero: a block waited in vain for another; results since are void
  const std::int32_t* needed = nullptr;       // where it holds 0 the launch returns at once; null: it always works
  const std::int32_t* needed_late = nullptr;  // for qkv, the same of a flag that only the kernel before it raises
  std::uint64_t* words = nullptr;             // [word_count()] all ones between launches
  std::int32_t* broken = nullptr;             // [1] 1: they may be not; until the host has seen `failed` all is void
  std::int32_t* never_wait = nullptr;         // [1] the host sets it when `failed` was set: Reduction::kLastArriver
  std::int32_t* drafting = nullptr;           // [steps] raised by select, with launch_head_merge
  const void* embed_tokens = nullptr;  // [V, H]; where known, head_merge fetches the row of the token that it chose
  // launch_qkv_drafted's hidden states were written before the kernel before began: head, which releases it after its
  // own wait, has waited for them, and nothing replaces them behind head.
  bool hidden_is_there = false;
  int first_row = 0;  // of the pass: fuse and qkv of K and V may cover a part of it, max_rows rows
  // qkv over all rows of an extend's list at once: it writes queries and residuals of the rows that are drafted from
  // alone, and attention behind it finds the last rows' keys written by the kernel before.
  bool last_queries = false;
  void* const* pool_k = nullptr;  // [layers], host memory: the draft's prefix KV
  void* const* pool_v = nullptr;
  void* ones = nullptr;                // [max_k] in bf16: gamma where a part of x has no norm
  const void* idle_row = nullptr;      // [max_k] zeros: what rows that are not live read
  std::uint64_t* head_keys = nullptr;  // [grid, 64, topk]
  float2* head_stats = nullptr;        // [grid, 64] maximum and Σ exp
  std::byte* attention_partials = nullptr;
  // Rows of fuse, and of an extend's K and V, are those of the list, from first_row on. Without one qkv takes the pass's
  // own: a step's, an extend's last ones, all of them below the last layer.
  cuda::LiveRows live;
  const __nv_bfloat16* token_products = nullptr;  // [Vd, token_product_width()]; null: not known
  std::uint64_t* head_offers = nullptr;           // [64, HeadOffers::stride], where a head's best may be scored again
  // Words of launches that hand over sums before they have waited for those before them (hidden_is_there).
  std::uint64_t* early_words = nullptr;
};

// Whether products of more than 16 rows are wgmma's there.
[[nodiscard]] bool has_wgmma(const DeviceLimits& device);
// Rows that one launch of fuse, or of K and V, takes: more than 64 where their products are wgmma's, of bf16.
[[nodiscard]] int most_rows(const DeviceLimits& device, Precision precision);

// Limits of the current device.
[[nodiscard]] DeviceLimits current_device();
[[nodiscard]] std::size_t workspace_bytes(const DeviceLimits& device, const StreamNeeds& needs);
// Of StreamPlan::head_offers, which is no part of that.
[[nodiscard]] constexpr std::size_t head_offer_bytes(int vocab, int topk) {
  return static_cast<std::size_t>(kMaxTokens) * head_offers(vocab, topk).stride * sizeof(std::uint64_t);
}

// Carves `workspace`, which must be zero. EAGLEX_PDL=0 launches without programmatic dependence; under MPS, or with
// EAGLEX_STREAM_REDUCTION=last, no block waits for another. Throws kConfig where either holds another name.
[[nodiscard]] StreamPlan make_plan(const DeviceLimits& device, const StreamNeeds& needs, void* workspace);

// What `retile` needs to know of the three kinds of matrix.
[[nodiscard]] TileOrder qkv_order(const DraftConfig& config);
inline constexpr TileOrder kGateUpOrder{RowOrder::kPaired, 0, 0};
inline constexpr TileOrder kNaturalOrder{};

// `Linear::prepared` holds the tiles, `Linear::parts` the shapes. `context` is read on the host and passed by value,
// `batch` is dereferenced on the device.
void launch_fuse(const StreamPlan& plan, const FuseParams& params, const EngineContext& context,
                 const DraftBatch* batch, cudaStream_t stream);
void launch_qkv(const StreamPlan& plan, const QkvParams& params, const EngineContext& context, const DraftBatch* batch,
                cudaStream_t stream);
// The same for drafted tokens, with StreamPlan::token_products: Pass::kStep, layer 0.
void launch_qkv_drafted(const StreamPlan& plan, const QkvParams& params, const EngineContext& context,
                        const DraftBatch* batch, cudaStream_t stream);
// Rows of q, k, v.
[[nodiscard]] constexpr int token_product_width(const DraftConfig& config) {
  return static_cast<int>(config.q_size() + 2 * config.kv_size());
}
// What the embeddings' half of q, k, v makes of each id of the draft vocabulary: `out` [Vd, token_product_width()].
void launch_token_products(const StreamPlan& plan, const DraftedTokens& tokens, const DraftConfig& config,
                           __nv_bfloat16* out, cudaStream_t stream);
// Whether launch_attention runs there. It must follow launch_qkv of the same pass and layer.
[[nodiscard]] bool attends(const DeviceLimits& device, int head_dim);
void launch_attention(const StreamPlan& plan, const AttentionParams& params, const EngineContext& context,
                      const DraftBatch* batch, cudaStream_t stream);
// o_proj and down.
void launch_projection(const StreamPlan& plan, const ProjectionParams& params, cudaStream_t stream);
void launch_gate_up(const StreamPlan& plan, const GateUpParams& params, const EngineContext& context,
                    cudaStream_t stream);
// Sampling::kGreedy only. What the blocks found; returns their number. With HeadParams::rescore_rows it is
// launch_head_rescore that must follow, in the place of launch_head_merge.
[[nodiscard]] int launch_head(const StreamPlan& plan, const HeadParams& params, const EngineContext& context,
                              cudaStream_t stream);
// Puts that together: writes LaneState::top_scores and top_ids, marks lanes whose logits are not finite. With `select`,
// which a chain (topk 1) may give, select_lane as well; null: select follows.
void launch_head_merge(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                       const EngineContext& context, const DraftBatch* batch, cudaStream_t stream);
// The same where the best of what was found are first scored again by HeadParams::rescore_rows.
void launch_head_rescore(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                         const EngineContext& context, const DraftBatch* batch, cudaStream_t stream);
// One or the other.
void launch_head_end(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                     const EngineContext& context, const DraftBatch* batch, cudaStream_t stream);

}  // namespace eaglex::stream
