// head, second half: the blocks' best and Σ exp of each row together; for a chain select_lane as well.
// Formula: reference.py head, top_k, select.
// Caller: Backend::head, or Backend::select for a chain.    Bytes: 8 · topk + 8 per block of the head and row, from L2.
// Mapping: one block per row; at topk 1 small enough to run beside two blocks of a matrix. All orders are fixed. The
// whole step waits for this kernel: all reads that need not follow each other are under way at once.
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
  const bf16* embed_tokens;  // null: unknown
  std::int32_t* drafting;    // raised where the lane drafts in the next step
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

// What a chain's step has found in one lane.
struct Found {
  int lane;
  LaneStatus status;
  int id;
  float log_probability;
  float score_before;  // of the chain so far
};

// select_lane where a chain goes on, which is nearly always: the same values with one read that must be waited for
// instead of seven in a row. By a whole warp; returns false, with nothing written, where select_lane must do it.
__device__ bool advance_chain(const MergeArgs& args, const Found& found) {
  const EngineContext& context = args.context;
  const LaneState& state = context.lanes;
  const int step = args.select.draft_step;
  if (step + 1 >= context.speculation.num_steps || found.status != LaneStatus::kLive) return false;
  const float score = found.score_before + found.log_probability;
  const std::int64_t token = args.select.d2t == nullptr ? found.id : found.id + args.select.d2t[found.id];
  if (score < context.speculation.stop_score || token < 0 || token >= context.config.vocab_size) return false;
  const int thread = threadIdx.x % 32;
  if (args.embed_tokens != nullptr) {  // qkv of the next step would wait for the memory behind its own weights
    constexpr int kLine = 64;          // elements of 128 bytes
    const bf16* const row = args.embed_tokens + token * context.config.hidden_size;
    for (int i = thread * kLine; i < context.config.hidden_size; i += 32 * kLine) touch_l2(row + i);
  }
  const std::int64_t node = found.lane;
  const int steps = context.speculation.num_steps;
  if (thread <= step) state.ancestors[step % 2][node * steps + thread] = thread;  // a chain's are all before it
  if (thread != 0) return true;
  const std::int64_t at = node * context.speculation.num_candidates() + grid_base(context.speculation, step);
  state.grid_tokens[at] = token;
  state.grid_parents[at] = step;
  state.grid_scores[at] = score;
  state.grid_nodes[at] = 0;
  state.frontier_tokens[node] = token;
  state.frontier_nodes[node] = step + 1;
  state.frontier_scores[node] = score;
  state.frontier_parents[node] = 0;
  args.drafting[step + 1] = 1;
  return true;
}

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
  for (int base = threadIdx.x; base < args.blocks; base += kAtOnce * kMergeThreads) {
    std::uint64_t keys[kAtOnce];
    float2 parts[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = base + j * kMergeThreads;
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
  for (int i = 0; i < kMergeThreads / 32; ++i) merged.best = bests[i] > merged.best ? bests[i] : merged.best;
  const float largest = value_of(merged.best);
  merged.log_sum = largest + logf(block_sum(sum == 0 ? 0.0F : sum * __expf(maximum - largest), sums));
  return merged;
}

__device__ void write_top(const MergeArgs& args, int row, int rank, std::uint64_t key, float log_sum) {
  const std::int64_t at = static_cast<std::int64_t>(row) * args.context.speculation.topk + rank;
  args.context.lanes.top_ids[at] = id_of(key);
  // Never above 0, whatever the rounding: a child must not outrank its parent.
  args.context.lanes.top_scores[at] = fminf(0.0F, value_of(key) - log_sum);
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
  __shared__ float sums[kMergeThreads / 32];
  __shared__ std::uint64_t bests[kMergeThreads / 32];
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
    for (int i = thread; i < args.blocks * topk; i += kMergeThreads) {
      lists[i] = __ldcg(args.keys + (static_cast<std::int64_t>(i / topk) * kMaxTokens + row) * topk + i % topk);
    }
    for (int i = thread; i < args.blocks; i += kMergeThreads) taken[i] = 0;
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
      const Found found{lane, static_cast<LaneStatus>(status), id_of(merged.best),
                        fminf(0.0F, value_of(merged.best) - merged.log_sum), score_before};
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
  args.embed_tokens = static_cast<const bf16*>(plan.embed_tokens);
  if (select != nullptr) args.select = *select;
  const int shared =
      topk == 1 ? 0 : blocks * (topk * static_cast<int>(sizeof(std::uint64_t)) + static_cast<int>(sizeof(int)));
  launch_chained(plan, head_merge, dim3(static_cast<unsigned>(params.rows.max_rows)), kMergeThreads, shared, stream,
                 args);
}

}  // namespace eaglex::stream
