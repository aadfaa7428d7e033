// head, second half: the blocks' best and Σ exp of each row together; for a chain select_lane as well.
// Formula: reference.py head, top_k, select.
// Caller: Backend::head, or Backend::select for a chain.    Bytes: 8 · topk + 8 per block of the head and row, from L2.
// Mapping: one block per row; at topk 1 small enough to run beside two blocks of a matrix. All orders are fixed. The
// whole step waits for this kernel: all reads that need not follow each other are under way at once.
#include "cuda/stream/head_end.cuh"

namespace eaglex::stream {
namespace {

struct MergeArgs : HeadEnd {
  int blocks;  // of the head's grid
  const std::uint64_t* keys;
  const float2* stats;
};

// What all blocks of the head have found of one row.
struct Merged {
  std::uint64_t best = 0;
  float log_sum = 0;
};

__device__ Merged merge(const MergeArgs& args, int row, std::uint64_t* bests, float* sums) {
  constexpr int kAtOnce = 8;
  const int topk = args.context.speculation.topk;
  std::uint64_t best = 0;
  float maximum = kMinusInfinity;
  float sum = 0;
#pragma unroll 1
  for (int base = threadIdx.x; base < args.blocks; base += kAtOnce * kEndThreads) {
    std::uint64_t keys[kAtOnce];
    float2 parts[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = base + j * kEndThreads;
      const std::int64_t at = static_cast<std::int64_t>(i) * kMaxTokens + row;
      keys[j] = i < args.blocks ? __ldcg(args.keys + at * topk) : 0;  // of each block its best
      parts[j] = i < args.blocks ? __ldcg(args.stats + at) : make_float2(kMinusInfinity, 0.0F);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      best = keys[j] > best ? keys[j] : best;
      const float next = fmaxf(maximum, parts[j].x);
      if (parts[j].x != kMinusInfinity || parts[j].y != 0) {
        sum = (sum == 0 ? 0.0F : sum * __expf(maximum - next)) + parts[j].y * __expf(parts[j].x - next);
      }
      maximum = next;
    }
  }
  best = warp_max(best);
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
  __syncthreads();
  Merged merged;
  for (int i = 0; i < kEndThreads / 32; ++i) merged.best = bests[i] > merged.best ? bests[i] : merged.best;
  const float largest = value_of(merged.best);
  merged.log_sum = largest + logf(block_sum(sum == 0 ? 0.0F : sum * __expf(maximum - largest), sums));
  return merged;
}

// The topk best of the blocks' lists, by one warp: `lists` [blocks][topk], `taken` how many of each have been.
__device__ void rank(const MergeArgs& args, int row, const std::uint64_t* lists, int* taken, float log_sum) {
  const int topk = args.context.speculation.topk;
  for (int place = 0; place < topk; ++place) {
    std::uint64_t best = 0;
    int from = 0;
    for (int i = threadIdx.x; i < args.blocks; i += 32) {
      const std::uint64_t key = taken[i] < topk ? lists[i * topk + taken[i]] : 0;
      if (key > best) best = key, from = i;
    }
    const std::uint64_t winner = warp_max(best);
    if (winner == best && winner != 0) ++taken[from];  // keys are unique: one lane
    if (threadIdx.x == 0) write_top(args, row, place, winner, log_sum);
  }
}

__global__ void __maxnreg__(64) head_merge(const __grid_constant__ MergeArgs args) {
#if EAGLEX_STREAM_KERNELS
  extern __shared__ std::uint64_t lists[];  // topk > 1: [blocks][topk], then [blocks] how many of each are taken
  __shared__ float sums[kEndThreads / 32];
  __shared__ std::uint64_t bests[kEndThreads / 32];
  release_dependents();
  touch_parameters(args);
  wait_for_producers();
  const int row = blockIdx.x;
  const int topk = args.context.speculation.topk;
  const int thread = threadIdx.x;
  const int width = args.rows.pass == Pass::kExtendLast ? 1 : topk;
  const int lane = row / width;
  if (is_idle(args.needed)) {
    if (args.selects && thread == 0 && lane < __ldcg(&args.batch->batch)) select(args, lane);
    return;
  }
  const int batch_size = __ldcg(&args.batch->batch);
  const int status = __ldcg(args.context.lanes.status + lane);
  const bool first = args.select.draft_step == 0;
  const float score_before = args.selects && !first ? __ldcg(args.context.lanes.frontier_scores + lane) : 0.0F;
  int* const taken = reinterpret_cast<int*>(lists + args.blocks * topk);
  if (topk > 1) {
#pragma unroll 4
    for (int i = thread; i < args.blocks * topk; i += kEndThreads) {
      lists[i] = __ldcg(args.keys + (static_cast<std::int64_t>(i / topk) * kMaxTokens + row) * topk + i % topk);
    }
    for (int i = thread; i < args.blocks; i += kEndThreads) taken[i] = 0;
  }
  const Merged merged = merge(args, row, bests, sums);
  const bool finite = isfinite(merged.log_sum);
  const bool inside = lane < batch_size;
  if (thread < 32) {
    if (thread == 0 && inside && status == static_cast<int>(LaneStatus::kLive) && !finite) {
      args.context.lanes.status[lane] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
    }
    if (finite && topk > 1) rank(args, row, lists, taken, merged.log_sum);
    if (finite && topk == 1 && thread == 0) write_top(args, row, 0, merged.best, merged.log_sum);
    if (args.selects && inside) {
      const Found found{lane,
                        static_cast<LaneStatus>(status),
                        finite ? token_of(args, id_of(merged.best)) : 0,
                        finite ? id_of(merged.best) : 0,
                        fminf(0.0F, value_of(merged.best) - merged.log_sum),
                        score_before};
      const bool done = finite && advance_chain(args, found);
      if (!done && thread == 0) select(args, lane);
    }
  }
  if (args.hidden != nullptr) replace_by_norm(args, row, sums);
#endif
}

}  // namespace

void launch_head_merge(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                       const EngineContext& context, const DraftBatch* batch, cudaStream_t stream) {
  const MergeArgs args{head_end_of(plan, params, select, context, batch), blocks, plan.head_keys, plan.head_stats};
  const int topk = context.speculation.topk;
  const int shared =
      topk == 1 ? 0 : blocks * (topk * static_cast<int>(sizeof(std::uint64_t)) + static_cast<int>(sizeof(int)));
  launch_chained(plan, head_merge, dim3(static_cast<unsigned>(params.rows.max_rows)), kEndThreads, shared, stream,
                 args);
}

}  // namespace eaglex::stream
