// fuse: hidden = fc of the auxiliary hidden states, each normed where the draft says so.    Formula: reference.py fuse.
// Caller: Backend::fuse, once per cycle.    Bytes: fc once, aux_hidden_states per block from L2.
// Mapping: gemm.cuh; one segment of K per norm.
#include "cuda/stream/launch.cuh"
#include "cuda/stream/place.cuh"

namespace eaglex::stream {
namespace {

template <bool kWithNorm>
struct FuseStep : PlainStep {
  static constexpr bool kNormed = kWithNorm;
  static constexpr bool kSliced = true;
  static constexpr bool kWideRows = true;
  static constexpr bool kLowBit = false;
  struct Params {
    const DraftBatch* batch;
    cuda::LiveRows live;
    const bf16* idle_row;
    bf16* hidden;
    int k;  // of one segment
    int segments;
    int rows;
    int first;  // row of the pass
  };

  struct RowInfo {
    int row;  // of the batch; negative: not wanted
  };

  // As `admit` has listed them. Rows of lanes that keep nothing may hold anything, NaN too; they read zeros.
  __device__ static void locate(const Params& params, int token, const bf16** source, int stride, RowInfo* info) {
    const DraftBatch& batch = *params.batch;
    const int row = live_row(params.live, params.first + token).row;
    const bool live = row >= 0;
    *info = {row};
    const bf16* const from = static_cast<const bf16*>(batch.aux_hidden_states) + row * batch.aux_stride;
    for (int i = 0; i < params.segments; ++i)
      source[i * stride] = live ? from + static_cast<std::int64_t>(i) * params.k : params.idle_row;
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<RowInfo>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    view.each_sum(acc, [&](int token, int row, float sum) {
      if (token >= view.tokens || row >= params.rows) return;
      const std::int64_t to = view.rows[token].row;
      if (to >= 0) params.hidden[to * params.rows + row] = __float2bfloat16(sum);
    });
  }
};

template <class Step>
void launch(const StreamPlan& plan, const FuseParams& params, const EngineContext& context, const DraftBatch* batch,
            int segments, cudaStream_t stream) {
  const int rows = rows_of(params.fc);
  const int k = columns_of(params.fc) / segments;
  GemmShape shape;
  shape.eps = context.config.rms_norm_eps;
  shape.release = Release::kAfterWait;  // so that what follows may read at once what admit has written
  if constexpr (Step::kNormed) {
    for (int i = 0; i < segments; ++i) {
      expect_bf16("aux_norms", params.aux_norms[i]);
      shape.gamma[i] = params.aux_norms[i].template as<const bf16>();
    }
  }
  expect(plan.live.rows != nullptr, ErrorCode::kConfig, "plan.live", "a list of rows", "none");
  const typename Step::Params step{
      batch, plan.live,     static_cast<const bf16*>(plan.idle_row), static_cast<bf16*>(params.hidden), k, segments,
      rows,  plan.first_row};
  const Tiles& tiles = tiles_of(params.fc);
  launch_gemm<Step>(plan, tiles, problem_of<Step>(tiles, rows, k, segments, params.rows.max_rows), {}, shape, step,
                    stream);
}

}  // namespace

void launch_fuse(const StreamPlan& plan, const FuseParams& params, const EngineContext& context,
                 const DraftBatch* batch, cudaStream_t stream) {
  switch (context.config.aux_norm) {
    case AuxNorm::kNone:
      return launch<FuseStep<false>>(plan, params, context, batch, 1, stream);
    case AuxNorm::kWhole:
      return launch<FuseStep<true>>(plan, params, context, batch, 1, stream);
    case AuxNorm::kEach:
      return launch<FuseStep<true>>(plan, params, context, batch, context.config.num_aux, stream);
  }
}

}  // namespace eaglex::stream
