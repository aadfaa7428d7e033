// o_proj and down: out = residual + x Wᵀ.    Formula: reference.py o_proj, down.
// Caller: Backend::o_proj, Backend::down.    Bytes: W once, x per block from L2.
// Mapping: gemm.cuh; the thread that holds a sum adds the residual, which may lie where `out` does.
#include "cuda/stream/launch.cuh"

namespace eaglex::stream {
namespace {

struct ProjectionStep : PlainStep {
  static constexpr bool kNormed = false;
  static constexpr bool kSliced = true;
  struct Params {
    const bf16* x;
    const bf16* residual;
    bf16* out;
    int k;
    int rows;
  };

  __device__ static void locate(const Params& params, int token, const bf16** source, int, RowInfo*) {
    *source = params.x + static_cast<std::int64_t>(token) * params.k;
  }

  // Before the block waits for the sums of others.
  template <int kTokenTiles>
  __device__ static __forceinline__ void touch_inputs(const Params& params, const TileView<RowInfo>& view) {
    if (view.role.half != 0) return;
    const int row = view.tile_row + view.role.strip * kStripRows;  // its 16 elements are one sector
    for (int token = view.role.lane; token < view.tokens && row < params.rows; token += 32) {
      touch(params.residual + static_cast<std::int64_t>(token) * params.rows + row);
    }
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<RowInfo>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    view.each_sum(acc, [&](int token, int row, float sum) {
      if (token >= view.tokens || row >= params.rows) return;
      const std::int64_t index = static_cast<std::int64_t>(token) * params.rows + row;
      params.out[index] = __float2bfloat16(__bfloat162float(params.residual[index]) + sum);
    });
  }
};

}  // namespace

void launch_projection(const StreamPlan& plan, const ProjectionParams& params, cudaStream_t stream) {
  const int rows = rows_of(params.weight);
  const int k = columns_of(params.weight);
  const GemmShape shape;
  const ProjectionStep::Params step{static_cast<const bf16*>(params.x), static_cast<const bf16*>(params.residual),
                                    static_cast<bf16*>(params.out), k, rows};
  const Tiles& tiles = tiles_of(params.weight);
  launch_gemm<ProjectionStep>(plan, tiles, problem_of<ProjectionStep>(tiles, rows, k, 1, params.rows.max_rows), {},
                              shape, step, stream);
}

}  // namespace eaglex::stream
