// The tensors of an EAGLE-3 head under the canonical names of eaglex/weights.py. Matrices are [out, in] as in
// nn.Linear; those that may be stored in few bits are of type Matrix.
#pragma once

#include <vector>

#include "core/config.h"
#include "core/tensor.h"

namespace eaglex {

// Inputs that share a scale where a row has several; the last group is shorter where 128 does not divide `in`.
inline constexpr std::int64_t kScaleGroup = 128;

// W [out, in] = scale · value (eaglex/reference_low_bit.py). The values' type says how it is stored: 16 or 32 bits
// without scales, kF8 with float32 scales, kI4 with bfloat16, float16 or float32 scales.
struct Matrix : TensorView {
  TensorView scales;  // [out, 1], one per row, or [out, ceil(in / 128)]

  Matrix() = default;
  Matrix(const TensorView& values) : TensorView(values) {}  // one without scales

  [[nodiscard]] bool packed() const noexcept { return dtype == DType::kF8 || dtype == DType::kI4; }
  // Inputs that share a scale.
  [[nodiscard]] std::int64_t group() const noexcept { return scales.shape[1] > 1 ? kScaleGroup : shape[1]; }

  // Throws ErrorCode::kShape, naming `field`, unless this is a matrix of that size on `where`: of type `plain`, or
  // packed with the scales that its type needs.
  void expect(const std::string& field, Device where, DType plain, std::int64_t out, std::int64_t in) const;
};

struct LayerWeights {
  TensorView input_layernorm;           // [H]; empty in the first layer with EmbeddingNorm::kNone
  TensorView hidden_norm;               // [H], first layer only
  Matrix q_proj;                        // [heads·D, 2H or H]
  Matrix k_proj;                        // [kv_heads·D, 2H or H]
  Matrix v_proj;                        // [kv_heads·D, 2H or H]
  Matrix o_proj;                        // [H, heads·D]
  TensorView post_attention_layernorm;  // [H]
  Matrix gate_proj;                     // [I, H]
  Matrix up_proj;                       // [I, H]
  Matrix down_proj;                     // [H, I]
};

struct DraftWeights {
  TensorView embed_tokens;            // [V, H]
  TensorView fc;                      // [H, A·Ht]
  std::vector<TensorView> aux_norms;  // none, [A·Ht], or A × [Ht]
  std::vector<LayerWeights> layers;
  TensorView norm;  // [H]
  Matrix lm_head;   // [Vd, H]
  // [Vd, H] of the type of fc, or empty. Beside an INT4 lm_head: the rows it was made from, by which the best of its
  // scores are made exact (core/rescore.h). Read where they lie, so they may be the target's own.
  TensorView lm_head_rows;
  TensorView d2t;       // [Vd] int64 differences, or empty
  TensorView inv_freq;  // [rotary_dim / 2] float32

  // Throws ErrorCode::kShape, naming the tensor, unless all are as `config` says, of one type, on `device`.
  void check(const DraftConfig& config, Device device) const;
};

}  // namespace eaglex
