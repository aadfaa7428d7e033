// Where rows come from, without the waits in between.
#pragma once

#include "core/lane.h"
#include "cuda/stream/ptx.cuh"

namespace eaglex::stream {

// Starts together the reads that `locate` makes one after the other: while weights are being prefetched, each takes
// about a microsecond, and the activations of the whole step wait for them.
__device__ __forceinline__ void touch_place(const EngineContext& context, const DraftBatch* batch, const Rows& rows,
                                            int row) {
  touch(batch);
  touch(reinterpret_cast<const char*>(batch + 1) - 1);
  if (rows.pass == Pass::kExtendAll) return;
  const LaneState& lanes = context.lanes;
  const int lane = rows.pass == Pass::kExtendLast ? row : row / context.speculation.topk;
  touch(lanes.status + lane);
  touch(lanes.new_len + lane);
  if (rows.pass != Pass::kStep) return;
  touch(lanes.frontier_parents + row);
  touch(lanes.frontier_tokens + row);
}

}  // namespace eaglex::stream
