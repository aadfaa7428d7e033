// select: one step's top-k joins the grid of candidates, the k best are the next frontier; after the last step the N - 1
// best of all become the slot's result (core/select.h, reference.select).
// Caller: once per step; with num_steps = 0 once per cycle, to say "no draft".
// Bytes: under 100 KB per lane, most of it from L2.
// Mapping: a chain takes a thread per lane (core's select_lane as it is), a tree a CTA per lane, a reduction per choice.
#include "core/select.h"

#include "cuda/kernels.h"

namespace eaglex::cuda {
namespace {

constexpr int kChainThreads = 32;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxCandidates = kMaxTopk + (kMaxSteps - 1) * kMaxTopk * kMaxTopk;
constexpr int kPerThread = (kMaxCandidates + kThreads - 1) / kThreads;

__device__ void count_lane(const EngineContext& context, LaneStatus status) {
  static_assert(sizeof(std::int64_t) == sizeof(unsigned long long));
  atomicAdd(reinterpret_cast<unsigned long long*>(context.results.counters) + static_cast<int>(status), 1ULL);
}

__device__ bool is_last_step(const EngineContext& context, const SelectParams& params) {
  return params.draft_step + 1 >= context.speculation.num_steps;
}

__global__ void __launch_bounds__(kChainThreads)
    select_chain_kernel(const __grid_constant__ Chain chain, SelectParams params) {
  const auto lane = static_cast<std::int32_t>(blockIdx.x * kChainThreads + threadIdx.x);
  if (lane >= chain.batch->batch) return;
  const LaneStatus status = select_lane(chain.context, *chain.batch, params, lane);
  if (is_last_step(chain.context, params)) {
    count_lane(chain.context, status);
  } else if (status == LaneStatus::kLive) {
    chain.drafting[params.draft_step + 1] = 1;
  }
}

// core's grow_grid, one thread per candidate; false where a token is outside the vocabulary.
__device__ bool grow_grid_block(const EngineContext& context, const SelectParams& params, std::int32_t lane) {
  const LaneState& state = context.lanes;
  const int k = context.speculation.topk;
  const int width = params.draft_step == 0 ? 1 : k;
  const std::int64_t base = static_cast<std::int64_t>(lane) * context.speculation.num_candidates() +
                            grid_base(context.speculation, params.draft_step);
  int sound = 1;
  for (int at = static_cast<int>(threadIdx.x); at < width * k; at += kThreads) {
    const std::int64_t top = static_cast<std::int64_t>(lane) * width * k + at;
    const std::int64_t node = static_cast<std::int64_t>(lane) * k + at / k;
    const std::int64_t id = state.top_ids[top];
    const std::int64_t token = params.d2t == nullptr ? id : id + params.d2t[id];
    if (token < 0 || token >= context.config.vocab_size) sound = 0;
    state.grid_tokens[base + at] = token;
    state.grid_parents[base + at] = params.draft_step == 0 ? 0 : state.frontier_nodes[node];
    state.grid_scores[base + at] =
        (params.draft_step == 0 ? 0.0F : state.frontier_scores[node]) + state.top_scores[top];
    state.grid_nodes[base + at] = 0;
  }
  return __syncthreads_and(sound) != 0;
}

// core's choose_frontier: k reductions over the step's candidates, then one thread per frontier node. Returns the best
// score.
__device__ float choose_frontier_block(const EngineContext& context, const SelectParams& params, std::int32_t lane,
                                       Ranked* shared) {
  __shared__ Ranked chosen[kMaxTopk];
  const LaneState& state = context.lanes;
  const int k = context.speculation.topk;
  const int steps = context.speculation.num_steps;
  const int candidates = params.draft_step == 0 ? k : k * k;  // at most 256, one per thread
  const int base = grid_base(context.speculation, params.draft_step);
  const std::int64_t grid = static_cast<std::int64_t>(lane) * context.speculation.num_candidates() + base;
  const int thread = static_cast<int>(threadIdx.x);
  Ranked mine;
  if (thread < candidates) mine = {state.grid_scores[grid + thread], thread};
  for (int i = 0; i < k; ++i) {
    const Ranked best = block_first(mine, shared);
    if (mine.index == best.index) mine = {};
    if (thread == 0) chosen[i] = best;
  }
  __syncthreads();
  if (thread >= k) return chosen[0].value;
  const Ranked best = chosen[thread];
  const std::int64_t node = static_cast<std::int64_t>(lane) * k + thread;
  const int parent_row = best.index / k;
  state.frontier_tokens[node] = state.grid_tokens[grid + best.index];
  state.frontier_nodes[node] = base + best.index + 1;
  state.frontier_scores[node] = best.value;
  state.frontier_parents[node] = parent_row;
  const std::int32_t* const before =
      state.ancestors[(params.draft_step + 1) % 2] + (static_cast<std::int64_t>(lane) * k + parent_row) * steps;
  std::int32_t* const after = state.ancestors[params.draft_step % 2] + node * steps;
  for (int depth = 0; depth < params.draft_step; ++depth) after[depth] = before[depth];
  after[params.draft_step] = params.draft_step * k + thread;
  return chosen[0].value;
}

// core's write_result: `count` reductions over the whole grid, then nodes numbered in grid order.
__device__ void write_result_block(const EngineContext& context, std::int32_t lane, std::int64_t slot, Ending ending,
                                   Ranked* shared) {
  __shared__ int kept_before[kThreads];
  const LaneState& state = context.lanes;
  const int candidates = ending.candidates;
  const std::int64_t grid = static_cast<std::int64_t>(lane) * context.speculation.num_candidates();
  const int thread = static_cast<int>(threadIdx.x);
  const int run =
      ceil_div(candidates, kThreads);  // a thread's candidates lie together, so that numbering is a scan over threads
  Ranked mine[kPerThread];
  std::uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int c = thread * run + i;
    if (i < run && c < candidates) mine[i] = {state.grid_scores[grid + c], c};
  }
  for (int n = 0; n < ending.count; ++n) {
    Ranked best;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (comes_before(mine[i], best)) best = mine[i];
    }
    best = block_first(best, shared);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (mine[i].index == best.index && best.index < candidates) {
        mine[i] = {};
        kept |= 1U << i;
      }
    }
  }
  kept_before[thread] = __popc(kept);
  __syncthreads();
  if (thread == 0) {
    int total = 0;
    for (int t = 0; t < kThreads; ++t) total += std::exchange(kept_before[t], total);
  }
  __syncthreads();
  int node = kept_before[thread];
  for (std::uint32_t bits = kept; bits != 0; bits &= bits - 1)
    state.grid_nodes[grid + thread * run + __ffs(bits) - 1] = ++node;
  __syncthreads();  // a parent's number may be another thread's
  node = kept_before[thread];
  const std::int64_t out = slot * (context.speculation.num_draft_tokens - 1);
  for (std::uint32_t bits = kept; bits != 0; bits &= bits - 1, ++node) {
    const std::int64_t c = grid + thread * run + __ffs(bits) - 1;
    const std::int32_t parent = state.grid_parents[c];
    context.results.draft_tokens[out + node] = state.grid_tokens[c];
    context.results.parents[out + node] = parent == 0 ? 0 : state.grid_nodes[grid + parent - 1];
    context.results.scores[out + node] = state.grid_scores[c];
  }
}

// core's select_lane with a CTA behind each of its parts.
__global__ void __launch_bounds__(kThreads)
    select_tree_kernel(const __grid_constant__ Chain chain, SelectParams params) {
#if __CUDA_ARCH__ >= 900
  // The next step's qkv may fetch its weights meanwhile. Nothing is read before the head is done.
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
  __shared__ Ranked shared[kWarps];
  const EngineContext& context = chain.context;
  const DraftBatch& batch = *chain.batch;
  const auto lane = static_cast<std::int32_t>(blockIdx.x);
  if (lane >= batch.batch) return;
  const bool drafts = context.speculation.num_steps > 0;
  LaneStatus status = status_of(context, lane);
  __syncthreads();  // before thread 0 changes it
  if (status == LaneStatus::kStopped) {
    if (is_last_step(context, params) && threadIdx.x == 0) count_lane(context, status);
    return;
  }
  if (status == LaneStatus::kLive && drafts && !grow_grid_block(context, params, lane)) {
    status = LaneStatus::kBadIndex;
    if (threadIdx.x == 0) context.lanes.status[lane] = static_cast<std::int32_t>(status);
  }
  if (!is_last_step(context, params)) {
    if (status != LaneStatus::kLive) return;
    if (!(choose_frontier_block(context, params, lane, shared) < context.speculation.stop_score)) {
      if (threadIdx.x == 0) chain.drafting[params.draft_step + 1] = 1;
      return;
    }
    status = LaneStatus::kStopped;
    if (threadIdx.x == 0) context.lanes.status[lane] = static_cast<std::int32_t>(status);
  } else if (threadIdx.x == 0) {
    count_lane(context, status);
  }
  const std::int64_t slot = batch.req_pool_indices[lane];
  if (slot <= 0 || slot >= context.limits.num_slots) return;
  const Ending ending = ending_of(context.speculation, status, params.draft_step);
  if (ending.count > 0) write_result_block(context, lane, slot, ending, shared);
  if (threadIdx.x != 0) return;
  context.results.num_nodes[slot] = ending.count;
  context.results.drafted_for[slot] = context.lanes.new_len[lane];
}

}  // namespace

void launch_select(const Chain& chain, const SelectParams& params, int lanes, Begin begin, cudaStream_t stream) {
  if (chain.context.speculation.topk == 1) {
    const auto blocks = static_cast<unsigned>(ceil_div(lanes, kChainThreads));
    return launch("select", select_chain_kernel, {dim3(blocks), kChainThreads, 0, stream}, chain, params);
  }
  launch("select", select_tree_kernel, {dim3(static_cast<unsigned>(lanes)), kThreads, 0, stream, begin}, chain, params);
}

}  // namespace eaglex::cuda
