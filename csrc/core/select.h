// `select` for one lane: one step's top-k joins the grid of candidates and the next frontier is chosen; after the last
// step the best N - 1 candidates become the result (EAGLE-2 re-ranking). The spec is eaglex/reference.py: draft,
// select.
#pragma once

#include <cstdint>

#include "core/lane.h"

namespace eaglex {

// First grid index of a step's candidates.
[[nodiscard]] constexpr int grid_base(const SpeculationConfig& speculation, int draft_step) {
  const int k = speculation.topk;
  return draft_step == 0 ? 0 : k + (draft_step - 1) * k * k;
}

// Writes the candidates of this step into the grid; returns false where a token is outside the vocabulary.
constexpr bool grow_grid(const EngineContext& context, const SelectParams& params, std::int32_t lane) {
  const LaneState& state = context.lanes;
  const int k = context.speculation.topk;
  const int width = params.draft_step == 0 ? 1 : k;
  const std::int64_t grid = static_cast<std::int64_t>(lane) * context.speculation.num_candidates();
  const std::int64_t base = grid + grid_base(context.speculation, params.draft_step);
  const std::int64_t top = static_cast<std::int64_t>(lane) * width * k;  // rows of the pass: one per lane, then k
  bool sound = true;
  for (int row = 0; row < width; ++row) {
    const std::int64_t node = static_cast<std::int64_t>(lane) * k + row;
    const float score = params.draft_step == 0 ? 0.0F : state.frontier_scores[node];
    const std::int32_t parent = params.draft_step == 0 ? 0 : state.frontier_nodes[node];
    for (int rank = 0; rank < k; ++rank) {
      const std::int64_t at = static_cast<std::int64_t>(row) * k + rank;
      const std::int64_t id = state.top_ids[top + at];
      const std::int64_t token = params.d2t == nullptr ? id : id + params.d2t[id];
      sound = sound && token >= 0 && token < context.config.vocab_size;
      state.grid_tokens[base + at] = token;
      state.grid_parents[base + at] = parent;
      state.grid_scores[base + at] = score + state.top_scores[top + at];
      state.grid_nodes[base + at] = 0;
    }
  }
  return sound;
}

// The k best candidates of this step become the frontier of the next.
constexpr void choose_frontier(const EngineContext& context, const SelectParams& params, std::int32_t lane) {
  const LaneState& state = context.lanes;
  const int k = context.speculation.topk;
  const int steps = context.speculation.num_steps;
  const int candidates = params.draft_step == 0 ? k : k * k;
  const int base = grid_base(context.speculation, params.draft_step);
  const std::int64_t grid = static_cast<std::int64_t>(lane) * context.speculation.num_candidates() + base;
  const std::int32_t* const before = state.ancestors[(params.draft_step + 1) % 2];
  std::int32_t* const after = state.ancestors[params.draft_step % 2];
  float last_score = 0;
  int last = -1;
  for (int i = 0; i < k; ++i) {
    int best = -1;  // the best that comes after the last chosen one in the order (score descending, index ascending)
    for (int c = 0; c < candidates; ++c) {
      const float score = state.grid_scores[grid + c];
      const bool later = last < 0 || score < last_score || (score == last_score && c > last);
      if (later && (best < 0 || score > state.grid_scores[grid + best])) best = c;
    }
    last = best;
    last_score = state.grid_scores[grid + best];
    const std::int64_t node = static_cast<std::int64_t>(lane) * k + i;
    const int parent_row = best / k;  // the candidates of one row lie together
    state.frontier_tokens[node] = state.grid_tokens[grid + best];
    state.frontier_nodes[node] = base + best + 1;
    state.frontier_scores[node] = last_score;
    state.frontier_parents[node] = parent_row;
    const std::int64_t parent = (static_cast<std::int64_t>(lane) * k + parent_row) * steps;
    for (int depth = 0; depth < params.draft_step; ++depth) after[node * steps + depth] = before[parent + depth];
    after[node * steps + params.draft_step] = params.draft_step * k + i;
  }
}

// What a lane's draft comes to with the step that has just joined the grid.
struct Ending {
  int candidates = 0;  // in the grid so far
  int count = 0;       // nodes that are kept of them
};

[[nodiscard]] constexpr Ending ending_of(const SpeculationConfig& speculation, LaneStatus status, int draft_step) {
  const bool drafted = status == LaneStatus::kLive || status == LaneStatus::kStopped;
  if (!drafted || speculation.num_steps == 0) return {};
  const int candidates = grid_base(speculation, draft_step + 1);
  return {candidates, candidates < speculation.num_draft_tokens ? candidates : speculation.num_draft_tokens - 1};
}

// Keeps the best of the grid and writes them to the slot in grid order, so that parents come first.
constexpr void write_result(const EngineContext& context, std::int32_t lane, std::int64_t slot, Ending ending) {
  const LaneState& state = context.lanes;
  const std::int64_t grid = static_cast<std::int64_t>(lane) * context.speculation.num_candidates();
  for (int i = 0; i < ending.count; ++i) {
    int best = -1;
    for (int c = 0; c < ending.candidates; ++c) {
      if (state.grid_nodes[grid + c] == 0 && (best < 0 || state.grid_scores[grid + c] > state.grid_scores[grid + best]))
        best = c;
    }
    state.grid_nodes[grid + best] = 1;
  }
  const std::int64_t out = slot * (context.speculation.num_draft_tokens - 1);
  std::int32_t node = 0;
  for (int c = 0; c < ending.candidates; ++c) {
    if (state.grid_nodes[grid + c] == 0) continue;
    const std::int32_t parent = state.grid_parents[grid + c];
    state.grid_nodes[grid + c] = node + 1;
    context.results.draft_tokens[out + node] = state.grid_tokens[grid + c];
    context.results.parents[out + node] = parent == 0 ? 0 : state.grid_nodes[grid + parent - 1];
    context.results.scores[out + node] = state.grid_scores[grid + c];
    ++node;
  }
}

// Returns the lane's status; after the last step it is what the cycle is counted under. A lane that stops is written
// down at once, and later steps leave it alone.
constexpr LaneStatus select_lane(const EngineContext& context, const DraftBatch& batch, const SelectParams& params,
                                 std::int32_t lane) {
  const SpeculationConfig& speculation = context.speculation;
  LaneStatus status = status_of(context, lane);
  if (status == LaneStatus::kStopped) return status;
  if (status == LaneStatus::kLive && !grow_grid(context, params, lane)) {
    status = LaneStatus::kBadIndex;
    context.lanes.status[lane] = static_cast<std::int32_t>(status);
  }
  if (params.draft_step + 1 < speculation.num_steps) {
    if (status != LaneStatus::kLive) return status;
    choose_frontier(context, params, lane);
    if (!(context.lanes.frontier_scores[static_cast<std::int64_t>(lane) * speculation.topk] < speculation.stop_score))
      return status;
    status = LaneStatus::kStopped;
    context.lanes.status[lane] = static_cast<std::int32_t>(status);
  }
  const std::int64_t slot = batch.req_pool_indices[lane];
  if (slot <= 0 || slot >= context.limits.num_slots) return status;
  const Ending ending = ending_of(speculation, status, params.draft_step);
  if (ending.count > 0) write_result(context, lane, slot, ending);
  context.results.num_nodes[slot] = ending.count;
  context.results.drafted_for[slot] = context.lanes.new_len[lane];
  return status;
}

}  // namespace eaglex
