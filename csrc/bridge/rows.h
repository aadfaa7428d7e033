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
  bool anew = false;             // the first since the drafter joined or fell: K and V that it has are void
  TensorView aux_hidden_states;  // [rows, A·Ht]
  TensorView input_ids;          // [rows] int64
  TensorView row_start;          // [B+1] int32
  TensorView num_valid;          // [B] int32
  TensorView draft_from;         // [B] bool
  TensorView req_pool_indices;   // [B] int64
  TensorView seq_lens;           // [B] int64
  // Only where the drafter's K and V lie in the host's KV slots:
  TensorView out_cache_loc;  // [rows] int32: where each row's K and V go
  TensorView table_lens;     // [B] int32: entries of the lane's row of req_to_token that came with it
  TensorView table;          // [sum of table_lens] int32: those, from position 0 on
};

// What goes with the rows of a batch to a drafter whose K and V lie in the host's KV slots. All of it in host memory.
struct TableRows {
  const std::int32_t* req_to_token = nullptr;  // [num_slots, table_width], the host's
  std::span<const std::int32_t> lens;          // [B]: so many entries of each lane's row travel; 0: they are known
};

// A dense tensor at `data`: [rows], or [rows, columns].
[[nodiscard]] TensorView dense_view(void* data, DType dtype, std::int64_t rows, std::int64_t columns = 0);

[[nodiscard]] std::size_t max_rows_bytes(const Terms& terms);

// One request to the drafter: those lanes of the batch that `wanted` names. All in host memory, and fits the terms.
struct Request {
  std::uint64_t epoch = 0;
  bool anew = false;
  std::span<const int> wanted;
  TableRows table;  // of pooled terms
};
// Throws ErrorCode::kShape where pooled terms lack their part.
void check_table(const DraftBatch& batch, const Terms& terms, const TableRows& table);
// Returns the bytes written.
std::size_t pack_rows(const DraftBatch& batch, const Terms& terms, const Request& request, std::span<std::byte> out);

// Throws ErrorCode::kBridge for a message that is not of these terms.
[[nodiscard]] RowsView read_rows(std::span<std::byte> message, const Terms& terms);

// The drafter's table [num_slots, table_width] as the host's is: the rows that came, then the rows' own KV slots at their
// positions. To be called in front of the engine's cycle, as its attention reads this table. What is in neither has not
// changed. KV slots are the engine's to check.
void write_table(const RowsView& rows, const Terms& terms, std::int32_t* table);

}  // namespace eaglex::bridge
