// head, second half: the blocks' best and Σ exp of each row together; for a chain select_lane as well.
// Formula: reference.py head, top_k, select.
// Caller: Backend::head, or Backend::select for a chain.    Bytes: 16 · topk + 8 per block of the head and row, from L2.
// Mapping: one block per row, small enough to run beside two blocks of a matrix. All orders are fixed.
#include "core/select.h"
#include "cuda/stream/launch.cuh"
#include "cuda/stream/ranking.cuh"

namespace eaglex::stream {
namespace {

struct MergeArgs {
  EngineContext context;
  const DraftBatch* batch;
  Rows rows;
  int blocks;  // of the head's grid
  const std::uint64_t* keys;
  const float2* stats;
  bf16* hidden;  // to be replaced by its norm, or null
  const bf16* norm;
  const std::int32_t* needed;
  bool selects;
  SelectParams select;
  std::int32_t* drafting;  // raised where the lane drafts in the next step
};

constexpr int kMergeThreads = 64;  // with 64 registers each it fits an SM beside two blocks of a matrix
constexpr float kMinusInfinity = -__builtin_huge_valf();

// Sum over the block, the same in every thread and every run.
__device__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kMergeThreads / 32; ++i) sum += shared[i];
  return sum;
}

// NextHidden::kNormed: what the next step reads.
__device__ void replace_by_norm(const MergeArgs& args, int row, float* sums) {
  const int size = args.context.config.hidden_size;
  bf16* const hidden = args.hidden + static_cast<std::int64_t>(row) * size;
  float squares = 0;
  for (int i = threadIdx.x; i < size; i += kMergeThreads) {
    const float x = __bfloat162float(hidden[i]);
    squares += x * x;
  }
  const float norm = rsqrtf(block_sum(squares, sums) / static_cast<float>(size) + args.context.config.rms_norm_eps);
  for (int i = threadIdx.x; i < size; i += kMergeThreads) {
    hidden[i] = __float2bfloat16(__bfloat162float(hidden[i]) * norm * __bfloat162float(args.norm[i]));
  }
}

__device__ void select(const MergeArgs& args, int lane) {
  const LaneStatus status = select_lane(args.context, *args.batch, args.select, lane);
  if (args.select.draft_step + 1 < args.context.speculation.num_steps) {
    if (status == LaneStatus::kLive) args.drafting[args.select.draft_step + 1] = 1;
    return;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(args.context.results.counters) + static_cast<int>(status), 1ULL);
}

__global__ void __maxnreg__(64) head_merge(const __grid_constant__ MergeArgs args) {
  extern __shared__ std::uint64_t lists[];  // [blocks][topk], then [blocks] how many of each are taken
  __shared__ float sums[kMergeThreads / 32];
  __shared__ float shared_maximum;
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
  int* const taken = reinterpret_cast<int*>(lists + args.blocks * topk);
#pragma unroll 4
  for (int i = thread; i < args.blocks * topk; i += kMergeThreads) {
    lists[i] = __ldcg(args.keys + (static_cast<std::int64_t>(i / topk) * kMaxTokens + row) * topk + i % topk);
  }
  float maximum = kMinusInfinity;
  float sum = 0;
#pragma unroll 4
  for (int i = thread; i < args.blocks; i += kMergeThreads) {
    taken[i] = 0;
    const float2 part = __ldcg(args.stats + static_cast<std::int64_t>(i) * kMaxTokens + row);
    const float next = fmaxf(maximum, part.x);
    if (part.x != kMinusInfinity || part.y != 0) {
      sum = (sum == 0 ? 0.0F : sum * __expf(maximum - next)) + part.y * __expf(part.x - next);
    }
    maximum = next;
  }
  __syncthreads();
  if (thread < 32) {  // the best key holds the largest logit
    std::uint64_t best = 0;
    for (int i = thread; i < args.blocks; i += 32) best = lists[i * topk] > best ? lists[i * topk] : best;
    best = warp_max(best);
    if (thread == 0) shared_maximum = value_of(best);
  }
  __syncthreads();
  const float total = block_sum(sum == 0 ? 0.0F : sum * __expf(maximum - shared_maximum), sums);
  const float log_sum = shared_maximum + logf(total);

  const bool finite = isfinite(log_sum);
  const bool inside = lane < batch_size;
  if (thread == 0 && inside && status == static_cast<int>(LaneStatus::kLive) && !finite) {
    args.context.lanes.status[lane] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
  }
  if (thread < 32 && finite) {
    for (int rank = 0; rank < topk; ++rank) {
      std::uint64_t best = 0;
      int from = 0;
      for (int i = thread; i < args.blocks; i += 32) {
        const std::uint64_t key = taken[i] < topk ? lists[i * topk + taken[i]] : 0;
        if (key > best) best = key, from = i;
      }
      const std::uint64_t winner = warp_max(best);
      if (winner == best && winner != 0) ++taken[from];  // keys are unique: one lane
      if (thread == 0) {
        const std::int64_t at = static_cast<std::int64_t>(row) * topk + rank;
        args.context.lanes.top_ids[at] = id_of(winner);
        // Never above 0, whatever the rounding: a child must not outrank its parent.
        args.context.lanes.top_scores[at] = fminf(0.0F, value_of(winner) - log_sum);
      }
    }
  }
  if (args.selects && thread == 0 && inside) select(args, lane);
  if (args.hidden != nullptr) replace_by_norm(args, row, sums);
}

}  // namespace

void launch_head_merge(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                       const EngineContext& context, const DraftBatch* batch, cudaStream_t stream) {
  const int topk = context.speculation.topk;
  expect(select == nullptr || topk == 1, ErrorCode::kConfig, "topk", "1, for select in the same kernel", topk);
  MergeArgs args{};
  args.context = context;
  args.batch = batch;
  args.rows = params.rows;
  args.blocks = blocks;
  args.keys = plan.head_keys;
  args.stats = plan.head_stats;
  if (context.config.next_hidden == NextHidden::kNormed) args.hidden = static_cast<bf16*>(params.hidden);
  args.norm = params.norm.as<const bf16>();
  args.selects = select != nullptr;
  args.needed = plan.needed;
  args.drafting = plan.drafting;
  if (select != nullptr) args.select = *select;
  const int shared = blocks * topk * static_cast<int>(sizeof(std::uint64_t)) + blocks * static_cast<int>(sizeof(int));
  launch_chained(plan, head_merge, dim3(static_cast<unsigned>(params.rows.max_rows)), kMergeThreads, shared, stream,
                 args);
}

}  // namespace eaglex::stream
