// What rank 0 sends to a dedicated drafter: the rows of one cycle, as the contract has them (core/batch.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bridge/terms.h"
#include "core/batch.h"
#include "core/tensor.h"

namespace eaglex::bridge {

// The tensors of one request, in the memory of the message; which device that is of, the caller knows.
struct RowsView {
  std::uint64_t epoch = 0;
  TensorView aux_hidden_states;  // [rows, A·Ht]
  TensorView input_ids;          // [rows] int64
  TensorView row_start;          // [B+1] int32
  TensorView num_valid;          // [B] int32
  TensorView draft_from;         // [B] bool
  TensorView req_pool_indices;   // [B] int64
  TensorView seq_lens;           // [B] int64
};

// A dense tensor at `data`: [rows], or [rows, columns].
[[nodiscard]] TensorView dense_view(void* data, DType dtype, std::int64_t rows, std::int64_t columns = 0);

[[nodiscard]] std::size_t max_rows_bytes(const Terms& terms);

// Writes those lanes of the batch that `wanted` names; returns the bytes written. The batch lies in host memory and fits
// the terms.
std::size_t pack_rows(const DraftBatch& batch, const Terms& terms, std::uint64_t epoch, std::span<const int> wanted,
                      std::span<std::byte> out);

// Throws ErrorCode::kBridge for a message that is not of these terms.
[[nodiscard]] RowsView read_rows(std::span<std::byte> message, const Terms& terms);

}  // namespace eaglex::bridge
