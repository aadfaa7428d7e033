// admit: status and new length per lane, the slot's old result voided (core/lane.h: admit_lane, rows side by side); for
// the fast chain the rows that count, in the batch's order (live_rows.h).
// Caller: first in every cycle.
// Bytes: 12 to 16 per row (input id, KV slot), 32 more per row that is listed, 60 per lane; for the list each lane reads
// what the lanes before it hold, from L2: 64 requests take 8.1 us instead of 5.9.
// Mapping: one CTA per lane, one thread per row, strided.
#include "cuda/admit.h"

namespace eaglex::cuda {
namespace {

constexpr int kThreads = 256;

// Rows of a lane that count as far as can be said without looking at them.
__device__ int kept_rows(const EngineContext& context, const DraftBatch& batch, std::int32_t lane) {
  return keeps_kv(lane_status(context, batch, lane)) ? batch.num_valid[lane] : 0;
}

// Such rows of all lanes before `lane`. All threads call.
__device__ int rows_before(const EngineContext& context, const DraftBatch& batch, std::int32_t lane) {
  __shared__ int sums[kThreads / kWarp];
  int sum = 0;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < lane; i += kThreads) sum += kept_rows(context, batch, i);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
  for (const int each : sums) sum += each;
  return sum;
}

// The lane's rows to their places, which all lanes find alike: where one of them is not sound, as rows of nobody.
__device__ void list_rows(const Chain& chain, const LiveRows& live, std::int32_t lane, int first, int count,
                          LaneStatus status) {
  const DraftBatch& batch = *chain.batch;
  for (int i = static_cast<int>(threadIdx.x); i < count && first + i < LiveRows::kMost; i += kThreads) {
    LiveRow found;
    if (keeps_kv(status)) {
      const std::int64_t row = batch.row_start[lane] + i;
      found.position = batch.seq_lens[lane] + i;
      found.kv_slot = write_slot(chain.context, batch, lane, row, found.position);
      found.row = static_cast<std::int32_t>(row);
      found.token = static_cast<std::int32_t>(batch.input_ids[row]);
      found.query = status == LaneStatus::kLive && i == count - 1 ? lane : -1;
    }
    live.rows[first + i] = found;
  }
  if (lane == batch.batch - 1 && threadIdx.x == 0)
    *live.count = first + count < LiveRows::kMost ? first + count : LiveRows::kMost;
}

__global__ void __launch_bounds__(kThreads) admit_kernel(const __grid_constant__ Chain chain, LiveRows live) {
#if __CUDA_ARCH__ >= 900
  // fuse of the fast chain may fetch its weights meanwhile; before it reads or writes anything else it waits for the end
  // of this kernel. What is launched without the attribute is not affected.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const DraftBatch& batch = *chain.batch;
  const EngineContext& context = chain.context;
  const auto lane = static_cast<std::int32_t>(blockIdx.x);
  const bool lists = live.rows != nullptr && batch.num_rows <= LiveRows::kMost;
  if (lane >= batch.batch) {
    if (lists && batch.batch == 0 && lane == 0 && threadIdx.x == 0) *live.count = 0;
    return;
  }
  LaneStatus status = lane_status(context, batch, lane);
  const int count = keeps_kv(status) ? batch.num_valid[lane] : 0;
  int sound = 1;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    if (!row_is_sound(context, batch, lane, i)) sound = 0;
  }
  const int before = lists ? rows_before(context, batch, lane) : 0;
  if (__syncthreads_and(sound) == 0) status = LaneStatus::kBadIndex;
  if (lists) list_rows(chain, live, lane, before, count, status);
  if (threadIdx.x != 0) return;
  settle_lane(context, batch, lane, status);
  if (status == LaneStatus::kLive) chain.drafting[0] = 1;
}

}  // namespace

void launch_admit(const Chain& chain, const LiveRows& live, int lanes, cudaStream_t stream) {
  launch("admit", admit_kernel, {dim3(static_cast<unsigned>(lanes)), kThreads, 0, stream}, chain, live);
}

}  // namespace eaglex::cuda
