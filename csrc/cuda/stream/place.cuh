// Where rows come from, without waits in between.
#pragma once

#include "core/lane.h"
#include "cuda/live_rows.h"
#include "cuda/stream/ptx.cuh"

namespace eaglex::stream {

__device__ __forceinline__ std::int64_t load_past_l1(const IdView& ids, std::int64_t i) {
  return ids.i64 != nullptr ? load_past_l1(ids.i64 + i) : load_past_l1(ids.i32 + i);
}

// Number `at` of the rows that count; behind the last, where an earlier batch may have left something, a row of nobody.
__device__ __forceinline__ cuda::LiveRow live_row(const cuda::LiveRows& live, int at) {
  const std::int32_t count = __ldcg(live.count);
  const cuda::LiveRow* const from = live.rows + at;
  cuda::LiveRow found;
  found.position = load_past_l1(&from->position);
  found.kv_slot = load_past_l1(&from->kv_slot);
  found.row = __ldcg(&from->row);
  found.token = __ldcg(&from->token);
  found.query = __ldcg(&from->query);
  if (at >= count) found.row = found.query = -1;
  return found;
}

struct StepPlace {
  RowPlace place;
  std::int64_t token = 0;  // of the row; kStep only
};

// eaglex::locate, with all reads of a step's row under way before the first is looked at: while weights are being
// prefetched each takes a microsecond and more, and the activations of the whole step wait for them.
__device__ __forceinline__ StepPlace place_of(const EngineContext& context, const DraftBatch& batch, const Rows& rows,
                                              int row) {
  StepPlace result;
  if (rows.pass != Pass::kStep) {
    result.place = locate(context, batch, rows, row);
    return result;
  }
  const LaneState& lanes = context.lanes;
  const int topk = context.speculation.topk;
  const int lane = row / topk;
  const int batch_size = __ldcg(&batch.batch);
  const int status = __ldcg(lanes.status + lane);
  const std::int64_t new_len = load_past_l1(lanes.new_len + lane);
  const int parent = __ldcg(lanes.frontier_parents + row);
  const std::int64_t token = load_past_l1(lanes.frontier_tokens + row);
  RowPlace& place = result.place;
  place.lane = lane;
  place.live = lane < batch_size && status == static_cast<int>(LaneStatus::kLive);
  if (!place.live) return result;
  place.position = new_len + rows.step - 1;
  place.source = static_cast<std::int64_t>(lane) * (rows.step == 1 ? 1 : topk) + parent;
  result.token = token;
  return result;
}

// The row of Pass::kExtendLast, for attention: its position is all that it needs.
__device__ __forceinline__ RowPlace last_place(const EngineContext& context, const DraftBatch& batch, int lane) {
  RowPlace place;
  const int batch_size = __ldcg(&batch.batch);
  const int status = __ldcg(context.lanes.status + lane);
  place.position = load_past_l1(context.lanes.new_len + lane) - 1;
  place.lane = lane;
  place.live = lane < batch_size && status == static_cast<int>(LaneStatus::kLive);
  return place;
}

}  // namespace eaglex::stream
