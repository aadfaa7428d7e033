// The tensors of an EAGLE-3 head under the canonical names of eaglex/weights.py. Matrices are [out, in] as in
// nn.Linear.
#pragma once

#include <vector>

#include "core/config.h"
#include "core/tensor.h"

namespace eaglex {

struct LayerWeights {
  TensorView input_layernorm;           // [H]; empty in the first layer with EmbeddingNorm::kNone
  TensorView hidden_norm;               // [H], first layer only
  TensorView q_proj;                    // [heads·D, 2H or H]
  TensorView k_proj;                    // [kv_heads·D, 2H or H]
  TensorView v_proj;                    // [kv_heads·D, 2H or H]
  TensorView o_proj;                    // [H, heads·D]
  TensorView post_attention_layernorm;  // [H]
  TensorView gate_proj;                 // [I, H]
  TensorView up_proj;                   // [I, H]
  TensorView down_proj;                 // [H, I]
};

struct DraftWeights {
  TensorView embed_tokens;            // [V, H]
  TensorView fc;                      // [H, A·Ht]
  std::vector<TensorView> aux_norms;  // none, [A·Ht], or A × [Ht]
  std::vector<LayerWeights> layers;
  TensorView norm;      // [H]
  TensorView lm_head;   // [Vd, H]
  TensorView d2t;       // [Vd] int64 differences, or empty
  TensorView inv_freq;  // [rotary_dim / 2] float32

  // Throws ErrorCode::kShape, naming the tensor, unless all are as `config` says, of one type, on `device`.
  void check(const DraftConfig& config, Device device) const;
};

}  // namespace eaglex
