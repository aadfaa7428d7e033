// What follows once a row's best of the vocabulary are known, whoever found them (head_merge.cu, head_rescore.cu): their
// log-probabilities, for a chain select_lane, for some drafts the norm as the next hidden state.
#pragma once

#include "core/select.h"
#include "cuda/stream/launch.cuh"
#include "cuda/stream/ranking.cuh"

namespace eaglex::stream {

struct HeadEnd {
  EngineContext context;
  const DraftBatch* batch;
  Rows rows;
  bf16* hidden;  // to be replaced by its norm, or null
  const bf16* norm;
  const std::int32_t* needed;
  bool selects;
  SelectParams select;
  const bf16* embed_tokens;  // null: unknown, or not needed
  const bf16* products;      // StreamPlan::token_products; null: not known
  std::int32_t* drafting;    // raised where the lane drafts in the next step
};

inline constexpr int kEndThreads = 64;  // with 64 registers each head_merge fits an SM beside two blocks of bf16
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

// Sum over the block, the same in every thread and every run.
__device__ inline float block_sum(float x, float* shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kEndThreads / 32; ++i) sum += shared[i];
  return sum;
}

// NextHidden::kNormed: what the next step reads.
__device__ inline void replace_by_norm(const HeadEnd& args, int row, float* sums) {
  const int size = args.context.config.hidden_size;
  bf16* const hidden = args.hidden + static_cast<std::int64_t>(row) * size;
  float squares = 0;
  for (int i = threadIdx.x; i < size; i += kEndThreads) {
    const float x = __bfloat162float(hidden[i]);
    squares += x * x;
  }
  const float norm = rsqrtf(block_sum(squares, sums) / static_cast<float>(size) + args.context.config.rms_norm_eps);
  for (int i = threadIdx.x; i < size; i += kEndThreads) {
    hidden[i] = __float2bfloat16(__bfloat162float(hidden[i]) * norm * __bfloat162float(args.norm[i]));
  }
}

__device__ inline void select(const HeadEnd& args, int lane) {
  const LaneStatus status = select_lane(args.context, *args.batch, args.select, lane);
  if (args.select.draft_step + 1 < args.context.speculation.num_steps) {
    if (status == LaneStatus::kLive) args.drafting[args.select.draft_step + 1] = 1;
    return;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(args.context.results.counters) + static_cast<int>(status), 1ULL);
}

__device__ inline std::int64_t token_of(const HeadEnd& args, int id) {
  return args.select.d2t == nullptr ? id : id + __ldg(args.select.d2t + id);
}

// What a chain's step has found in one lane.
struct Found {
  int lane;
  LaneStatus status;
  std::int64_t token;  // of the target's vocabulary, if the draft's d2t is right
  int id;              // of the draft's
  float log_probability;
  float score_before;  // of the chain so far
};

// Row `at` of `width` elements into L2, by a whole warp.
__device__ inline void fetch_row(const bf16* rows, std::int64_t at, int width) {
  constexpr int kLine = 64;  // elements of 128 bytes
  const bf16* const row = rows + at * width;
  for (int i = static_cast<int>(threadIdx.x % 32) * kLine; i < width; i += 32 * kLine) touch_l2(row + i);
}

// select_lane where a chain goes on, which is nearly always: the same values with one read that must be waited for
// instead of seven in a row. By a whole warp; returns false, with nothing written, where select_lane must do it.
__device__ inline bool advance_chain(const HeadEnd& args, const Found& found) {
  const EngineContext& context = args.context;
  const LaneState& state = context.lanes;
  const int step = args.select.draft_step;
  if (step + 1 >= context.speculation.num_steps || found.status != LaneStatus::kLive) return false;
  const float score = found.score_before + found.log_probability;
  const std::int64_t token = found.token;
  if (score < context.speculation.stop_score || token < 0 || token >= context.config.vocab_size) return false;
  const int thread = threadIdx.x % 32;
  if (args.products != nullptr) {  // qkv of the next step would wait for the memory behind its own weights
    fetch_row(args.products, found.id, token_product_width(context.config));
  } else if (args.embed_tokens != nullptr) {
    fetch_row(args.embed_tokens, token, context.config.hidden_size);
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

__device__ inline void write_top(const HeadEnd& args, int row, int rank, std::uint64_t key, float log_sum) {
  const std::int64_t at = static_cast<std::int64_t>(row) * args.context.speculation.topk + rank;
  args.context.lanes.top_ids[at] = id_of(key);
  // Never above 0, whatever the rounding: a child must not outrank its parent.
  args.context.lanes.top_scores[at] = fminf(0.0F, value_of(key) - log_sum);
}

inline HeadEnd head_end_of(const StreamPlan& plan, const HeadParams& params, const SelectParams* select,
                           const EngineContext& context, const DraftBatch* batch) {
  expect(select == nullptr || context.speculation.topk == 1, ErrorCode::kConfig, "topk",
         "1, for select in the same kernel", context.speculation.topk);
  HeadEnd end{};
  end.context = context;
  end.batch = batch;
  end.rows = params.rows;
  if (context.config.next_hidden == NextHidden::kNormed) end.hidden = static_cast<bf16*>(params.hidden);
  end.norm = params.norm.as<const bf16>();
  end.needed = plan.needed;
  end.selects = select != nullptr;
  if (select != nullptr) end.select = *select;
  end.embed_tokens = static_cast<const bf16*>(plan.embed_tokens);
  end.products = plan.token_products;
  end.drafting = plan.drafting;
  return end;
}

}  // namespace eaglex::stream
