// Where a row of a launch comes from and goes to, and which lanes may draft. Plain loops over one lane: the CPU backend
// runs them as they are, a CUDA kernel in one thread (constexpr functions are device functions under
// --expt-relaxed-constexpr).
#pragma once

#include <cstdint>

#include "core/params.h"

namespace eaglex {

[[nodiscard]] constexpr bool keeps_kv(LaneStatus status) {
  return status == LaneStatus::kLive || status == LaneStatus::kHeld || status == LaneStatus::kNoRoom ||
         status == LaneStatus::kStopped;
}

[[nodiscard]] constexpr LaneStatus status_of(const EngineContext& context, std::int64_t lane) {
  return static_cast<LaneStatus>(context.lanes.status[lane]);
}

struct RowPlace {
  std::int32_t lane = 0;
  std::int64_t position = 0;  // for RoPE; keys at positions <= it are visible
  std::int64_t source = 0;    // row of the previous pass's hidden states that this row continues
  bool live = false;
};

// The lane whose rows contain `row`: the last one that starts at or before it.
[[nodiscard]] constexpr std::int32_t lane_of(const DraftBatch& batch, std::int64_t row) {
  std::int32_t low = 0;
  std::int32_t high = batch.batch;
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    if (batch.row_start[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

[[nodiscard]] constexpr RowPlace locate(const EngineContext& context, const DraftBatch& batch, const Rows& rows,
                                        std::int64_t row) {
  RowPlace place;
  if (rows.pass == Pass::kExtendAll) {
    if (row >= batch.num_rows) return place;
    place.lane = lane_of(batch, row);
    const std::int64_t offset = row - batch.row_start[place.lane];
    place.position = batch.seq_lens[place.lane] + offset;
    place.source = row;
    place.live = keeps_kv(status_of(context, place.lane)) && offset >= 0 && offset < batch.num_valid[place.lane];
    return place;
  }
  const int width = rows.pass == Pass::kExtendLast ? 1 : context.speculation.topk;
  place.lane = static_cast<std::int32_t>(row / width);
  if (place.lane >= batch.batch || status_of(context, place.lane) != LaneStatus::kLive) return place;
  place.live = true;
  if (rows.pass == Pass::kExtendLast) {
    place.position = context.lanes.new_len[place.lane] - 1;
    place.source = batch.row_start[place.lane] + batch.num_valid[place.lane] - 1;
  } else {
    const int width_before = rows.step == 1 ? 1 : width;
    place.position = context.lanes.new_len[place.lane] + rows.step - 1;
    place.source = static_cast<std::int64_t>(place.lane) * width_before + context.lanes.frontier_parents[row];
  }
  return place;
}

// The KV slot of a position, or -1 where there is none: beyond the table, or outside the pool.
[[nodiscard]] constexpr std::int64_t kv_slot(const KvPool& kv, std::int64_t request_slot, std::int64_t position) {
  if (position < 0 || position >= kv.max_context) return -1;
  const std::int64_t slot = kv.req_to_token[request_slot * kv.max_context + position];
  return slot < kv.num_kv_slots ? slot : -1;
}

// Where a row of the batch writes its K and V, or -1 where it may not.
[[nodiscard]] constexpr std::int64_t write_slot(const EngineContext& context, const DraftBatch& batch,
                                                std::int32_t lane, std::int64_t row, std::int64_t position) {
  if (!batch.out_cache_loc) return kv_slot(context.kv, batch.req_pool_indices[lane], position);
  const std::int64_t slot = batch.out_cache_loc[row];
  return slot >= 0 && slot < context.kv.num_kv_slots ? slot : -1;
}

// Whether row `offset` of a lane has a token of the vocabulary and a KV slot to write to.
[[nodiscard]] constexpr bool row_is_sound(const EngineContext& context, const DraftBatch& batch, std::int32_t lane,
                                          std::int64_t offset) {
  const std::int64_t row = batch.row_start[lane] + offset;
  const std::int64_t token = batch.input_ids[row];
  return token >= 0 && token < context.config.vocab_size &&
         write_slot(context, batch, lane, row, batch.seq_lens[lane] + offset) >= 0;
}

// All that can be said of a lane before its rows are looked at one by one.
[[nodiscard]] constexpr LaneStatus lane_status(const EngineContext& context, const DraftBatch& batch,
                                               std::int32_t lane) {
  const std::int64_t slot = batch.req_pool_indices[lane];
  if (slot == 0) return LaneStatus::kPadded;
  if (slot < 0 || slot >= context.limits.num_slots) return LaneStatus::kBadIndex;
  const std::int64_t first = batch.row_start[lane];
  const std::int64_t count = batch.row_start[lane + 1] - first;
  const std::int64_t valid = batch.num_valid[lane];
  const std::int64_t seq_len = batch.seq_lens[lane];
  if (first < 0 || first + count > batch.num_rows || valid < 1 || valid > count) return LaneStatus::kBadIndex;
  // Where row_start is out of order, rows of this lane belong to another; the search takes one path for all rows
  // between these two.
  if (lane_of(batch, first) != lane || lane_of(batch, first + valid - 1) != lane) return LaneStatus::kBadIndex;
  const std::int64_t most =
      context.config.max_positions < context.kv.max_context ? context.config.max_positions : context.kv.max_context;
  if (seq_len < 0 || seq_len > most - valid) return LaneStatus::kBadIndex;  // before the sum, which could overflow
  const std::int64_t new_len = seq_len + valid;
  if (batch.draft_from[lane] == 0 || context.speculation.num_steps == 0) return LaneStatus::kHeld;
  return new_len + context.speculation.num_steps < context.config.max_positions ? LaneStatus::kLive
                                                                                : LaneStatus::kNoRoom;
}

// Writes down what `admit` found. Voids the slot's old result, so that a cycle that dies leaves no draft behind.
constexpr void settle_lane(const EngineContext& context, const DraftBatch& batch, std::int32_t lane,
                           LaneStatus status) {
  context.lanes.status[lane] = static_cast<std::int32_t>(status);
  context.lanes.new_len[lane] = keeps_kv(status) ? batch.seq_lens[lane] + batch.num_valid[lane] : 0;
  const std::int64_t slot = batch.req_pool_indices[lane];
  if (slot > 0 && slot < context.limits.num_slots) context.results.drafted_for[slot] = -1;
}

// `admit` for one lane.
constexpr void admit_lane(const EngineContext& context, const DraftBatch& batch, std::int32_t lane) {
  LaneStatus status = lane_status(context, batch, lane);
  if (keeps_kv(status)) {
    for (std::int64_t i = 0; i < batch.num_valid[lane] && status != LaneStatus::kBadIndex; ++i) {
      if (!row_is_sound(context, batch, lane, i)) status = LaneStatus::kBadIndex;
    }
  }
  settle_lane(context, batch, lane, status);
}

}  // namespace eaglex
