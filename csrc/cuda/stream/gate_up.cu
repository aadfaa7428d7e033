// gate_up: out = silu(gate) · up of the normed x.    Formula: reference.py gate_up.
// Caller: Backend::gate_up.                          Bytes: both matrices once.
// Mapping: gemm.cuh over tiles in RowOrder::kPaired: a thread holds gate and up of the same feature.
#include "cuda/stream/launch.cuh"

namespace eaglex::stream {
namespace {

struct GateUpStep : PlainStep {
  static constexpr bool kNormed = true;
  struct Params {
    const bf16* x;
    bf16* out;
    int k;
    int features;
  };

  __device__ static void locate(const Params& params, int token, const bf16** source, int, RowInfo*) {
    *source = params.x + static_cast<std::int64_t>(token) * params.k;
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<RowInfo>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    if (view.role.half != 0) return;
    const int feature = (view.tile_row + view.role.strip * kStripRows) / 2 + view.role.lane / 4;
    if (feature >= params.features) return;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = t * 8 + view.role.lane % 4 * 2 + i;
        if (token >= view.tokens) continue;
        const float gate = acc[t][i];
        params.out[static_cast<std::int64_t>(token) * params.features + feature] =
            __float2bfloat16(gate / (1.0F + __expf(-gate)) * acc[t][i + 2]);
      }
    }
  }
};

}  // namespace

void launch_gate_up(const StreamPlan& plan, const GateUpParams& params, const EngineContext& context,
                    cudaStream_t stream) {
  const int rows = rows_of(params.gate_up);
  const int k = columns_of(params.gate_up);
  expect_bf16("post_attention_layernorm", params.norm);
  GemmShape shape;
  shape.gamma[0] = params.norm.as<const bf16>();
  shape.eps = context.config.rms_norm_eps;
  const GateUpStep::Params step{static_cast<const bf16*>(params.x), static_cast<bf16*>(params.out), k, rows / 2};
  const Tiles& tiles = tiles_of(params.gate_up);
  launch_gemm<GateUpStep>(plan, tiles, problem_of<GateUpStep>(tiles, rows, k, 1, params.rows.max_rows), {}, shape, step,
                          stream);
}

}  // namespace eaglex::stream
