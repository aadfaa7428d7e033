#include "bridge/rows.h"

#include <cstring>

namespace eaglex::bridge {
namespace {

struct RowsHeader {
  std::uint64_t epoch;
  std::int32_t num_lanes;
  std::int32_t num_rows;
  std::int32_t aux_width;
  std::uint8_t aux_type;  // DType
  std::uint8_t padding[3];
};

// Where each part lies: widest elements first, hidden states last, so that all are aligned.
struct Offsets {
  std::size_t seq_lens, slots, input_ids, row_start, num_valid, draft_from, aux, end;
};

Offsets offsets_of(std::size_t lanes, std::size_t rows, std::size_t row_bytes) {
  Offsets at{};
  at.seq_lens = sizeof(RowsHeader);
  at.slots = at.seq_lens + lanes * 8;
  at.input_ids = at.slots + lanes * 8;
  at.row_start = at.input_ids + rows * 8;
  at.num_valid = at.row_start + (lanes + 1) * 4;
  at.draft_from = at.num_valid + lanes * 4;
  at.aux = (at.draft_from + lanes + 15) / 16 * 16;
  at.end = at.aux + rows * row_bytes;
  return at;
}

}  // namespace

TensorView dense_view(void* data, DType dtype, std::int64_t rows, std::int64_t columns) {
  TensorView tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = columns > 0 ? 2 : 1;
  tensor.shape = {rows, columns};
  tensor.stride = columns > 0 ? std::array<std::int64_t, kMaxRank>{columns, 1} : std::array<std::int64_t, kMaxRank>{1};
  return tensor;
}

std::size_t max_rows_bytes(const Terms& terms) {
  return offsets_of(static_cast<std::size_t>(terms.max_lanes), static_cast<std::size_t>(terms.max_rows),
                    static_cast<std::size_t>(terms.aux_width) * size_of(DType::kF32))
      .end;
}

std::size_t pack_rows(const DraftBatch& batch, const Terms& terms, std::uint64_t epoch, std::span<const int> wanted,
                      std::span<std::byte> out) {
  std::size_t rows = 0;
  for (const int lane : wanted) rows += static_cast<std::size_t>(batch.row_start[lane + 1] - batch.row_start[lane]);
  const std::size_t row_bytes = static_cast<std::size_t>(terms.aux_width) * size_of(batch.aux_type);
  const Offsets at = offsets_of(wanted.size(), rows, row_bytes);
  expect(at.end <= out.size(), ErrorCode::kShape, "rows of one cycle", concat("at most ", out.size(), " bytes"),
         at.end);
  const RowsHeader header = {
      epoch,           static_cast<std::int32_t>(wanted.size()),  static_cast<std::int32_t>(rows),
      terms.aux_width, static_cast<std::uint8_t>(batch.aux_type), {}};
  std::memcpy(out.data(), &header, sizeof header);
  const auto put = [&](std::size_t offset, std::size_t index, auto value) {
    std::memcpy(out.data() + offset + index * sizeof value, &value, sizeof value);
  };
  std::int32_t row = 0;
  put(at.row_start, 0, row);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const int lane = wanted[i];
    put(at.seq_lens, i, batch.seq_lens[lane]);
    put(at.slots, i, batch.req_pool_indices[lane]);
    put(at.num_valid, i, batch.num_valid[lane]);
    put(at.draft_from, i, batch.draft_from[lane]);
    for (std::int32_t from = batch.row_start[lane]; from < batch.row_start[lane + 1]; ++from, ++row) {
      put(at.input_ids, static_cast<std::size_t>(row), batch.input_ids[from]);
      const std::size_t stride = static_cast<std::size_t>(batch.aux_stride) * size_of(batch.aux_type);
      std::memcpy(out.data() + at.aux + static_cast<std::size_t>(row) * row_bytes,
                  static_cast<const std::byte*>(batch.aux_hidden_states) + static_cast<std::size_t>(from) * stride,
                  row_bytes);
    }
    put(at.row_start, i + 1, row);
  }
  return at.end;
}

RowsView read_rows(std::span<std::byte> message, const Terms& terms) {
  RowsHeader header{};
  expect(message.size() >= sizeof header, ErrorCode::kBridge, "rows bytes", concat("at least ", sizeof header),
         message.size());
  std::memcpy(&header, message.data(), sizeof header);
  const auto range = [](const char* field, std::int32_t value, std::int32_t high) {
    if (value < 1 || value > high) fail(ErrorCode::kBridge, field, ": expected in 1..", high, ", got ", value);
  };
  range("rows num_lanes", header.num_lanes, terms.max_lanes);
  range("rows num_rows", header.num_rows, terms.max_rows);
  expect(header.aux_width == terms.aux_width, ErrorCode::kBridge, "rows aux_width", terms.aux_width, header.aux_width);
  const auto type = static_cast<DType>(header.aux_type);
  expect(type == DType::kF32 || type == DType::kF16 || type == DType::kBF16, ErrorCode::kBridge, "rows dtype",
         "float32, float16 or bfloat16", int{header.aux_type});
  const Offsets at = offsets_of(static_cast<std::size_t>(header.num_lanes), static_cast<std::size_t>(header.num_rows),
                                static_cast<std::size_t>(header.aux_width) * size_of(type));
  expect(message.size() == at.end, ErrorCode::kBridge, "rows bytes", at.end, message.size());
  std::byte* const data = message.data();
  RowsView rows;
  rows.epoch = header.epoch;
  rows.aux_hidden_states = dense_view(data + at.aux, type, header.num_rows, header.aux_width);
  rows.input_ids = dense_view(data + at.input_ids, DType::kI64, header.num_rows);
  rows.row_start = dense_view(data + at.row_start, DType::kI32, header.num_lanes + 1);
  rows.num_valid = dense_view(data + at.num_valid, DType::kI32, header.num_lanes);
  rows.draft_from = dense_view(data + at.draft_from, DType::kU8, header.num_lanes);
  rows.req_pool_indices = dense_view(data + at.slots, DType::kI64, header.num_lanes);
  rows.seq_lens = dense_view(data + at.seq_lens, DType::kI64, header.num_lanes);
  return rows;
}

}  // namespace eaglex::bridge
