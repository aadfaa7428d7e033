// What the embeddings' half of q, k, v makes of every token that can be drafted: 1/rms · (embedding · γ) Wᵀ, in the
// tiles' order of rows, bf16. Made once, when the engine is bound.
// Formula: reference.py qkv.
// Caller: FastChain::know_tokens.    Bytes: half of the three matrices per 64 tokens.
// Mapping: gemm.cuh, 64 ids a launch.
#include "cuda/stream/launch.cuh"

namespace eaglex::stream {
namespace {

struct TokenProductsStep : PlainStep {
  static constexpr bool kNormed = true;
  static constexpr bool kAlwaysFull = true;
  struct Params {
    const bf16* embed_tokens;  // [V, k]
    const std::int64_t* d2t;   // null: ids are tokens
    std::int64_t vocab;
    int ids;    // Vd
    int first;  // id of this launch
    int k;
    int width;
    bf16* out;  // [Vd, width]
  };

  __device__ static void locate(const Params& params, int token, const bf16** source, int, RowInfo*) {
    const int id = min(params.first + token, params.ids - 1);
    const std::int64_t target = params.d2t == nullptr ? id : id + params.d2t[id];
    const bool inside = target >= 0 && target < params.vocab;  // no lane goes on with one that is not
    *source = params.embed_tokens + (inside ? target : 0) * params.k;
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<RowInfo>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    view.each_sum(acc, [&](int token, int row, float sum) {
      const int id = params.first + token;
      if (id < params.ids && row < params.width)
        params.out[static_cast<std::int64_t>(id) * params.width + row] = __float2bfloat16(sum);
    });
  }
};

}  // namespace

void launch_token_products(const StreamPlan& plan, const DraftedTokens& tokens, const DraftConfig& config, bf16* out,
                           cudaStream_t stream) {
  expect_bf16("embed_tokens", tokens.embed_tokens);
  GemmShape shape;
  shape.eps = config.rms_norm_eps;
  shape.gamma[0] = tokens.input_layernorm.as<const bf16>();  // null with EmbeddingNorm::kNone
  TokenProductsStep::Params step{};
  step.embed_tokens = tokens.embed_tokens.as<const bf16>();
  step.d2t = tokens.d2t;
  step.vocab = config.vocab_size;
  step.ids = config.draft_vocab_size;
  step.k = config.hidden_size;
  step.width = token_product_width(config);
  step.out = out;
  const Tiles& tiles = tiles_of(tokens.qkv);
  const GemmProblem problem = problem_of<TokenProductsStep>(tiles, step.width, config.hidden_size, 1, kMaxTokens);
  for (; step.first < step.ids; step.first += kMaxTokens)
    launch_gemm<TokenProductsStep>(plan, tiles, problem, {0, 0, 2}, shape, step, stream);
}

}  // namespace eaglex::stream
