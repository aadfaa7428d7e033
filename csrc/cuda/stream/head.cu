// head: log-probabilities and ids of the topk best of the draft vocabulary.    Formula: reference.py head, top_k (ties:
// lowest id).
// Caller: Backend::head.    Bytes: lm_head once; logits stay on the SM.
// Mapping: gemm.cuh; warp w keeps maximum, Σ exp and the best of tokens w, w + 8, … over the block's tiles, in a
// fixed order; head_merge.cu puts the blocks' together.
#include "cuda/stream/launch.cuh"
#include "cuda/stream/ranking.cuh"

namespace eaglex::stream {
namespace {

// What a block knows of one token's logits so far.
struct TokenState {
  std::uint64_t best[kMaxTopk];  // descending
  float maximum;
  float sum;  // Σ exp(logit - maximum); NaN once a logit was NaN or infinite
};

struct HeadStep : PlainStep {
  static constexpr bool kNormed = true;
  static constexpr int kStateBytes = 8 * sizeof(TokenState);
  struct Params {
    const bf16* x;
    int k;
    int vocab;
    int topk;
    std::uint64_t* keys;    // [grid, 64, topk]
    float2* stats;          // [grid, 64]
    std::uint64_t* offers;  // [64, stride]: some of each group in the place of `keys`; null: keys
    int stride;
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
        const int token = t * 8 + view.role.warp;
        take_in<kRows>(params, view.exchange + view.role.warp * kStride, view.tile_row, view.role.lane, token,
                       states[token]);
      }
    }
  }

  // The best of every group of ids, in order: what may be scored again. Returns the best of all.
  template <int kRows>
  __device__ static __forceinline__ float offer(const Params& params, const std::uint64_t (&keys)[kRows / 32],
                                                int first_id, int lane, int token) {
    static_assert(kRescoreGroup == 64);
    constexpr int kGroups = kRows / kRescoreGroup;  // beside each other: a maximum over a warp takes its time
    const int count = group_offers(params.topk);
    std::uint32_t low[kGroups], high[kGroups];  // first 32 ids, the others
    std::uint64_t mine[kGroups] = {};           // of lane < count
    float largest = __int_as_float(0xFF800000);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      low[g] = static_cast<std::uint32_t>(keys[2 * g] >> 32);
      high[g] = static_cast<std::uint32_t>(keys[2 * g + 1] >> 32);
    }
#pragma unroll 1
    for (int rank = 0; rank < count; ++rank) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const std::uint32_t best = __reduce_max_sync(0xFFFFFFFF, max(low[g], high[g]));
        const std::uint32_t of_low = __ballot_sync(0xFFFFFFFF, low[g] == best);
        const std::uint32_t of_high = __ballot_sync(0xFFFFFFFF, high[g] == best);
        const int at = of_low != 0 ? __ffs(of_low) - 1 : 31 + __ffs(of_high);
        const std::uint64_t key = best == 0 ? 0 : key_at(best, first_id + g * kRescoreGroup + at);
        if (lane == rank) mine[g] = key;
        if (rank == 0) largest = fmaxf(largest, value_of(key));
        if (lane == at % 32) (at < 32 ? low[g] : high[g]) = 0;
      }
    }
    const int groups = (params.vocab + kRescoreGroup - 1) / kRescoreGroup;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int group = first_id / kRescoreGroup + g;
      std::uint64_t* const to = params.offers + static_cast<std::int64_t>(token) * params.stride + group * count;
      if (group < groups && lane < count) to[lane] = mine[g];
    }
    return largest;
  }

  template <int kRows>
  __device__ static void take_in(const Params& params, const float* logits, int first_id, int lane, int token,
                                 TokenState& state) {
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
    const bool offers = params.offers != nullptr;
    maximum = fmaxf(before, offers ? offer<kRows>(params, keys, first_id, lane, token) : warp_max(maximum));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i)
      sum += values[i] == __int_as_float(0xFF800000) ? 0.0F : __expf(values[i] - maximum);
    // With nothing yet the sum is 0; where all was NaN so far it is NaN and must stay.
    sum = warp_sum(sum) + state.sum * (before == __int_as_float(0xFF800000) ? 1.0F : __expf(before - maximum));

    // Insert what beats the worst of the list, best first; after the first tiles that is rare.
    std::uint64_t best = lane < params.topk ? state.best[lane] : 0;
    std::uint64_t worst = __shfl_sync(0xFFFFFFFF, best, params.topk - 1);
    while (!offers) {
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
    __syncwarp();  // all lanes have read the state
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
      if (params.offers == nullptr && role.lane < params.topk)
        params.keys[at * params.topk + role.lane] = states[token].best[role.lane];
      if (role.lane == 0) params.stats[at] = make_float2(states[token].maximum, states[token].sum);
    }
  }
};

}  // namespace

int launch_head(const StreamPlan& plan, const HeadParams& params, const EngineContext& context, cudaStream_t stream) {
  const int topk = context.speculation.topk;
  expect(context.speculation.sampling == Sampling::kGreedy, ErrorCode::kConfig, "sampling", "greedy", "rejection");
  expect_range("topk", topk, 1, plan.needs.topk);
  expect_bf16("norm", params.norm);
  GemmShape shape;
  shape.gamma[0] = params.norm.as<const bf16>();
  shape.eps = context.config.rms_norm_eps;
  shape.release = Release::kAfterWait;  // StreamPlan::hidden_is_there
  const int vocab = rows_of(params.lm_head);
  const int k = columns_of(params.lm_head);
  HeadStep::Params step{
      static_cast<const bf16*>(params.hidden), k, vocab, topk, plan.head_keys, plan.head_stats, nullptr, 0};
  if (params.rescore_rows) {
    expect(plan.head_offers != nullptr, ErrorCode::kConfig, "StreamPlan::head_offers", "memory", "null");
    step.offers = plan.head_offers;
    step.stride = head_offers(vocab, topk).stride;
  }
  const Tiles& tiles = tiles_of(params.lm_head);
  return launch_gemm<HeadStep>(plan, tiles, problem_of<HeadStep>(tiles, vocab, k, 1, params.rows.max_rows), {}, shape,
                               step, stream);
}

}  // namespace eaglex::stream
