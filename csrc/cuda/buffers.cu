// Buffers of the plain chain: each at most kChunkBytes, or 16 rows.
#include "cuda/buffers.h"

#include <algorithm>

#include "cuda/kernels.h"

namespace eaglex::cuda {
namespace {

// A prompt of 2,048 rows at H4096 passes in one piece; half as much costs it a few per cent.
constexpr std::size_t kChunkBytes = std::size_t{32} << 20;

int rows_in_chunk(std::size_t bytes_per_row, int most) {
  const auto rows = static_cast<long long>(kChunkBytes / bytes_per_row);
  return static_cast<int>(std::clamp<long long>(rows, 16, std::max(most, 16)));
}

}  // namespace

Buffers Buffers::carve(const EngineContext& context, DType type, PlainWork work, HeadScores scores,
                       Workspace& workspace) {
  const DraftConfig& config = context.config;
  const int topk = context.speculation.topk;
  const int frontier = context.limits.max_batch * topk;
  const int most = std::max(context.limits.max_rows, frontier);
  const bool all = work == PlainWork::kAll;
  const auto wide = [type](int width) { return static_cast<std::size_t>(width) * size_of(type); };
  const std::size_t aux = wide(config.aux_width());
  const std::size_t pair = wide(2 * config.hidden_size);
  const std::size_t hidden = wide(config.hidden_size);
  const std::size_t raw = static_cast<std::size_t>((all ? config.q_size() : 0) + 2 * config.kv_size()) * sizeof(float);
  const std::size_t logits = static_cast<std::size_t>(config.draft_vocab_size) * sizeof(float);
  const std::size_t partial = attention_partial_floats(config) * sizeof(float);

  Buffers buffers;
  buffers.fuse_rows = rows_in_chunk(aux, most);
  buffers.qkv_rows = rows_in_chunk(std::max(pair, raw), most);
  if (all) {
    buffers.norm_rows = rows_in_chunk(hidden, most);
    buffers.head_rows = std::min(rows_in_chunk(logits, frontier), buffers.norm_rows);
    buffers.attention_rows = std::max(rows_in_chunk(partial, most) / topk, 1) * topk;  // whole lanes
  }
  const auto rows = [](int n) { return static_cast<std::size_t>(n); };
  buffers.x = workspace.take_bytes(
      std::max({rows(buffers.fuse_rows) * aux, rows(buffers.qkv_rows) * pair, rows(buffers.norm_rows) * hidden}));
  buffers.raw = workspace.take<float>(rows(buffers.qkv_rows) * raw / sizeof(float));
  buffers.logits = workspace.take<float>(rows(buffers.head_rows) * logits / sizeof(float));
  buffers.ranked = workspace.take<float>(rows(buffers.head_rows) * head_partial_floats(context, scores));
  buffers.attention = workspace.take<float>(rows(buffers.attention_rows) * partial / sizeof(float));
  return buffers;
}

}  // namespace eaglex::cuda
