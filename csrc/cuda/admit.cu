// admit: status and new length per lane, the slot's old result voided (core/lane.h: admit_lane, rows side by side).
// Caller: first in every cycle.
// Bytes: 12 to 16 per row (input id, KV slot), 60 per lane.
// Mapping: one CTA per lane, one thread per row, strided.
#include "cuda/kernels.h"

namespace eaglex::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) admit_kernel(const __grid_constant__ Chain chain) {
  const DraftBatch& batch = *chain.batch;
  const EngineContext& context = chain.context;
  const auto lane = static_cast<std::int32_t>(blockIdx.x);
  if (lane >= batch.batch) return;
  LaneStatus status = lane_status(context, batch, lane);
  int sound = 1;
  if (keeps_kv(status)) {
    for (int i = static_cast<int>(threadIdx.x); i < batch.num_valid[lane]; i += kThreads) {
      if (!row_is_sound(context, batch, lane, i)) sound = 0;
    }
  }
  if (__syncthreads_and(sound) == 0) status = LaneStatus::kBadIndex;
  if (threadIdx.x != 0) return;
  settle_lane(context, batch, lane, status);
  if (status == LaneStatus::kLive) chain.drafting[0] = 1;
}

}  // namespace

void launch_admit(const Chain& chain, int lanes, cudaStream_t stream) {
  launch("admit", admit_kernel, {dim3(static_cast<unsigned>(lanes)), kThreads, 0, stream}, chain);
}

}  // namespace eaglex::cuda
