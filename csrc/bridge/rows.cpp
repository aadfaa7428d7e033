#include "bridge/rows.h"

#include <algorithm>
#include <cstring>

namespace eaglex::bridge {
namespace {

struct RowsHeader {
  std::uint64_t epoch;
  std::int32_t num_lanes;
  std::int32_t num_rows;
  std::int32_t num_entries;  // of all lanes' table rows
  std::int32_t aux_width;
  std::uint8_t aux_type;  // DType
  std::uint8_t anew;
  std::uint8_t padding[6];
};
static_assert(sizeof(RowsHeader) == 32);

// Where each part lies: widest elements first, hidden states last, so that all are aligned.
struct Offsets {
  std::size_t seq_lens, slots, input_ids, row_start, num_valid, out_cache_loc, table_lens, table, draft_from, aux, end;
};

struct Counts {
  std::size_t lanes, rows, entries, row_bytes;
};

Offsets offsets_of(const Terms& terms, const Counts& count) {
  const std::size_t pooled = terms.pooled() ? 1 : 0;
  Offsets at{};
  at.seq_lens = sizeof(RowsHeader);
  at.slots = at.seq_lens + count.lanes * 8;
  at.input_ids = at.slots + count.lanes * 8;
  at.row_start = at.input_ids + count.rows * 8;
  at.num_valid = at.row_start + (count.lanes + 1) * 4;
  at.out_cache_loc = at.num_valid + count.lanes * 4;
  at.table_lens = at.out_cache_loc + pooled * count.rows * 4;
  at.table = at.table_lens + pooled * count.lanes * 4;
  at.draft_from = at.table + pooled * count.entries * 4;
  at.aux = (at.draft_from + count.lanes + 15) / 16 * 16;
  at.end = at.aux + count.rows * count.row_bytes;
  return at;
}

// The table's part, whose lengths decide where the drafter writes.
void check_entries(const RowsView& rows, const Terms& terms, std::int32_t num_entries) {
  std::int64_t sum = 0;
  for (std::int64_t lane = 0; lane < rows.table_lens.shape[0]; ++lane) {
    const std::int32_t entries = rows.table_lens.as<std::int32_t>()[lane];
    if (entries < 0 || entries > terms.table_width) {
      fail(ErrorCode::kBridge, "rows table_lens: expected in 0..", terms.table_width, ", got ", entries);
    }
    sum += entries;
  }
  expect(sum == num_entries, ErrorCode::kBridge, "rows num_entries", sum, num_entries);
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
  const auto lanes = static_cast<std::size_t>(terms.max_lanes);
  return offsets_of(terms, {lanes, static_cast<std::size_t>(terms.max_rows),
                            lanes * static_cast<std::size_t>(terms.table_width),
                            static_cast<std::size_t>(terms.aux_width) * size_of(DType::kF32)})
      .end;
}

void check_table(const DraftBatch& batch, const Terms& terms, const TableRows& table) {
  if (!terms.pooled()) return;
  expect(static_cast<bool>(batch.out_cache_loc), ErrorCode::kShape, "out_cache_loc", "the rows' KV slots", "none");
  expect(table.req_to_token != nullptr, ErrorCode::kShape, "req_to_token", "the host's table", "none");
  expect(static_cast<std::int32_t>(table.lens.size()) == batch.batch, ErrorCode::kShape, "table_lens",
         concat(batch.batch, " lengths"), table.lens.size());
  for (const std::int32_t entries : table.lens) expect_range("table_lens", entries, 0, terms.table_width);
}

std::size_t pack_rows(const DraftBatch& batch, const Terms& terms, const Request& request, std::span<std::byte> out) {
  Counts count = {request.wanted.size(), 0, 0, static_cast<std::size_t>(terms.aux_width) * size_of(batch.aux_type)};
  for (const int lane : request.wanted) {
    count.rows += static_cast<std::size_t>(batch.row_start[lane + 1] - batch.row_start[lane]);
    if (terms.pooled()) count.entries += static_cast<std::size_t>(request.table.lens[static_cast<std::size_t>(lane)]);
  }
  const Offsets at = offsets_of(terms, count);
  expect(at.end <= out.size(), ErrorCode::kShape, "rows of one cycle", concat("at most ", out.size(), " bytes"),
         at.end);
  const RowsHeader header = {request.epoch,
                             static_cast<std::int32_t>(count.lanes),
                             static_cast<std::int32_t>(count.rows),
                             static_cast<std::int32_t>(count.entries),
                             terms.aux_width,
                             static_cast<std::uint8_t>(batch.aux_type),
                             request.anew ? std::uint8_t{1} : std::uint8_t{0},
                             {}};
  std::memcpy(out.data(), &header, sizeof header);
  const auto put = [&](std::size_t offset, std::size_t index, auto value) {
    std::memcpy(out.data() + offset + index * sizeof value, &value, sizeof value);
  };
  std::int32_t row = 0;
  std::size_t entry = 0;
  put(at.row_start, 0, row);
  for (std::size_t i = 0; i < count.lanes; ++i) {
    const int lane = request.wanted[i];
    put(at.seq_lens, i, batch.seq_lens[lane]);
    put(at.slots, i, batch.req_pool_indices[lane]);
    put(at.num_valid, i, batch.num_valid[lane]);
    put(at.draft_from, i, batch.draft_from[lane]);
    for (std::int32_t from = batch.row_start[lane]; from < batch.row_start[lane + 1]; ++from, ++row) {
      put(at.input_ids, static_cast<std::size_t>(row), batch.input_ids[from]);
      if (terms.pooled()) {
        put(at.out_cache_loc, static_cast<std::size_t>(row), static_cast<std::int32_t>(batch.out_cache_loc[from]));
      }
      const std::size_t stride = static_cast<std::size_t>(batch.aux_stride) * size_of(batch.aux_type);
      std::memcpy(out.data() + at.aux + static_cast<std::size_t>(row) * count.row_bytes,
                  static_cast<const std::byte*>(batch.aux_hidden_states) + static_cast<std::size_t>(from) * stride,
                  count.row_bytes);
    }
    put(at.row_start, i + 1, row);
    if (!terms.pooled()) continue;
    const std::int32_t entries = request.table.lens[static_cast<std::size_t>(lane)];
    put(at.table_lens, i, entries);
    if (entries == 0) continue;
    std::memcpy(out.data() + at.table + entry * sizeof(std::int32_t),
                request.table.req_to_token + batch.req_pool_indices[lane] * terms.table_width,
                static_cast<std::size_t>(entries) * sizeof(std::int32_t));
    entry += static_cast<std::size_t>(entries);
  }
  return at.end;
}

RowsView read_rows(std::span<std::byte> message, const Terms& terms) {
  RowsHeader header{};
  expect(message.size() >= sizeof header, ErrorCode::kBridge, "rows bytes", concat("at least ", sizeof header),
         message.size());
  std::memcpy(&header, message.data(), sizeof header);
  const auto range = [](const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
      fail(ErrorCode::kBridge, field, ": expected in ", low, "..", high, ", got ", value);
  };
  range("rows num_lanes", header.num_lanes, 1, terms.max_lanes);
  range("rows num_rows", header.num_rows, 1, terms.max_rows);
  range("rows num_entries", header.num_entries, 0, std::int64_t{header.num_lanes} * terms.table_width);
  expect(header.aux_width == terms.aux_width, ErrorCode::kBridge, "rows aux_width", terms.aux_width, header.aux_width);
  const auto type = static_cast<DType>(header.aux_type);
  expect(type == DType::kF32 || type == DType::kF16 || type == DType::kBF16, ErrorCode::kBridge, "rows dtype",
         "float32, float16 or bfloat16", int{header.aux_type});
  const Offsets at =
      offsets_of(terms, {static_cast<std::size_t>(header.num_lanes), static_cast<std::size_t>(header.num_rows),
                         static_cast<std::size_t>(header.num_entries),
                         static_cast<std::size_t>(header.aux_width) * size_of(type)});
  expect(message.size() == at.end, ErrorCode::kBridge, "rows bytes", at.end, message.size());
  std::byte* const data = message.data();
  RowsView rows;
  rows.epoch = header.epoch;
  rows.anew = header.anew != 0;
  rows.aux_hidden_states = dense_view(data + at.aux, type, header.num_rows, header.aux_width);
  rows.input_ids = dense_view(data + at.input_ids, DType::kI64, header.num_rows);
  rows.row_start = dense_view(data + at.row_start, DType::kI32, header.num_lanes + 1);
  rows.num_valid = dense_view(data + at.num_valid, DType::kI32, header.num_lanes);
  rows.draft_from = dense_view(data + at.draft_from, DType::kU8, header.num_lanes);
  rows.req_pool_indices = dense_view(data + at.slots, DType::kI64, header.num_lanes);
  rows.seq_lens = dense_view(data + at.seq_lens, DType::kI64, header.num_lanes);
  if (terms.pooled()) {
    rows.out_cache_loc = dense_view(data + at.out_cache_loc, DType::kI32, header.num_rows);
    rows.table_lens = dense_view(data + at.table_lens, DType::kI32, header.num_lanes);
    rows.table = dense_view(data + at.table, DType::kI32, header.num_entries);
    check_entries(rows, terms, header.num_entries);
  }
  return rows;
}

void write_table(const RowsView& rows, const Terms& terms, std::int32_t* table) {
  const std::int32_t* entry = rows.table.as<std::int32_t>();
  const std::int32_t* const row_start = rows.row_start.as<std::int32_t>();
  for (std::int64_t lane = 0; lane < rows.table_lens.shape[0]; ++lane) {
    const std::int64_t slot = rows.req_pool_indices.as<std::int64_t>()[lane];
    const std::int32_t entries = rows.table_lens.as<std::int32_t>()[lane];
    const std::int32_t* const from = entry;
    entry += entries;
    if (slot <= 0 || slot >= terms.num_slots) continue;  // the engine says what is wrong with the lane
    std::int32_t* const row = table + slot * terms.table_width;
    std::copy(from, entry, row);
    const std::int64_t length = rows.seq_lens.as<std::int64_t>()[lane];
    const std::int64_t first = row_start[lane];
    const std::int64_t count =
        std::min<std::int64_t>(rows.num_valid.as<std::int32_t>()[lane],
                               std::min<std::int64_t>(row_start[lane + 1], rows.out_cache_loc.shape[0]) - first);
    for (std::int64_t i = 0; first >= 0 && length >= 0 && i < count && length < terms.table_width - i; ++i) {
      row[length + i] = rows.out_cache_loc.as<std::int32_t>()[first + i];
    }
  }
}

}  // namespace eaglex::bridge
