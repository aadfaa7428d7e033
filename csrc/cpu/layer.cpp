// fuse, qkv, o_proj, gate_up, down: a gather, a norm, a matrix, a scatter.
#include <cmath>

#include "cpu/backend.h"
#include "cpu/numeric.h"

namespace eaglex::cpu {
namespace {

using Index = std::int64_t;

// Turns `head` by its position: halves paired, the angle rounded to float as the models were trained.
void rotate(float* head, Index position, const float* inv_freq, int rotary_dim, float factor) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    const float cosine = std::cos(angle) * factor;
    const float sine = std::sin(angle) * factor;
    const float left = head[i];
    const float right = head[i + half];
    head[i] = left * cosine - right * sine;
    head[i + half] = right * cosine + left * sine;
  }
}

// Zero for what is not finite in the pool's type (float16 ends at 65504): a NaN or infinity in the pool would void
// every later draft of all requests that share the prefix.
void store_finite(void* pool, DType dtype, Index i, float value) {
  store(pool, dtype, i, value);
  if (!std::isfinite(load(pool, dtype, i))) store(pool, dtype, i, 0.0F);
}

void copy(const float* from, Index count, float* to) {
  for (Index i = 0; i < count; ++i) to[i] = from[i];
}

}  // namespace

void CpuBackend::fuse(const FuseParams& params) {
  const DraftConfig& config = context_.config;
  const LiveRows live = live_rows(params.rows);
  const Index width = config.aux_width();
  const std::size_t element = size_of(batch_.aux_type);
  std::vector<float> x(static_cast<std::size_t>(live.count() * width));
  parallel_for(live.count(), [&](Index i) {
    float* const row = x.data() + i * width;
    const auto* const source =
        static_cast<const std::byte*>(batch_.aux_hidden_states) +
        static_cast<std::size_t>(live.rows[static_cast<std::size_t>(i)] * batch_.aux_stride) * element;
    for (Index j = 0; j < width; ++j) row[j] = load(source, batch_.aux_type, j);
    if (config.aux_norm == AuxNorm::kWhole) rms_norm(row, params.aux_norms[0], config.rms_norm_eps, row);
    if (config.aux_norm == AuxNorm::kEach) {
      for (int a = 0; a < config.num_aux; ++a) {
        float* const part = row + static_cast<Index>(a) * config.target_hidden_size;
        rms_norm(part, params.aux_norms[a], config.rms_norm_eps, part);
      }
    }
  });
  linear({live.rows.data(), live.count(), x.data(), width}, params.fc.parts[0], static_cast<float*>(params.hidden),
         config.hidden_size);
}

// The rows that enter q, k and v: [embedding | hidden state], each normed, in the first layer; the normed hidden state
// later.
std::vector<float> CpuBackend::layer_input(const QkvParams& params, const LiveRows& live) const {
  const DraftConfig& config = context_.config;
  const Index hidden_size = config.hidden_size;
  const Index width = config.layer_input(params.layer);
  const bool first = params.layer == 0;
  std::vector<float> x(static_cast<std::size_t>(live.count() * width));
  parallel_for(live.count(), [&](Index i) {
    const Index row = live.rows[static_cast<std::size_t>(i)];
    const RowPlace& place = live.places[static_cast<std::size_t>(i)];
    const float* const hidden =
        static_cast<const float*>(params.hidden) + (params.gather ? place.source : row) * hidden_size;
    float* const out = x.data() + i * width;
    float* const normed = first ? out + hidden_size : out;
    rms_norm(hidden, first ? params.hidden_norm : params.input_layernorm, config.rms_norm_eps, normed);
    if (first) {
      const Index token =
          params.rows.pass == Pass::kStep ? context_.lanes.frontier_tokens[row] : batch_.input_ids[place.source];
      for (Index j = 0; j < hidden_size; ++j)
        out[j] = load(params.embed_tokens.data, params.embed_tokens.dtype, token * hidden_size + j);
      if (params.input_layernorm) rms_norm(out, params.input_layernorm, config.rms_norm_eps, out);
    }
    if (params.parts != QkvParts::kKeyValue) {
      const bool normed_residual = first && config.residual == Residual::kNormed;
      copy(normed_residual ? normed : hidden, hidden_size, static_cast<float*>(params.residual) + row * hidden_size);
    }
  });
  return x;
}

void CpuBackend::qkv(const QkvParams& params) {
  const DraftConfig& config = context_.config;
  const LiveRows live = live_rows(params.rows);
  const std::vector<float> x = layer_input(params, live);
  const LinearRows in{nullptr, live.count(), x.data(), config.layer_input(params.layer)};
  if (params.parts != QkvParts::kKeyValue) {
    auto* const q = static_cast<float*>(params.q);
    linear({live.rows.data(), in.count, in.x, in.in}, params.qkv.parts[0], q, config.q_size());
    for (std::size_t i = 0; i < live.rows.size(); ++i) {
      for (int head = 0; head < config.num_heads; ++head) {
        rotate(q + live.rows[i] * config.q_size() + static_cast<Index>(head) * config.head_dim, live.places[i].position,
               params.inv_freq, config.rotary_dim, config.rope_factor);
      }
    }
  }
  if (params.parts == QkvParts::kQuery) return;

  const Index kv_size = config.kv_size();
  std::vector<float> k(static_cast<std::size_t>(live.count() * kv_size));
  std::vector<float> v(k.size());
  linear(in, params.qkv.parts[1], k.data(), kv_size);
  linear(in, params.qkv.parts[2], v.data(), kv_size);
  const bool scratch = params.target == KvTarget::kScratch;
  void* const k_out = scratch ? params.scratch_k : context_.kv.k[params.layer];
  void* const v_out = scratch ? params.scratch_v : context_.kv.v[params.layer];
  const int width = context_.speculation.topk;
  for (Index i = 0; i < live.count(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const RowPlace& place = live.places[at];
    const Index slot = scratch ? static_cast<Index>(place.lane) * context_.speculation.num_scratch_nodes() +
                                     static_cast<Index>(params.rows.step - 1) * width + live.rows[at] % width
                               : write_slot(context_, batch_, place.lane, place.source, place.position);
    for (int head = 0; head < config.num_kv_heads; ++head) {
      rotate(k.data() + i * kv_size + static_cast<Index>(head) * config.head_dim, place.position, params.inv_freq,
             config.rotary_dim, config.rope_factor);
    }
    for (Index j = 0; j < kv_size; ++j) {
      const std::size_t from = at * static_cast<std::size_t>(kv_size) + static_cast<std::size_t>(j);
      store_finite(k_out, context_.kv.dtype, slot * kv_size + j, k[from]);
      store_finite(v_out, context_.kv.dtype, slot * kv_size + j, v[from]);
    }
  }
}

void CpuBackend::project(const ProjectionParams& params) const {
  const LiveRows live = live_rows(params.rows);
  const Matrix& weight = params.weight.parts[0];
  const Index in = weight.shape[1];
  const Index out_size = weight.shape[0];
  std::vector<float> x(static_cast<std::size_t>(live.count() * in));
  for (Index i = 0; i < live.count(); ++i) {
    copy(static_cast<const float*>(params.x) + live.rows[static_cast<std::size_t>(i)] * in, in, x.data() + i * in);
  }
  auto* const out = static_cast<float*>(params.out);
  linear({live.rows.data(), live.count(), x.data(), in}, weight, out, out_size);
  for (const Index row : live.rows) {
    const float* const residual = static_cast<const float*>(params.residual) + row * out_size;
    for (Index j = 0; j < out_size; ++j) out[row * out_size + j] += residual[j];
  }
}

void CpuBackend::gate_up(const GateUpParams& params) {
  const DraftConfig& config = context_.config;
  const LiveRows live = live_rows(params.rows);
  const Index hidden_size = config.hidden_size;
  const Index inter = config.intermediate_size;
  std::vector<float> x(static_cast<std::size_t>(live.count() * hidden_size));
  for (Index i = 0; i < live.count(); ++i) {
    rms_norm(static_cast<const float*>(params.x) + live.rows[static_cast<std::size_t>(i)] * hidden_size, params.norm,
             config.rms_norm_eps, x.data() + i * hidden_size);
  }
  std::vector<float> up(static_cast<std::size_t>(live.count() * inter));
  auto* const out = static_cast<float*>(params.out);
  linear({live.rows.data(), live.count(), x.data(), hidden_size}, params.gate_up.parts[0], out, inter);
  linear({nullptr, live.count(), x.data(), hidden_size}, params.gate_up.parts[1], up.data(), inter);
  for (Index i = 0; i < live.count(); ++i) {
    float* const gate = out + live.rows[static_cast<std::size_t>(i)] * inter;
    for (Index j = 0; j < inter; ++j)
      gate[j] = gate[j] / (1.0F + std::exp(-gate[j])) * up[static_cast<std::size_t>(i * inter + j)];
  }
}

}  // namespace eaglex::cpu
