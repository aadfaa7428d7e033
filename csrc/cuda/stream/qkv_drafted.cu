// qkv of drafted tokens, each one of Vd: what the embeddings' half of the matrix makes of all of them is known
// (token_products.cu), so a step multiplies the hidden half alone.
// Formula: reference.py qkv.
// Caller: launch_qkv.    Bytes: the hidden half of the three matrices once, one row of products per token.
// Mapping: gemm.cuh over that half; the epilogue adds the token's products, in the tiles' order as well.
#include "core/select.h"
#include "cuda/stream/qkv.cuh"

namespace eaglex::stream {
namespace {

// Blocks of head's second kernel, which hold their slots to its end: who came into one of those would begin when the others
// have multiplied. 12 µs of an INT4 cycle of H4096.
constexpr int kSpareSlots = 8;

struct DraftedQkvStep : QkvStep {
  static constexpr bool kWideRows = false;
  static constexpr bool kMayBeEarly = true;
  struct Params : QkvStep::Params {
    const bf16* products;  // [Vd, width]
    int width;
  };
  struct RowInfo : QkvStep::RowInfo {
    const bf16* products;
  };

  __device__ static bool rehearses(const Params&) { return true; }

  // Of a single request's chain: its hidden state is the only one.
  __device__ static const bf16* early_source(const Params& params) { return params.hidden; }

  // The draft vocabulary's id of a row of the frontier; of a chain it is what head has found of the lane.
  __device__ static __forceinline__ int drafted_id(const Params& params, int row) {
    const EngineContext& context = params.context;
    const int topk = context.speculation.topk;
    if (topk == 1) return __ldcg(context.lanes.top_ids + row);
    const int step = params.rows_of_pass.step;
    const int first = row / topk * topk * (step == 1 ? 1 : topk);
    const int place = __ldcg(context.lanes.frontier_nodes + row) - 1 - grid_base(context.speculation, step - 1);
    const int last = topk * (step == 1 ? 1 : topk) - 1;
    return __ldcg(context.lanes.top_ids + first + min(max(place, 0), last));
  }

  __device__ static void locate(const Params& params, int token, const bf16** source, int, RowInfo* info) {
    const EngineContext& context = params.context;
    const int row = params.first + token;
    const int id = drafted_id(params, row);
    const StepPlace found = place_of(context, *params.batch, params.rows_of_pass, row);
    const RowPlace& place = found.place;
    *source = params.idle_row;
    *info = {{static_cast<float>(place.position), token, nullptr, nullptr}, params.products};
    if (!place.live) return;
    *source = params.hidden + (params.gather ? place.source : row) * context.config.hidden_size;
    const auto inside =
        min(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(context.config.draft_vocab_size - 1));
    info->products += static_cast<std::int64_t>(inside) * params.width;
    find_kv(params, *params.batch, place, token, info);
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void touch_inputs(const Params& params, const TileView<RowInfo>& view) {
    QkvStep::touch_inputs<kTokenTiles>(params, view);
    if (kTokenTiles > 1 || view.role.half != 0 || view.role.lane >= view.tokens) return;
    touch(view.rows[view.role.lane].products + view.tile_row + view.role.strip * kStripRows);  // one sector
  }

  template <int kTokenTiles>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<RowInfo>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    if (view.role.half != 0) return;
    const int first = view.tile_row + view.role.strip * kStripRows + view.role.lane / 4;
    if (first >= params.row_end) return;
    float sums[kTokenTiles][4];
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = view.first_token + t * 8 + view.role.lane % 4 * 2 + i;
        const bf16* const from = view.rows[token < view.tokens ? token : 0].products + first;
        sums[t][i] = acc[t][i] + __bfloat162float(from[0]);
        sums[t][i + 2] = acc[t][i + 2] + __bfloat162float(from[8]);
      }
    }
    QkvStep::tile<kTokenTiles>(params, view, sums);
  }
};

}  // namespace

void launch_qkv_drafted(const StreamPlan& plan, const QkvParams& params, const EngineContext& context,
                        const DraftBatch* batch, cudaStream_t stream) {
  DraftedQkvStep::Params step{qkv_step_of(plan, params, context, batch), plan.token_products,
                              token_product_width(context.config)};
  step.has_embedding = false;
  GemmShape shape;
  shape.eps = context.config.rms_norm_eps;
  shape.gamma[0] = step.hidden_norm;
  shape.release = Release::kAfterWait;
  shape.needed_late = plan.needed_late;
  const Tiles& tiles = tiles_of(params.qkv);
  shape.x_is_there = plan.hidden_is_there && params.rows.max_rows == 1 && tiles.precision == Precision::kInt4;
  GemmProblem problem =
      problem_of<DraftedQkvStep>(tiles, step.row_end, context.config.hidden_size, 1, params.rows.max_rows);
  StreamPlan own = plan;
  if (shape.x_is_there) {
    problem.spare_slots = kSpareSlots;
    own.words = plan.early_words;
  }
  launch_gemm<DraftedQkvStep>(own, tiles, problem, {0, 1, 2}, shape, step, stream);
}

}  // namespace eaglex::stream
