#include "draft/door.h"

#include "core/error.h"
#include "core/tree.h"

namespace eaglex {
namespace {

IdView view_of(const TensorView& tensor) noexcept {
  return tensor.dtype == DType::kI32 ? IdView{tensor.as<const std::int32_t>(), nullptr}
                                     : IdView{nullptr, tensor.as<const std::int64_t>()};
}

IdView ids(const TensorView& tensor, const char* field, Device device, std::int64_t count) {
  tensor.expect(field, device, {DType::kI32, DType::kI64}, {count});
  return view_of(tensor);
}

void absent(const TensorView& tensor, const char* field, const char* why) {
  if (tensor) fail(ErrorCode::kConfig, field, ": expected nothing ", why, ", got ", describe(tensor));
}

// Rows may lie apart (a slice of the host's buffer), but each row is dense.
void check_rows(const TensorView& aux, int width, int max_rows, Device device) {
  const bool typed = aux.dtype == DType::kF32 || aux.dtype == DType::kF16 || aux.dtype == DType::kBF16;
  const bool shaped = aux && aux.rank == 2 && aux.shape[1] == width && (aux.stride[1] == 1 || width == 1) &&
                      (aux.shape[0] == 1 || aux.stride[0] >= width);
  if (!typed || !shaped || !(aux.device == device)) {
    fail(ErrorCode::kShape, "aux_hidden_states: expected [rows, ", width, "] float32, float16 or bfloat16 on ",
         name_of(device), ", got ", aux ? describe(aux) : "nothing",
         "; does the target capture the auxiliary layers of this draft?");
  }
  expect_range("aux_hidden_states rows", aux.shape[0], 1, max_rows);
}

}  // namespace

void FollowerTensors::check(const SpeculationConfig& speculation, const EngineLimits& limits, Device device) const {
  const std::int64_t slots = limits.num_slots;
  const std::int64_t nodes = speculation.num_draft_tokens - 1;
  num_nodes.expect("num_nodes", device, {DType::kI32}, {slots});
  drafted_for.expect("drafted_for", device, {DType::kI64}, {slots});
  if (nodes == 0) return;
  draft_tokens.expect("draft_tokens", device, {DType::kI64}, {slots, nodes});
  parents.expect("parents", device, {DType::kI32}, {slots, nodes});
}

DraftResults FollowerTensors::results() const noexcept {
  DraftResults made;
  made.draft_tokens = draft_tokens.as<std::int64_t>();
  made.parents = parents.as<std::int32_t>();
  made.num_nodes = num_nodes.as<std::int32_t>();
  made.drafted_for = drafted_for.as<std::int64_t>();
  return made;
}

void EngineTensors::check_host(const DraftConfig& config, const EngineLimits& limits, Device device) const {
  req_to_token.expect("req_to_token", device, {DType::kI32}, {limits.num_slots, kAnySize});
  const auto layers = static_cast<std::size_t>(config.num_layers);
  expect(draft_k.size() == layers, ErrorCode::kShape, "draft_k", concat(layers, " layers"), draft_k.size());
  expect(draft_v.size() == layers, ErrorCode::kShape, "draft_v", concat(layers, " layers"), draft_v.size());
  draft_k[0].expect("draft_k[0]", device, {DType::kF32, DType::kF16, DType::kBF16},
                    {kAnySize, config.num_kv_heads, config.head_dim});
  for (std::size_t i = 0; i < layers; ++i) {
    const std::int64_t kv_slots = draft_k[0].shape[0];
    draft_k[i].expect(concat("draft_k[", i, ']').c_str(), device, {draft_k[0].dtype},
                      {kv_slots, config.num_kv_heads, config.head_dim});
    draft_v[i].expect(concat("draft_v[", i, ']').c_str(), device, {draft_k[0].dtype},
                      {kv_slots, config.num_kv_heads, config.head_dim});
  }
}

void EngineTensors::check_results(const DraftConfig& config, const SpeculationConfig& speculation,
                                  const EngineLimits& limits, Device device) const {
  const std::int64_t slots = limits.num_slots;
  const std::int64_t nodes = speculation.num_draft_tokens - 1;
  FollowerTensors{draft_tokens, parents, num_nodes, drafted_for}.check(speculation, limits, device);
  counters.expect("counters", device, {DType::kI64}, {kNumLaneStatus});
  if (nodes > 0) scores.expect("scores", device, {DType::kF32}, {slots, nodes});
  if (speculation.sampling == Sampling::kRejection) {
    draft_probs.expect("draft_probs", device, {DType::kF32}, {slots, speculation.num_steps, config.draft_vocab_size});
  } else {
    absent(draft_probs, "draft_probs", "without rejection sampling");
  }
}

DraftResults EngineTensors::results() const noexcept {
  return {draft_tokens.as<std::int64_t>(), parents.as<std::int32_t>(),     scores.as<float>(),
          num_nodes.as<std::int32_t>(),    drafted_for.as<std::int64_t>(), draft_probs.as<float>(),
          counters.as<std::int64_t>()};
}

DraftBatch BatchTensors::check(const DraftConfig& config, const SpeculationConfig& speculation,
                               const EngineLimits& limits, Device device) const {
  check_rows(aux_hidden_states, config.aux_width(), limits.max_rows, device);
  num_valid.expect("num_valid", device, {DType::kI32}, {kAnySize});
  const std::int64_t batch = num_valid.shape[0];
  expect_range("num_valid requests", batch, 1, limits.max_batch);
  DraftBatch block;
  block.batch = static_cast<std::int32_t>(batch);
  block.num_rows = static_cast<std::int32_t>(aux_hidden_states.shape[0]);
  block.aux_hidden_states = aux_hidden_states.data;
  block.aux_type = aux_hidden_states.dtype;
  block.aux_stride = aux_hidden_states.shape[0] == 1 ? config.aux_width() : aux_hidden_states.stride[0];
  block.input_ids = ids(input_ids, "input_ids", device, block.num_rows);
  row_start.expect("row_start", device, {DType::kI32}, {batch + 1});
  block.row_start = row_start.as<const std::int32_t>();
  block.num_valid = num_valid.as<const std::int32_t>();
  draft_from.expect("draft_from", device, {DType::kU8}, {batch});
  block.draft_from = draft_from.as<const std::uint8_t>();
  block.req_pool_indices = ids(req_pool_indices, "req_pool_indices", device, batch);
  block.seq_lens = ids(seq_lens, "seq_lens", device, batch);
  if (out_cache_loc) block.out_cache_loc = ids(out_cache_loc, "out_cache_loc", device, block.num_rows);
  if (speculation.sampling == Sampling::kRejection) {
    temperatures.expect("temperatures", device, {DType::kF32}, {batch});
    uniforms.expect("uniforms", device, {DType::kF32}, {batch, speculation.num_steps});
    block.temperatures = temperatures.as<const float>();
    block.uniforms = uniforms.as<const float>();
  } else {
    absent(temperatures, "temperatures", "without rejection sampling");
    absent(uniforms, "uniforms", "without rejection sampling");
  }
  return block;
}

void BatchTensors::readdress(DraftBatch& block) const noexcept {
  block.aux_hidden_states = aux_hidden_states.data;
  block.input_ids = view_of(input_ids);
  block.num_valid = num_valid.as<const std::int32_t>();
  block.req_pool_indices = view_of(req_pool_indices);
  block.seq_lens = view_of(seq_lens);
  if (out_cache_loc) block.out_cache_loc = view_of(out_cache_loc);
}

VerifyBatch VerifyTensors::check(const EngineLimits& limits, Device device) const {
  draft_tokens.expect("draft_tokens", device, {DType::kI64}, {kAnySize, kAnySize});
  const std::int64_t batch = draft_tokens.shape[0];
  const std::int64_t n = draft_tokens.shape[1];
  expect_range("draft_tokens requests", batch, 1, limits.max_batch);
  expect_range("num_draft_tokens", n, 1, kMaxDraftTokens);
  for (const auto& [field, tensor] : {std::pair{"positions", &positions}, std::pair{"retrieve_index", &retrieve_index},
                                      std::pair{"retrieve_next_token", &retrieve_next_token},
                                      std::pair{"retrieve_next_sibling", &retrieve_next_sibling}}) {
    tensor->expect(field, device, {DType::kI64}, {batch, n});
  }
  VerifyBatch block;
  block.batch = static_cast<std::int32_t>(batch);
  block.num_draft_tokens = static_cast<std::int32_t>(n);
  block.mask_mode = mask_mode;
  switch (mask_mode) {
    case MaskMode::kFull:
      mask.expect("mask", device, {DType::kU8}, {kAnySize});
      expect(mask.numel() >= batch * n * n, ErrorCode::kShape, "mask", concat("at least ", batch * n * n, " elements"),
             mask.numel());
      break;
    case MaskMode::kQlenOnly:
      mask.expect("mask", device, {DType::kU8}, {batch, n, n});
      break;
    case MaskMode::kQlenOnlyBitpack:
      mask.expect("mask", device, {DType::kU8}, {batch, n, packed_mask_bytes(block.num_draft_tokens)});
      break;
  }
  block.req_pool_indices = ids(req_pool_indices, "req_pool_indices", device, batch);
  block.seq_lens = ids(seq_lens, "seq_lens", device, batch);
  block.bonus_tokens = ids(bonus_tokens, "bonus_tokens", device, batch);
  block.draft_tokens = draft_tokens.as<std::int64_t>();
  block.positions = positions.as<std::int64_t>();
  block.retrieve_index = retrieve_index.as<std::int64_t>();
  block.retrieve_next_token = retrieve_next_token.as<std::int64_t>();
  block.retrieve_next_sibling = retrieve_next_sibling.as<std::int64_t>();
  block.mask = mask.as<std::uint8_t>();
  block.mask_size = mask.numel();
  return block;
}

void VerifyTensors::readdress(VerifyBatch& block) const noexcept {
  block.req_pool_indices = view_of(req_pool_indices);
  block.seq_lens = view_of(seq_lens);
  block.bonus_tokens = view_of(bonus_tokens);
}

}  // namespace eaglex
