// qkv as a launch (qkv.cuh). Of drafted tokens the embedding's part may be known (qkv_drafted.cu).
#include "cuda/stream/qkv.cuh"

namespace eaglex::stream {

void launch_qkv(const StreamPlan& plan, const QkvParams& params, const EngineContext& context, const DraftBatch* batch,
                cudaStream_t stream) {
  if (params.rows.pass == Pass::kStep && params.layer == 0 && plan.token_products != nullptr)
    return launch_qkv_drafted(plan, params, context, batch, stream);
  const QkvStep::Params step = qkv_step_of(plan, params, context, batch);
  const bool first = params.layer == 0;
  GemmShape shape;
  shape.eps = context.config.rms_norm_eps;
  if (first) shape.gamma[0] = params.input_layernorm.as<const bf16>();  // null with EmbeddingNorm::kNone
  shape.gamma[first ? 1 : 0] = step.hidden_norm;
  shape.release = params.parts != QkvParts::kKeyValue ? Release::kAfterWait : Release::kAtOnce;
  shape.needed_late = plan.needed_late;
  const Tiles& tiles = tiles_of(params.qkv);
  const GemmProblem problem = problem_of<QkvStep>(tiles, step.row_end - step.row_begin, context.config.hidden_size,
                                                  first ? 2 : 1, params.rows.max_rows);
  launch_gemm<QkvStep>(plan, tiles, problem, {step.row_begin}, shape, step, stream);
}

}  // namespace eaglex::stream
