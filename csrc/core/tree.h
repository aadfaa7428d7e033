// `tree` for one lane: a slot's draft becomes the verifier's tensors, in the new batch's order. The spec is
// eaglex/reference.py: tree, full_mask, packed_mask.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace eaglex {

// What `tree` reads besides the batch.
struct TreeSource {
  DraftResults results;
  std::int32_t num_slots = 0;
  std::int32_t num_drafted = 0;  // N - 1 that was drafted with: the stride of the results
  std::int32_t vocab_size = 0;
  std::int32_t num_steps = 0;  // K: no node is deeper
};

[[nodiscard]] constexpr TreeSource tree_source(const EngineContext& context) {
  return {context.results, context.limits.num_slots, context.speculation.num_draft_tokens - 1,
          context.config.vocab_size, context.speculation.num_steps};
}

// Nodes of the slot's draft that a verifier at `seq_len` may use, at most `most`; 0 unless every id and parent is in
// range and no path is longer than K, for which verifiers have room.
[[nodiscard]] constexpr int usable_nodes(const TreeSource& source, std::int64_t slot, std::int64_t seq_len, int most) {
  if (slot <= 0 || slot >= source.num_slots) return 0;
  if (seq_len < 0 || source.results.drafted_for[slot] != seq_len) return 0;  // -1 says that there is no draft
  const int count = source.results.num_nodes[slot];
  if (count < 0 || count > source.num_drafted) return 0;
  const int used = count < most ? count : most;
  std::int32_t depth[kMaxDraftTokens] = {};
  for (int i = 0; i < used; ++i) {
    const std::int64_t token = source.results.draft_tokens[slot * source.num_drafted + i];
    const std::int32_t parent = source.results.parents[slot * source.num_drafted + i];
    if (token < 0 || token >= source.vocab_size || parent < 0 || parent > i) return 0;
    depth[i + 1] = depth[parent] + 1;
    if (depth[i + 1] > source.num_steps) return 0;
  }
  return used;
}

[[nodiscard]] constexpr int packed_mask_bytes(int num_draft_tokens) {
  int bytes = 1;
  while (bytes * 8 < num_draft_tokens) bytes *= 2;
  return bytes;
}

// Byte offset of a lane's mask. kFull has no fixed stride: it depends on the lengths of the lanes before, and is -1
// where those lengths leave no room for this lane's mask. Its size is all the host vouches for; a length may be
// anything.
[[nodiscard]] constexpr std::int64_t mask_offset(const VerifyBatch& batch, std::int32_t lane) {
  const std::int64_t n = batch.num_draft_tokens;
  if (batch.mask_mode == MaskMode::kQlenOnly) return lane * n * n;
  if (batch.mask_mode == MaskMode::kQlenOnlyBitpack) return lane * n * packed_mask_bytes(batch.num_draft_tokens);
  std::int64_t offset = 0;
  for (std::int32_t i = 0; i <= lane; ++i) {
    const std::int64_t seq_len = batch.seq_lens[i];
    if (seq_len < 0 || seq_len > batch.mask_size) return -1;
    offset += n * (seq_len + n);
    if (offset > batch.mask_size) return -1;
  }
  return offset - n * (batch.seq_lens[lane] + n);
}

constexpr void write_mask_row(const VerifyBatch& batch, std::uint8_t* lane_mask, std::int64_t seq_len, int node,
                              std::uint64_t seen) {
  const int n = batch.num_draft_tokens;
  if (batch.mask_mode == MaskMode::kQlenOnlyBitpack) {
    const int bytes = packed_mask_bytes(n);
    for (int i = 0; i < bytes; ++i) lane_mask[node * bytes + i] = static_cast<std::uint8_t>(seen >> (8 * i));
    return;
  }
  const std::int64_t prefix = batch.mask_mode == MaskMode::kFull ? seq_len : 0;
  std::uint8_t* const row = lane_mask + node * (prefix + n);
  for (std::int64_t i = 0; i < prefix; ++i) row[i] = 1;
  for (int i = 0; i < n; ++i) row[prefix + i] = static_cast<std::uint8_t>((seen >> i) & 1U);
}

constexpr void tree_lane(const TreeSource& source, const VerifyBatch& batch, std::int32_t lane) {
  const int n = batch.num_draft_tokens;
  const std::int64_t slot = batch.req_pool_indices[lane];
  const std::int64_t seq_len = batch.seq_lens[lane];
  const std::int64_t offset = mask_offset(batch, lane);
  const int used = offset < 0 ? 0 : usable_nodes(source, slot, seq_len, n - 1);
  const std::int64_t out = static_cast<std::int64_t>(lane) * n;
  const std::int64_t in = slot * source.num_drafted - 1;  // node i of the tree is entry i - 1
  std::uint64_t seen[kMaxDraftTokens] = {};
  std::int32_t depth[kMaxDraftTokens] = {};
  for (int node = 0; node < n; ++node) {
    const bool drafted = node > 0 && node <= used;
    const int parent = drafted ? source.results.parents[in + node] : 0;
    // A pad is a child of the root in mask and position, and linked from nowhere: nothing can accept it.
    seen[node] = (std::uint64_t{1} << node) | seen[parent];
    depth[node] = node == 0 ? 0 : depth[parent] + 1;
    batch.draft_tokens[out + node] = drafted ? source.results.draft_tokens[in + node] : batch.bonus_tokens[lane];
    batch.positions[out + node] = seq_len + depth[node];
    batch.retrieve_index[out + node] = out + node;
    batch.retrieve_next_token[out + node] = -1;
    batch.retrieve_next_sibling[out + node] = -1;
    if (offset >= 0) write_mask_row(batch, batch.mask + offset, seq_len, node, seen[node]);
  }
  for (int node = used; node > 0; --node) {  // backwards, so that the first child comes first
    std::int64_t* const first = batch.retrieve_next_token + out + source.results.parents[in + node];
    batch.retrieve_next_sibling[out + node] = *first;
    *first = node;
  }
}

}  // namespace eaglex
