// head: top-k of log-softmax(logits), ties to the lowest id, or one token drawn at the request's temperature by inverse
// CDF; logits that are not finite make the lane kNotFinite (reference.draft, top_k, sample).
// Caller: once per step, behind the final norm and lm_head (gemm).
// Bytes: rows · Vd · 4 of logits; with rejection sampling three times, and Vd · 4 of probabilities written.
// Mapping: one CTA per row and segment of 2048 ids, then one per row that merges; one CTA per row when sampling.
#include "cuda/kernels.h"

namespace eaglex::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 8;
constexpr int kSegment = kThreads * kPerThread;
constexpr int kDrawThreads = 1024;

__host__ __device__ int segments_of(const DraftConfig& config) {
  return ceil_div(config.draft_vocab_size, kSegment);
}
__host__ __device__ int partial_floats(int topk) {
  return 2 + 2 * topk;
}

__device__ float* partial_of(const Chain& chain, const HeadOutput& p, std::int64_t local, int segment) {
  return p.partial +
         (local * segments_of(chain.context.config) + segment) * partial_floats(chain.context.speculation.topk);
}

__global__ void __launch_bounds__(kThreads)
    rank_segment_kernel(const __grid_constant__ Chain chain, const __grid_constant__ HeadOutput p) {
  __shared__ Ranked ranked[kWarps];
  __shared__ double sums[kWarps];
  const std::int64_t local = blockIdx.y;
  const RowPlace place = locate(chain.context, *chain.batch, p.range.rows, p.range.first + local);
  if (!place.live) return;
  const int vocab = chain.context.config.draft_vocab_size;
  const int topk = chain.context.speculation.topk;
  const float* const logits = p.logits + local * vocab;
  const int base = static_cast<int>(blockIdx.x) * kSegment;
  Ranked values[kPerThread];
  double sum = 0;
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = base + i * kThreads + static_cast<int>(threadIdx.x);
    if (id < vocab) values[i] = {logits[id], id};
    nan = nan || isnan(values[i].value);
  }
  float* const partial = partial_of(chain, p, local, static_cast<int>(blockIdx.x));
  for (int rank = 0; rank < topk; ++rank) {
    Ranked best;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (comes_before(values[i], best)) best = values[i];
    }
    best = block_first(best, ranked);
    if (rank == 0) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (values[i].value != -INFINITY) sum += expf(values[i].value - best.value);
      }
      sum = block_sum(nan ? static_cast<double>(NAN) : sum, sums);
      if (threadIdx.x == 0) {
        partial[0] = best.value;
        partial[1] = static_cast<float>(sum);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (values[i].index == best.index) values[i] = {};
    }
    if (threadIdx.x == 0) {
      partial[2 + rank] = best.value;
      partial[2 + topk + rank] = __int_as_float(best.index);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    merge_segments_kernel(const __grid_constant__ Chain chain, const __grid_constant__ HeadOutput p) {
  __shared__ Ranked ranked[kWarps];
  __shared__ double sums[kWarps];
  const EngineContext& context = chain.context;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  const RowPlace place = locate(context, *chain.batch, p.range.rows, row);
  if (__syncthreads_or(place.live ? 1 : 0) == 0) return;  // another row of the lane may change its status meanwhile
  const int topk = context.speculation.topk;
  const int segments = segments_of(context.config);
  Ranked last{INFINITY, -1};
  float top = -INFINITY;
  for (int rank = 0; rank < topk; ++rank) {
    Ranked best;
    for (int i = static_cast<int>(threadIdx.x); i < segments * topk; i += kThreads) {
      const float* const partial = partial_of(chain, p, local, i / topk);
      const Ranked candidate{partial[2 + i % topk], __float_as_int(partial[2 + topk + i % topk])};
      if (comes_before(last, candidate) && comes_before(candidate, best)) best = candidate;
    }
    best = block_first(best, ranked);
    last = best;
    if (rank == 0) top = best.value;
    if (threadIdx.x == 0) {
      context.lanes.top_ids[row * topk + rank] = best.index;
      context.lanes.top_scores[row * topk + rank] = best.value;
    }
  }
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < segments; i += kThreads) {
    const float* const partial = partial_of(chain, p, local, i);
    if (partial[1] != 0.0F) sum += partial[1] * exp(static_cast<double>(partial[0]) - static_cast<double>(top));
  }
  const double norm = top + log(block_sum(sum, sums));
  if (threadIdx.x != 0) return;
  if (!isfinite(norm)) {
    context.lanes.status[place.lane] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
    return;
  }
  for (int rank = 0; rank < topk; ++rank) {
    // A log-probability is never above 0, whatever the rounding: a child must not outrank its parent.
    float& score = context.lanes.top_scores[row * topk + rank];
    score = fminf(0.0F, static_cast<float>(score - norm));
  }
}

// The first id whose running probability exceeds uniform · total; each thread sums a run of ids, thread 0 finds the
// run.
__device__ int draw(const float* probs, int count, float uniform, double* running) {
  const int thread = static_cast<int>(threadIdx.x);
  const int run = ceil_div(count, kDrawThreads);
  const int begin = min(thread * run, count), end = min(begin + run, count);
  double sum = 0;
  for (int i = begin; i < end; ++i) sum += probs[i];
  running[thread] = sum;
  __syncthreads();
  if (thread != 0) return 0;
  double total = 0;
  int last_run = 0;
  for (int t = 0; t < kDrawThreads; ++t) {
    if (running[t] > 0) last_run = t;
    total += running[t];
  }
  const double target = uniform * total;
  double before = 0;
  int chosen = 0;
  while (chosen < last_run && before + running[chosen] <= target) before += running[chosen++];
  int last = 0;
  for (int i = chosen * run; i < min(chosen * run + run, count); ++i) {
    if (probs[i] > 0) last = i;
    before += probs[i];
    if (before > target) return i;
  }
  return last;
}

__global__ void __launch_bounds__(kDrawThreads)
    draw_kernel(const __grid_constant__ Chain chain, const __grid_constant__ HeadOutput p) {
  __shared__ Ranked ranked[kDrawThreads / kWarp];
  __shared__ double sums[kDrawThreads];
  const EngineContext& context = chain.context;
  const DraftBatch& batch = *chain.batch;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  const RowPlace place = locate(context, batch, p.range.rows, row);
  if (!place.live) return;
  const int vocab = context.config.draft_vocab_size;
  const int thread = static_cast<int>(threadIdx.x);
  const float* const logits = p.logits + local * vocab;
  const float temperature = batch.temperatures[place.lane];
  const bool sampled = temperature > 0;
  const double scale = sampled ? 1.0 / temperature : 1.0;

  Ranked best;
  for (int i = thread; i < vocab; i += kDrawThreads) {
    const Ranked candidate{logits[i], i};
    if (comes_before(candidate, best)) best = candidate;
  }
  best = block_first(best, ranked);
  double sum = 0;
  for (int i = thread; i < vocab; i += kDrawThreads) {
    if (logits[i] != -INFINITY) sum += exp((static_cast<double>(logits[i]) - best.value) * scale);
  }
  const double norm = best.value * scale + log(block_sum(sum, sums));
  if (!isfinite(norm)) {
    if (thread == 0) context.lanes.status[place.lane] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
    return;
  }
  const std::int64_t slot = batch.req_pool_indices[place.lane];
  const int steps = context.speculation.num_steps;
  float* const probs = context.results.draft_probs + (slot * steps + p.draft_step) * vocab;
  for (int i = thread; i < vocab; i += kDrawThreads) {
    // Temperature 0: all mass on the best.
    probs[i] = sampled ? static_cast<float>(exp(logits[i] * scale - norm)) : i == best.index ? 1.0F : 0.0F;
  }
  __syncthreads();
  const float uniform = batch.uniforms[static_cast<std::int64_t>(place.lane) * steps + p.draft_step];
  const int id = sampled ? draw(probs, vocab, uniform, sums) : best.index;
  if (thread != 0) return;
  context.lanes.top_ids[row] = id;
  context.lanes.top_scores[row] = static_cast<float>(logits[id] * scale - norm);
}

}  // namespace

std::size_t head_partial_floats(const EngineContext& context) {
  return static_cast<std::size_t>(segments_of(context.config)) *
         static_cast<std::size_t>(partial_floats(context.speculation.topk));
}

void launch_head_output(const Chain& chain, const HeadOutput& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.range.count);
  if (chain.context.speculation.sampling == Sampling::kRejection) {
    return launch("head draw", draw_kernel, {dim3(rows), kDrawThreads, 0, stream}, chain, params);
  }
  const auto segments = static_cast<unsigned>(segments_of(chain.context.config));
  launch("head rank", rank_segment_kernel, {dim3(segments, rows), kThreads, 0, stream}, chain, params);
  launch("head merge", merge_segments_kernel, {dim3(rows), kThreads, 0, stream}, chain, params);
}

}  // namespace eaglex::cuda
