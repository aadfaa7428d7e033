#include "core/weights.h"

#include <cstdint>

#include "core/error.h"

namespace eaglex {
namespace {

// Checks one tensor after the other against the type of the first (fc).
class Checker {
 public:
  Checker(Device device, DType dtype) : device_(device), dtype_(dtype) {}

  void operator()(const std::string& name, const TensorView& tensor, std::initializer_list<std::int64_t> sizes) const {
    tensor.expect(name.c_str(), device_, {dtype_}, sizes);
    // Kernels copy these 16 bytes at a time: elsewhere that is a fault, which no process survives.
    expect(device_.kind != DeviceKind::kCuda || reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0,
           ErrorCode::kShape, name.c_str(), "memory aligned to 16 bytes", tensor.data);
  }
  void matrix(const std::string& name, const Matrix& weight, std::int64_t out, std::int64_t in) const {
    weight.expect(name, device_, dtype_, out, in);
  }
  static void absent(const std::string& name, const TensorView& tensor) {
    if (tensor) fail(ErrorCode::kShape, name, ": expected to be absent for this config, got ", describe(tensor));
  }

 private:
  Device device_;
  DType dtype_;
};

void check_aux_norms(const DraftWeights& weights, const DraftConfig& config, const Checker& check) {
  const std::size_t expected = config.aux_norm == AuxNorm::kNone    ? 0
                               : config.aux_norm == AuxNorm::kWhole ? 1
                                                                    : static_cast<std::size_t>(config.num_aux);
  expect(weights.aux_norms.size() == expected, ErrorCode::kShape, "aux_norms", concat(expected, " tensors"),
         weights.aux_norms.size());
  for (std::size_t i = 0; i < expected; ++i) {
    check(concat("aux_norms.", i), weights.aux_norms[i],
          {config.aux_norm == AuxNorm::kWhole ? config.aux_width() : config.target_hidden_size});
  }
}

void check_layer(const LayerWeights& layer, const DraftConfig& config, int index, const Checker& check) {
  const std::string at = concat("layers.", index, '.');
  const int hidden = config.hidden_size;
  const int width = config.layer_input(index);
  if (index == 0) {
    check(at + "hidden_norm", layer.hidden_norm, {hidden});
  } else {
    Checker::absent(at + "hidden_norm", layer.hidden_norm);
  }
  if (index > 0 || config.embedding_norm == EmbeddingNorm::kNormed) {
    check(at + "input_layernorm", layer.input_layernorm, {hidden});
  } else {
    Checker::absent(at + "input_layernorm", layer.input_layernorm);
  }
  check.matrix(at + "q_proj", layer.q_proj, config.q_size(), width);
  check.matrix(at + "k_proj", layer.k_proj, config.kv_size(), width);
  check.matrix(at + "v_proj", layer.v_proj, config.kv_size(), width);
  check.matrix(at + "o_proj", layer.o_proj, hidden, config.q_size());
  check(at + "post_attention_layernorm", layer.post_attention_layernorm, {hidden});
  check.matrix(at + "gate_proj", layer.gate_proj, config.intermediate_size, hidden);
  check.matrix(at + "up_proj", layer.up_proj, config.intermediate_size, hidden);
  check.matrix(at + "down_proj", layer.down_proj, hidden, config.intermediate_size);
}

}  // namespace

void Matrix::expect(const std::string& field, Device where, DType plain, std::int64_t out, std::int64_t in) const {
  TensorView::expect(field.c_str(), where, {plain, DType::kF8, DType::kI4}, {out, in});
  const std::string name = field + ".scales";
  if (!packed()) {
    if (scales)
      fail(ErrorCode::kShape, name, ": expected to be absent for ", name_of(dtype), ", got ", describe(scales));
    return;
  }
  const std::int64_t groups = (in + kScaleGroup - 1) / kScaleGroup;
  if (dtype == DType::kI4) {
    eaglex::expect(in % 2 == 0, ErrorCode::kShape, field.c_str(), "an even width for int4", in);
    scales.expect(name.c_str(), where, {DType::kBF16, DType::kF16, DType::kF32}, {out, groups});
  } else {
    const bool per_row = scales.rank == 2 && scales.shape[1] == 1;
    scales.expect(name.c_str(), where, {DType::kF32}, {out, per_row ? 1 : groups});
  }
}

void DraftWeights::check(const DraftConfig& config, Device device) const {
  fc.expect("fc", device, {DType::kF32, DType::kF16, DType::kBF16}, {config.hidden_size, config.aux_width()});
  const Checker check(device, fc.dtype);
  check("embed_tokens", embed_tokens, {config.vocab_size, config.hidden_size});
  check_aux_norms(*this, config, check);
  expect(layers.size() == static_cast<std::size_t>(config.num_layers), ErrorCode::kShape, "layers",
         concat(config.num_layers, " layers"), layers.size());
  for (int i = 0; i < config.num_layers; ++i) check_layer(layers[static_cast<std::size_t>(i)], config, i, check);
  check("norm", norm, {config.hidden_size});
  check.matrix("lm_head", lm_head, config.draft_vocab_size, config.hidden_size);
  if (lm_head_rows) {
    expect(lm_head.dtype == DType::kI4, ErrorCode::kShape, "lm_head_rows", "none unless lm_head is int4",
           concat(describe(lm_head_rows), " beside ", name_of(lm_head.dtype)));
    check("lm_head_rows", lm_head_rows, {config.draft_vocab_size, config.hidden_size});
  }
  inv_freq.expect("inv_freq", device, {DType::kF32}, {config.rotary_dim / 2});
  if (d2t) {
    d2t.expect("d2t", device, {DType::kI64}, {config.draft_vocab_size});
  } else {
    expect(config.draft_vocab_size == config.vocab_size, ErrorCode::kShape, "d2t",
           concat('[', config.draft_vocab_size, "] int64 since draft_vocab_size != vocab_size=", config.vocab_size),
           "nothing");
  }
}

}  // namespace eaglex
