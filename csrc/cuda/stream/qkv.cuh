// qkv: q, k, v of the normed embedding and hidden state, RoPE on q and k, k and v to their place.    Formula:
// reference.py qkv.
// Caller: Backend::qkv.    Bytes: the three matrices once (or those of QkvParts), one embedding row per token.
// Mapping: gemm.cuh over tiles in RowOrder::kRotary: a thread holds both dims that RoPE turns together; K is [embedding
// | hidden], a segment with a norm each. The activation warp finds each row's token, source, position and KV slot.
#pragma once

#include "cuda/stream/launch.cuh"
#include "cuda/stream/place.cuh"

namespace eaglex::stream {

// cos and sin of a float angle of any size: reduced in double, since a position of 100,000 is 16,000 turns.
__device__ __forceinline__ float2 turn_of(float angle) {
  const double quarter = rint(static_cast<double>(angle) * 0.63661977236758134);
  const float rest = static_cast<float>(fma(quarter, -1.5707963267948966, static_cast<double>(angle)));
  float sine;
  float cosine;
  const float square = rest * rest;  // |rest| <= π/4: minimax polynomials, 1 ulp
  sine =
      fmaf(fmaf(fmaf(fmaf(2.86567956e-6F, square, -1.98559923e-4F), square, 8.33338592e-3F), square, -1.66666672e-1F),
           square * rest, rest);
  cosine = fmaf(fmaf(fmaf(fmaf(2.44677067e-5F, square, -1.38877297e-3F), square, 4.16666567e-2F), square, -0.5F),
                square, 1.0F);
  const int turns = static_cast<int>(static_cast<long long>(quarter) & 3);
  const float2 swapped = turns & 1 ? make_float2(-sine, cosine) : make_float2(cosine, sine);
  return turns & 2 ? make_float2(-swapped.x, -swapped.y) : swapped;
}

struct QkvStep : PlainStep {
  static constexpr bool kNormed = true;
  static constexpr bool kSliced = true;
  static constexpr bool kWideRows = true;
  struct Params {
    EngineContext context;
    const DraftBatch* batch;
    cuda::LiveRows live;  // of an extend
    Rows rows_of_pass;
    int first;  // row of the pass
    bool gather;
    bool has_embedding;  // the first layer
    bool normed_residual;
    KvTarget target;
    int row_begin;  // of the concatenated q | k | v that this launch computes
    int row_end;
    const bf16* embed_tokens;
    const bf16* hidden;
    const bf16* hidden_norm;
    const bf16* idle_row;
    const float* inv_freq;
    bf16* q;
    bf16* residual;     // null: not wanted
    bool last_queries;  // StreamPlan's
    bf16* scratch_k;
    bf16* scratch_v;
    bf16* pool_k;  // of the layer
    bf16* pool_v;
  };
  struct RowInfo {
    float position;
    int query;  // row of q; negative: not wanted
    bf16* k;    // null: nothing to be written
    bf16* v;
  };

  // A step's rows are located twice: before the wait the code and the pages that it needs come into the caches. What is
  // found then is stale and thrown away; all that is read lies within the lanes' arrays.
  __device__ static bool rehearses(const Params& params) { return params.rows_of_pass.pass == Pass::kStep; }

  __device__ static void locate(const Params& params, int token, const bf16** source, int stride, RowInfo* info) {
    if (params.live.rows != nullptr) return locate_live(params, token, source, stride, info);
    const EngineContext& context = params.context;
    const DraftBatch& batch = *params.batch;
    const StepPlace found = place_of(context, batch, params.rows_of_pass, params.first + token);
    const RowPlace& place = found.place;
    const int hidden_size = context.config.hidden_size;
    const bf16* embedding = params.idle_row;
    const bf16* hidden = params.idle_row;
    *info = {static_cast<float>(place.position), token, nullptr, nullptr};
    if (place.live) {
      const std::int64_t id = params.rows_of_pass.pass == Pass::kStep ? found.token : batch.input_ids[place.source];
      if (params.has_embedding) embedding = params.embed_tokens + id * hidden_size;
      hidden = params.hidden + (params.gather ? place.source : params.first + token) * hidden_size;
      find_kv(params, batch, place, token, info);
    }
    if (params.has_embedding) source[0] = embedding;
    source[params.has_embedding ? stride : 0] = hidden;
  }

  // As `admit` has listed it.
  __device__ static void locate_live(const Params& params, int token, const bf16** source, int stride, RowInfo* info) {
    const int hidden_size = params.context.config.hidden_size;
    const std::int64_t width = params.context.config.kv_size();
    const cuda::LiveRow found = live_row(params.live, params.first + token);
    const bool live = found.row >= 0;
    if (params.has_embedding)
      source[0] = live ? params.embed_tokens + static_cast<std::int64_t>(found.token) * hidden_size : params.idle_row;
    source[params.has_embedding ? stride : 0] =
        live ? params.hidden + static_cast<std::int64_t>(found.row) * hidden_size : params.idle_row;
    const bool kept = live && found.kv_slot >= 0;
    *info = {static_cast<float>(found.position), found.query, kept ? params.pool_k + found.kv_slot * width : nullptr,
             kept ? params.pool_v + found.kv_slot * width : nullptr};
  }

  __device__ static void find_kv(const Params& params, const DraftBatch& batch, const RowPlace& place, int token,
                                 RowInfo* info) {
    const EngineContext& context = params.context;
    const std::int64_t width = context.config.kv_size();
    if (params.target == KvTarget::kScratch) {
      const int topk = context.speculation.topk;
      const std::int64_t node = static_cast<std::int64_t>(place.lane) * context.speculation.num_scratch_nodes() +
                                (params.rows_of_pass.step - 1) * topk + token % topk;
      info->k = params.scratch_k + node * width;
      info->v = params.scratch_v + node * width;
      return;
    }
    const std::int64_t slot = write_slot(context, batch, place.lane, place.source, place.position);
    if (slot < 0) return;
    info->k = params.pool_k + slot * width;
    info->v = params.pool_v + slot * width;
  }

  // Writes the residual rows, one per block, while the last chunks are multiplied.
  template <int kTokenTiles>
  __device__ static void beside(const Params& params, const bf16* const* sources, int tokens, int lane) {
    if (params.residual == nullptr) return;
    const int size = params.context.config.hidden_size;
    const bf16* const* const hidden = sources + (params.has_embedding ? 8 * kTokenTiles : 0);
    for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
      const int row = params.last_queries ? live_row(params.live, params.first + token).query : token;
      if (row < 0) continue;
      const uint4* const from = reinterpret_cast<const uint4*>(hidden[token]);
      uint4* const to = reinterpret_cast<uint4*>(params.residual + static_cast<std::int64_t>(row) * size);
      float norm = 1;
      if (params.normed_residual) {
        float sum = 0;
        for (int i = lane; i < size; i += 32) sum += square(__bfloat162float(hidden[token][i]));
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
        norm = rsqrtf(sum / static_cast<float>(size) + params.context.config.rms_norm_eps);
      }
      for (int i = lane; i < size / 8; i += 32) {
        uint4 x = from[i];
        if (params.normed_residual) x = normed(x, reinterpret_cast<const uint4*>(params.hidden_norm)[i], norm);
        to[i] = x;
      }
    }
  }
  __device__ static float square(float x) { return x * x; }
  __device__ static std::uint32_t normed(std::uint32_t x, std::uint32_t gamma, float norm) {
    const float2 value = __bfloat1622float2(unpack(x));
    const float2 scale = __bfloat1622float2(unpack(gamma));
    return pack(value.x * norm * scale.x, value.y * norm * scale.y);
  }
  __device__ static uint4 normed(const uint4& x, const uint4& gamma, float norm) {
    return make_uint4(normed(x.x, gamma.x, norm), normed(x.y, gamma.y, norm), normed(x.z, gamma.z, norm),
                      normed(x.w, gamma.w, norm));
  }

  // A NaN or infinity in the cache would void every later draft of all requests that share the prefix. Rounding makes
  // infinities of its own.
  __device__ static bf16 finite(float x) {
    const bf16 rounded = __float2bfloat16(x);
    return isfinite(__bfloat162float(rounded)) ? rounded : __float2bfloat16(0.0F);
  }

  // Before the block waits for the sums of others.
  template <int kTokenTiles, class Info>
  __device__ static __forceinline__ void touch_inputs(const Params& params, const TileView<Info>& view) {
    if (view.role.half != 0 || view.role.lane != 0) return;
    const int dim = (view.tile_row + view.role.strip * kStripRows) % params.context.config.head_dim;
    if (dim < params.context.config.rotary_dim) touch(params.inv_freq + dim / 2);  // 8 of them are one sector
  }

  template <int kTokenTiles, class Info>
  __device__ static __forceinline__ void tile(const Params& params, const TileView<Info>& view,
                                              const float (&acc)[kTokenTiles][4]) {
    if (view.role.half != 0) return;
    const DraftConfig& config = params.context.config;
    const int strip_row = view.tile_row + view.role.strip * kStripRows;  // a strip lies within one head
    if (strip_row < params.row_begin || strip_row >= params.row_end) return;
    const int dim = strip_row % config.head_dim;
    const bool is_query = strip_row < config.q_size();
    const bool is_key = !is_query && strip_row < config.q_size() + config.kv_size();
    const int column = strip_row - dim - (is_query ? 0 : is_key ? config.q_size() : config.q_size() + config.kv_size());
    const int low = column + rotary_dim_at(dim + view.role.lane / 4, config.rotary_dim);
    const int high = column + rotary_dim_at(dim + view.role.lane / 4 + 8, config.rotary_dim);
    const bool turned = (is_query || is_key) && dim < config.rotary_dim;
    const float frequency = turned ? __ldg(params.inv_freq + dim / 2 + view.role.lane / 4) : 0.0F;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = view.first_token + t * 8 + view.role.lane % 4 * 2 + i;
        if (token >= view.tokens) continue;
        const RowInfo& row = view.rows[token];
        float left = acc[t][i];
        float right = acc[t][i + 2];
        if (turned) {
          const float2 turn = turn_of(row.position * frequency);
          const float cosine = turn.x * config.rope_factor;
          const float sine = turn.y * config.rope_factor;
          const float old = left;
          left = old * cosine - right * sine;
          right = right * cosine + old * sine;
        }
        if (is_query) {
          if (row.query < 0) continue;
          bf16* const to = params.q + static_cast<std::int64_t>(row.query) * config.q_size();
          to[low] = __float2bfloat16(left);
          to[high] = __float2bfloat16(right);
        } else if (bf16* const to = is_key ? row.k : row.v; to != nullptr) {
          to[low] = finite(left);
          to[high] = finite(right);
        }
      }
    }
  }
};

inline QkvStep::Params qkv_step_of(const StreamPlan& plan, const QkvParams& params, const EngineContext& context,
                                   const DraftBatch* batch) {
  const DraftConfig& config = context.config;
  const bool first = params.layer == 0;
  const bool queries = params.parts != QkvParts::kKeyValue;
  expect(context.kv.dtype == DType::kBF16, ErrorCode::kConfig, "kv.dtype", "bfloat16", name_of(context.kv.dtype));
  expect(!plan.last_queries || plan.live.rows != nullptr, ErrorCode::kConfig, "plan.live", "a list of rows", "none");
  const TensorView& hidden_norm = first ? params.hidden_norm : params.input_layernorm;
  expect_bf16("hidden_norm", hidden_norm);
  if (first) expect_bf16("embed_tokens", params.embed_tokens);
  QkvStep::Params step{};
  step.context = context;
  step.batch = batch;
  step.rows_of_pass = params.rows;
  step.live = plan.live;
  step.first = plan.first_row;
  step.gather = params.gather;
  step.has_embedding = first;
  step.normed_residual = first && config.residual == Residual::kNormed;
  step.target = params.target;
  step.row_begin = queries ? 0 : config.q_size();
  step.row_end = params.parts == QkvParts::kQuery ? config.q_size() : config.q_size() + 2 * config.kv_size();
  step.embed_tokens = params.embed_tokens.as<const bf16>();
  step.hidden = static_cast<const bf16*>(params.hidden);
  step.hidden_norm = hidden_norm.as<const bf16>();
  step.idle_row = static_cast<const bf16*>(plan.idle_row);
  step.inv_freq = params.inv_freq;
  step.q = static_cast<bf16*>(params.q);
  step.last_queries = plan.last_queries;
  step.residual = queries ? static_cast<bf16*>(params.residual) : nullptr;
  step.scratch_k = static_cast<bf16*>(params.scratch_k);
  step.scratch_v = static_cast<bf16*>(params.scratch_v);
  step.pool_k = static_cast<bf16*>(plan.pool_k[params.layer]);
  step.pool_v = static_cast<bf16*>(plan.pool_v[params.layer]);
  return step;
}

}  // namespace eaglex::stream
