// head: log-probabilities and ids of the topk best of the draft vocabulary.    Formula: reference.py head, top_k (ties:
// lowest id).
// Caller: Backend::head.    Bytes: lm_head once; logits stay on the SM.
// Mapping: gemm.cuh; warp w keeps maximum, Σ exp and the best of tokens w, w + 8, … over the block's tiles; a second
// kernel, one block per token, merges the blocks'. Both orders are fixed, so results repeat bit for bit.
#include "core/lane.h"
#include "cuda/stream/launch.cuh"

namespace eaglex::stream {
namespace {

// Value and id in one number that orders as the candidates do: by value, then by lowest id. NaN ranks last; 0 is
// "none".
__device__ __forceinline__ std::uint64_t key_of(float value, int id) {
  const std::uint32_t bits = __float_as_uint(isnan(value) ? __int_as_float(0xFF800000) : value);
  const std::uint32_t ordered = bits & 0x80000000U ? ~bits : bits | 0x80000000U;
  return static_cast<std::uint64_t>(ordered) << 32 | (0xFFFFFFFFU - static_cast<std::uint32_t>(id));
}
__device__ __forceinline__ int id_of(std::uint64_t key) {
  return static_cast<int>(0xFFFFFFFFU - static_cast<std::uint32_t>(key));
}
__device__ __forceinline__ float value_of(std::uint64_t key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float(ordered & 0x80000000U ? ordered & 0x7FFFFFFFU : ~ordered);
}

template <class T>
__device__ __forceinline__ T warp_max(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(0xFFFFFFFF, x, offset);
    x = other > x ? other : x;
  }
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, offset);
  return x;
}

// What a block knows of one token's logits so far.
struct TokenState {
  std::uint64_t best[kMaxTopk];  // descending
  float maximum;
  float sum;  // Σ exp(logit - maximum); NaN once a logit was NaN or infinite
};

struct HeadStep : PlainStep {
  static constexpr Slot kSlot = Slot::kWide;
  static constexpr bool kNormed = true;
  static constexpr int kStateBytes = 8 * sizeof(TokenState);
  struct Params {
    const bf16* x;
    int k;
    int vocab;
    int topk;
    std::uint64_t* keys;  // [grid, 64, topk]
    float2* stats;        // [grid, 64]
  };

  __device__ static void locate(const Params& params, int token, const bf16** source, int, RowInfo*) {
    *source = params.x + static_cast<std::int64_t>(token) * params.k;
  }

  template <int kTokenTiles>
  __device__ static void begin(std::byte* state) {
    auto* const tokens = reinterpret_cast<TokenState*>(state);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int t = 0; t < kTokenTiles; ++t) {
      TokenState& mine = tokens[t * 8 + warp];
      if (lane < kMaxTopk) mine.best[lane] = 0;
      if (lane == 0) mine.maximum = __int_as_float(0xFF800000), mine.sum = 0;
    }
    __syncwarp();
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<RowInfo>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    constexpr int kRows = tile_rows_for(kTokenTiles);
    constexpr int kStride = kRows + 4;
    auto* const states = reinterpret_cast<TokenState*>(view.state);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      if (t * 8 >= view.tokens) break;
      consumer_barrier();  // the tile before has been read
      if (view.role.half == 0) {
        float* const to =
            view.exchange + view.role.lane % 4 * 2 * kStride + view.role.strip * kStripRows + view.role.lane / 4;
        to[0] = acc[t][0], to[kStride] = acc[t][1], to[8] = acc[t][2], to[kStride + 8] = acc[t][3];
      }
      consumer_barrier();
      if (t * 8 + view.role.warp < view.tokens) {
        take_in<kRows>(params, view.exchange + view.role.warp * kStride, view.tile_row, view.role.lane,
                       states[t * 8 + view.role.warp]);
      }
    }
  }

  template <int kRows>
  __device__ static void take_in(const Params& params, const float* logits, int first_id, int lane, TokenState& state) {
    std::uint64_t keys[kRows / 32];
    float values[kRows / 32];
    float maximum = __int_as_float(0xFF800000);
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
      const int id = first_id + i * 32 + lane;
      const bool inside = id < params.vocab;
      values[i] = inside ? logits[i * 32 + lane] : __int_as_float(0xFF800000);
      keys[i] = inside ? key_of(values[i], id) : 0;
      maximum = fmaxf(maximum, values[i]);
    }
    const float before = state.maximum;
    maximum = fmaxf(before, warp_max(maximum));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i)
      sum += values[i] == __int_as_float(0xFF800000) ? 0.0F : __expf(values[i] - maximum);
    sum = warp_sum(sum) + (before == __int_as_float(0xFF800000) ? 0.0F : state.sum * __expf(before - maximum));

    // Insert what beats the worst of the list, best first; after the first tiles that is rare.
    std::uint64_t best = lane < params.topk ? state.best[lane] : 0;
    std::uint64_t worst = __shfl_sync(0xFFFFFFFF, best, params.topk - 1);
    while (true) {
      std::uint64_t candidate = keys[0];
#pragma unroll
      for (int i = 1; i < kRows / 32; ++i) candidate = keys[i] > candidate ? keys[i] : candidate;
      candidate = warp_max(candidate);
      if (candidate <= worst) break;
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) keys[i] = keys[i] == candidate ? 0 : keys[i];
      const int place = __popc(__ballot_sync(0xFFFFFFFF, best > candidate));
      const std::uint64_t above = __shfl_up_sync(0xFFFFFFFF, best, 1);
      best = lane < place ? best : lane == place ? candidate : above;
      worst = __shfl_sync(0xFFFFFFFF, best, params.topk - 1);
    }
    if (lane < params.topk) state.best[lane] = best;
    if (lane == 0) state.maximum = maximum, state.sum = sum;
    __syncwarp();
  }

  template <int kTokenTiles>
  __device__ static void end(const Params& params, const WarpRole& role, int tokens, std::byte* state) {
    const auto* const states = reinterpret_cast<const TokenState*>(state);
    for (int t = 0; t < kTokenTiles; ++t) {
      const int token = t * 8 + role.warp;
      if (token >= tokens) return;
      const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kMaxTokens + token;
      if (role.lane < params.topk) params.keys[at * params.topk + role.lane] = states[token].best[role.lane];
      if (role.lane == 0) params.stats[at] = make_float2(states[token].maximum, states[token].sum);
    }
  }
};

struct MergeArgs {
  EngineContext context;
  const DraftBatch* batch;
  Rows rows;
  int blocks;  // of the head's grid
  const std::uint64_t* keys;
  const float2* stats;
  bf16* hidden;  // to be replaced by its norm, or null
  const bf16* norm;
};

constexpr int kMergeThreads = 128;  // with 32 registers each it fits an SM beside two matrices

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

__global__ void __maxnreg__(32) head_merge(const __grid_constant__ MergeArgs args) {
  extern __shared__ std::uint64_t lists[];  // [blocks][topk], then [blocks] how many of each are taken
  __shared__ float sums[kMergeThreads / 32];
  release_dependents();
  wait_for_producers();
  const int token = blockIdx.x;
  const int topk = args.context.speculation.topk;
  const int thread = threadIdx.x;
  int* const taken = reinterpret_cast<int*>(lists + args.blocks * topk);
  for (int i = thread; i < args.blocks * topk; i += kMergeThreads) {
    lists[i] = __ldcg(args.keys + (static_cast<std::int64_t>(i / topk) * kMaxTokens + token) * topk + i % topk);
  }
  float maximum = __int_as_float(0xFF800000);
  float sum = 0;
  for (int i = thread; i < args.blocks; i += kMergeThreads) {
    taken[i] = 0;
    const float2 part = __ldcg(args.stats + static_cast<std::int64_t>(i) * kMaxTokens + token);
    const float next = fmaxf(maximum, part.x);
    if (part.x != __int_as_float(0xFF800000) || part.y != 0) {
      sum = (sum == 0 ? 0.0F : sum * __expf(maximum - next)) + part.y * __expf(part.x - next);
    }
    maximum = next;
  }
  __syncthreads();
  __shared__ float shared_maximum;
  if (thread < 32) {  // the best key holds the largest logit
    std::uint64_t best = 0;
    for (int i = thread; i < args.blocks; i += 32) best = lists[i * topk] > best ? lists[i * topk] : best;
    best = warp_max(best);
    if (thread == 0) shared_maximum = value_of(best);
  }
  __syncthreads();
  const float total = block_sum(sum == 0 ? 0.0F : sum * __expf(maximum - shared_maximum), sums);
  const float log_sum = shared_maximum + logf(total);

  const RowPlace place = locate(args.context, *args.batch, args.rows, token);
  const bool finite = isfinite(log_sum);
  if (thread == 0 && place.live && !finite) {
    args.context.lanes.status[place.lane] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
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
        const std::int64_t at = static_cast<std::int64_t>(token) * topk + rank;
        args.context.lanes.top_ids[at] = id_of(winner);
        // Never above 0, whatever the rounding: a child must not outrank its parent.
        args.context.lanes.top_scores[at] = fminf(0.0F, value_of(winner) - log_sum);
      }
    }
  }
  if (args.hidden == nullptr) return;
  const int size = args.context.config.hidden_size;
  bf16* const row = args.hidden + static_cast<std::int64_t>(token) * size;
  float squares = 0;
  for (int i = thread; i < size; i += kMergeThreads) squares += __bfloat162float(row[i]) * __bfloat162float(row[i]);
  const float norm = rsqrtf(block_sum(squares, sums) / static_cast<float>(size) + args.context.config.rms_norm_eps);
  for (int i = thread; i < size; i += kMergeThreads) {
    row[i] = __float2bfloat16(__bfloat162float(row[i]) * norm * __bfloat162float(args.norm[i]));
  }
}

}  // namespace

void launch_head(const StreamPlan& plan, const HeadParams& params, const EngineContext& context,
                 const DraftBatch* batch, cudaStream_t stream) {
  const int topk = context.speculation.topk;
  expect(context.speculation.sampling == Sampling::kGreedy, ErrorCode::kConfig, "sampling", "greedy", "rejection");
  expect_range("topk", topk, 1, plan.needs.topk);
  expect_bf16("norm", params.norm);
  GemmShape shape;
  shape.tiles = tiles_of(params.lm_head);
  shape.gamma[0] = params.norm.as<const bf16>();
  shape.eps = context.config.rms_norm_eps;
  const int vocab = rows_of(params.lm_head);
  const int k = columns_of(params.lm_head);
  auto* const hidden = static_cast<bf16*>(params.hidden);
  const HeadStep::Params step{hidden, k, vocab, topk, plan.head_keys, plan.head_stats};
  const int blocks =
      launch_gemm<HeadStep>(plan, problem_of<HeadStep>(vocab, k, 1, params.rows.max_rows), 0, shape, step, stream);
  const bool replace = context.config.next_hidden == NextHidden::kNormed;
  const MergeArgs args{context,
                       batch,
                       params.rows,
                       blocks,
                       plan.head_keys,
                       plan.head_stats,
                       replace ? hidden : nullptr,
                       params.norm.as<const bf16>()};
  const int shared = blocks * topk * static_cast<int>(sizeof(std::uint64_t)) + blocks * static_cast<int>(sizeof(int));
  launch_chained(plan, head_merge, dim3(static_cast<unsigned>(params.rows.max_rows)), kMergeThreads, shared, stream,
                 args);
}

}  // namespace eaglex::stream
