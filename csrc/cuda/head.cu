// head: top-k of log-softmax(logits), ties to the lowest id, or one token drawn at the request's temperature by inverse
// CDF; logits that are not finite make the lane kNotFinite (reference.draft, top_k, sample).
// Caller: once per step, behind the final norm and lm_head (gemm).
// Bytes: rows · Vd · 4 of logits; with rejection sampling three times, and Vd · 4 of probabilities written. Where the best
// are made exact first (reference.py: rescore) as many rows of lm_head.
// Mapping: one CTA per row and segment of 2048 ids, then one per row that merges; one CTA per row when sampling.
#include "core/rescore.h"
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
__host__ __device__ int partial_floats(int candidates) {
  return 2 + 2 * candidates;
}
// Of each segment.
__host__ __device__ int candidates_of(const SpeculationConfig& speculation, HeadScores scores) {
  return scores == HeadScores::kMadeExact ? rescored(speculation.topk) : speculation.topk;
}
__host__ __device__ HeadScores scores_of(const HeadOutput& p) {
  return p.rescore_rows == nullptr ? HeadScores::kAsTheyAre : HeadScores::kMadeExact;
}

__device__ float* partial_of(const Chain& chain, const HeadOutput& p, std::int64_t local, int segment) {
  const int candidates = candidates_of(chain.context.speculation, scores_of(p));
  return p.partial + (local * segments_of(chain.context.config) + segment) * partial_floats(candidates);
}

// Each group of 64 ids offers its best; the others become nothing.
__device__ void keep_offered(Ranked (&values)[kPerThread], int offers) {
  static_assert(kThreads % kRescoreGroup == 0, "a group is of one round");
  __shared__ float all[kSegment];
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = 0; i < kPerThread; ++i) all[i * kThreads + thread] = values[i].value;
  __syncthreads();
  for (int i = 0; i < kPerThread; ++i) {
    const int place = i * kThreads + thread;
    const int group = place / kRescoreGroup * kRescoreGroup;
    int before = 0;
    for (int at = group; at < group + kRescoreGroup; ++at)
      before += comes_before({all[at], at}, {values[i].value, place}) ? 1 : 0;
    if (before >= offers) values[i] = {};
  }
}

__global__ void __launch_bounds__(kThreads)
    rank_segment_kernel(const __grid_constant__ Chain chain, const __grid_constant__ HeadOutput p) {
  __shared__ Ranked ranked[kWarps];
  __shared__ double sums[kWarps];
  const std::int64_t local = blockIdx.y;
  const RowPlace place = locate(chain.context, *chain.batch, p.range.rows, p.range.first + local);
  if (!place.live) return;
  const int vocab = chain.context.config.draft_vocab_size;
  const int candidates = candidates_of(chain.context.speculation, scores_of(p));
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
  for (int rank = 0; rank < candidates; ++rank) {
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
      if (p.rescore_rows != nullptr)
        keep_offered(values, group_offers(chain.context.speculation.topk));  // the best is among them
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (values[i].index == best.index) values[i] = {};
    }
    if (threadIdx.x == 0) {
      partial[2 + rank] = best.value;
      partial[2 + candidates + rank] = __int_as_float(best.index);
    }
  }
}

// The first of all segments' candidates behind `last`, in every thread.
__device__ Ranked next_candidate(const Chain& chain, const HeadOutput& p, std::int64_t local, const Ranked& last,
                                 Ranked* shared) {
  const int candidates = candidates_of(chain.context.speculation, scores_of(p));
  Ranked best;
  for (int i = static_cast<int>(threadIdx.x); i < segments_of(chain.context.config) * candidates;
       i += static_cast<int>(blockDim.x)) {
    const float* const partial = partial_of(chain, p, local, i / candidates);
    const Ranked candidate{partial[2 + i % candidates], __float_as_int(partial[2 + candidates + i % candidates])};
    if (comes_before(last, candidate) && comes_before(candidate, best)) best = candidate;
  }
  return block_first(best, shared);
}

constexpr int kMostExact = rescored(kMaxTopk);
constexpr Ranked kBeforeAll{INFINITY, -1};

// What is drafted from where the best of a scan are made exact.
struct Exact {
  int ids[kMostExact];  // in the order of the scan; INT32_MAX behind the last
  float scanned[kMostExact];
  float scores[kMostExact];
};

__device__ bool is_there(const Chain& chain, const HeadOutput& p, const Exact& exact, int i) {
  return i < candidates_of(chain.context.speculation, scores_of(p)) &&
         exact.ids[i] < chain.context.config.draft_vocab_size;
}

// By the whole block, whose warps share the products out. A scan that is not finite stays so.
__device__ void make_exact(const Chain& chain, const HeadOutput& p, std::int64_t local, Exact& exact, Ranked* shared) {
  const int count = candidates_of(chain.context.speculation, scores_of(p));
  Ranked last = kBeforeAll;
  for (int i = 0; i < count; ++i) {
    last = next_candidate(chain, p, local, last, shared);
    if (threadIdx.x == 0) exact.ids[i] = last.index, exact.scanned[i] = exact.scores[i] = last.value;
  }
  __syncthreads();
  const std::int64_t width = chain.context.config.hidden_size;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (int i = static_cast<int>(threadIdx.x) / kWarp; i < count; i += warps) {
    const std::int64_t id = exact.ids[i];
    if (!is_there(chain, p, exact, i) || exact.scanned[i] == INFINITY) continue;
    float sum = 0;
    for (std::int64_t k = threadIdx.x % kWarp; k < width; k += kWarp)
      sum += load_float(p.x, p.type, local * width + k) * load_float(p.rescore_rows, p.type, id * width + k);
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (threadIdx.x % kWarp == 0) exact.scores[i] = sum;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    merge_segments_kernel(const __grid_constant__ Chain chain, const __grid_constant__ HeadOutput p) {
  __shared__ Ranked ranked[kWarps];
  __shared__ double sums[kWarps];
  __shared__ Exact exact;
  const EngineContext& context = chain.context;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  const RowPlace place = locate(context, *chain.batch, p.range.rows, row);
  if (__syncthreads_or(place.live ? 1 : 0) == 0) return;  // another row of the lane may change its status meanwhile
  const int thread = static_cast<int>(threadIdx.x);
  const int topk = context.speculation.topk;
  const int segments = segments_of(context.config);
  const bool rescores = p.rescore_rows != nullptr;
  if (rescores) make_exact(chain, p, local, exact, ranked);
  const bool holds = rescores && is_there(chain, p, exact, thread);
  const Ranked own = holds ? Ranked{exact.scores[thread], exact.ids[thread]} : Ranked{};
  Ranked last = kBeforeAll;
  float top = -INFINITY;
  for (int rank = 0; rank < topk; ++rank) {
    last = rescores ? block_first(comes_before(last, own) ? own : Ranked{}, ranked)
                    : next_candidate(chain, p, local, last, ranked);
    if (rank == 0) top = last.value;
    if (thread == 0) {
      context.lanes.top_ids[row * topk + rank] = last.index;
      context.lanes.top_scores[row * topk + rank] = last.value;
    }
  }
  double sum = 0;
  const auto share = [top](double value) { return exp(value - static_cast<double>(top)); };
  for (int i = thread; i < segments; i += kThreads) {
    const float* const partial = partial_of(chain, p, local, i);
    if (partial[1] != 0.0F) sum += partial[1] * share(partial[0]);
  }
  if (rescores) {  // what was made exact counts as that alone
    const double scan = block_sum(sum, sums);
    const double old =
        block_sum(holds && exact.scanned[thread] != -INFINITY ? share(exact.scanned[thread]) : 0.0, sums);
    sum = holds && own.value != -INFINITY ? share(own.value) : 0.0;
    if (thread == 0) sum += scan - old < 0 ? 0.0 : scan - old;
  }
  const double norm = top + log(block_sum(sum, sums));
  if (thread != 0) return;
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
  __shared__ Exact exact;
  const EngineContext& context = chain.context;
  const DraftBatch& batch = *chain.batch;
  const std::int64_t local = blockIdx.x;
  const std::int64_t row = p.range.first + local;
  const RowPlace place = locate(context, batch, p.range.rows, row);
  if (!place.live) return;
  const int vocab = context.config.draft_vocab_size;
  const int thread = static_cast<int>(threadIdx.x);
  float* const logits = p.logits + local * vocab;
  const float temperature = batch.temperatures[place.lane];
  const bool sampled = temperature > 0;
  const double scale = sampled ? 1.0 / temperature : 1.0;
  Ranked first;  // what is drafted at temperature 0
  if (p.rescore_rows != nullptr) {
    make_exact(chain, p, local, exact, ranked);
    if (is_there(chain, p, exact, thread)) {
      first = {exact.scores[thread], exact.ids[thread]};
      logits[first.index] = first.value;
    }
    first = block_first(first, ranked);
    __syncthreads();
  }

  Ranked best;
  for (int i = thread; i < vocab; i += kDrawThreads) {
    const Ranked candidate{logits[i], i};
    if (comes_before(candidate, best)) best = candidate;
  }
  best = block_first(best, ranked);
  if (p.rescore_rows == nullptr) first = best;
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
    probs[i] = sampled ? static_cast<float>(exp(logits[i] * scale - norm)) : i == first.index ? 1.0F : 0.0F;
  }
  __syncthreads();
  const float uniform = batch.uniforms[static_cast<std::int64_t>(place.lane) * steps + p.draft_step];
  const int id = sampled ? draw(probs, vocab, uniform, sums) : first.index;
  if (thread != 0) return;
  context.lanes.top_ids[row] = id;
  context.lanes.top_scores[row] = static_cast<float>(logits[id] * scale - norm);
}

}  // namespace

std::size_t head_partial_floats(const EngineContext& context, HeadScores scores) {
  return static_cast<std::size_t>(segments_of(context.config)) *
         static_cast<std::size_t>(partial_floats(candidates_of(context.speculation, scores)));
}

void launch_head_output(const Chain& chain, const HeadOutput& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.range.count);
  const auto segments = static_cast<unsigned>(segments_of(chain.context.config));
  const bool draws = chain.context.speculation.sampling == Sampling::kRejection;
  if (!draws || params.rescore_rows != nullptr)
    launch("head rank", rank_segment_kernel, {dim3(segments, rows), kThreads, 0, stream}, chain, params);
  if (draws) return launch("head draw", draw_kernel, {dim3(rows), kDrawThreads, 0, stream}, chain, params);
  launch("head merge", merge_segments_kernel, {dim3(rows), kThreads, 0, stream}, chain, params);
}

}  // namespace eaglex::cuda
