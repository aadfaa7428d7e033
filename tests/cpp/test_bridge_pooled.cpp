// Rows to a drafter whose K and V lie in the host's KV slots: what travels of the host's table, and who is asked about.
#include <doctest/doctest.h>

#include <vector>

#include "bridge/bridge.h"
#include "support/drafter_terms.h"
#include "support/processes.h"

using namespace eaglex::bridge;
using namespace support;

namespace {

constexpr int kWidth = 4, kTable = 12, kSlots = 4;

Terms terms() {
  Terms made = drafter_terms(kWidth);
  made.num_slots = kSlots;
  made.num_kv_slots = 50;
  made.table_width = kTable;
  return made;
}

// Three lanes: two rows after five positions, three rows of which one counts, a prompt of two rows.
struct Batch {
  [[nodiscard]] eaglex::DraftBatch view() const {
    eaglex::DraftBatch batch;
    batch.batch = 3;
    batch.num_rows = 7;
    batch.aux_hidden_states = aux.data();
    batch.aux_stride = kWidth;
    batch.input_ids.i64 = input_ids.data();
    batch.row_start = row_start.data();
    batch.num_valid = num_valid.data();
    batch.draft_from = draft_from.data();
    batch.req_pool_indices.i64 = slots.data();
    batch.seq_lens.i64 = lens.data();
    batch.out_cache_loc.i64 = locs.data();
    return batch;
  }

  std::vector<std::int64_t> slots{3, 1, 2}, lens{5, 7, 0}, input_ids{1, 2, 3, 4, 5, 6, 7},
      locs{31, 32, 41, 42, 43, 21, 22};
  std::vector<std::int32_t> row_start{0, 2, 5, 7}, num_valid{2, 1, 2};
  std::vector<std::uint8_t> draft_from{1, 1, 1};
  std::vector<float> aux = std::vector<float>(std::size_t{7} * kWidth, 0.5F);
};

std::vector<std::int32_t> host_table() {
  std::vector<std::int32_t> table(std::size_t{kSlots} * kTable);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(1000 + i);
  return table;
}

struct Message {
  explicit Message(const Terms& own, std::vector<int> lanes, std::vector<std::int32_t> lens)
      : bytes(max_rows_bytes(own)), size(pack_rows(batch.view(), own, {7, true, lanes, {table.data(), lens}}, bytes)) {}
  [[nodiscard]] RowsView read(const Terms& own) { return read_rows({bytes.data(), size}, own); }

  Batch batch;
  std::vector<std::int32_t> table = host_table();
  std::vector<std::byte> bytes;
  std::size_t size;
};

}  // namespace

TEST_CASE("the drafter's table is the host's where rows came, and the rows' own KV slots at their positions") {
  Message message(terms(), {0, 1, 2}, {5, 0, 0});
  const RowsView rows = message.read(terms());
  CHECK(rows.anew);
  std::vector<std::int32_t> table(std::size_t{kSlots} * kTable, -1);
  std::vector<std::int32_t> expected = table;
  write_table(rows, terms(), table.data());
  for (std::size_t i = 0; i < 5; ++i) expected[3 * kTable + i] = message.table[3 * kTable + i];
  expected[3 * kTable + 5] = 31;
  expected[3 * kTable + 6] = 32;
  expected[1 * kTable + 7] = 41;  // what does not count has no position
  expected[2 * kTable + 0] = 21;
  expected[2 * kTable + 1] = 22;
  CHECK(table == expected);
  SUBCASE("a row that the host has rewritten replaces what was there, up to where it was sent") {
    for (std::int32_t& entry : message.table) entry += 500;
    Message again(terms(), {0}, {5});
    again.table = message.table;
    const std::vector<int> lanes = {0};
    const std::vector<std::int32_t> lens = {4, 0, 0};
    again.size = pack_rows(again.batch.view(), terms(), {8, false, lanes, {again.table.data(), lens}}, again.bytes);
    const RowsView second = again.read(terms());
    CHECK_FALSE(second.anew);
    write_table(second, terms(), table.data());
    for (std::size_t i = 0; i < 4; ++i) expected[3 * kTable + i] += 500;
    CHECK(table == expected);
  }
}

TEST_CASE("only the lanes that are asked about travel, each with its own table row and KV slots") {
  Message message(terms(), {2, 0}, {3, 9, 1});
  const RowsView rows = message.read(terms());
  REQUIRE(rows.table_lens.shape[0] == 2);
  CHECK(rows.table_lens.as<std::int32_t>()[0] == 1);
  CHECK(rows.table_lens.as<std::int32_t>()[1] == 3);
  REQUIRE(rows.table.shape[0] == 4);
  CHECK(rows.table.as<std::int32_t>()[0] == 1000 + 2 * kTable);
  CHECK(rows.table.as<std::int32_t>()[1] == 1000 + 3 * kTable);
  const std::vector<std::int32_t> locs(rows.out_cache_loc.as<std::int32_t>(),
                                       rows.out_cache_loc.as<std::int32_t>() + rows.out_cache_loc.shape[0]);
  CHECK(locs == std::vector<std::int32_t>{21, 22, 31, 32});
}

TEST_CASE("positions, slots and counts that cannot be write nothing outside the table") {
  Message message(terms(), {0, 1, 2}, {0, 0, 0});
  message.batch.slots = {kSlots - 1, 0, 1};
  message.batch.lens = {kTable - 1, 3, -2};
  const std::vector<int> lanes = {0, 1, 2};
  const std::vector<std::int32_t> lens = {0, 0, 0};
  message.size =
      pack_rows(message.batch.view(), terms(), {9, false, lanes, {message.table.data(), lens}}, message.bytes);
  std::vector<std::int32_t> table(std::size_t{kSlots} * kTable + 4, -1);
  std::vector<std::int32_t> expected = table;
  write_table(message.read(terms()), terms(), table.data());
  expected[(kSlots - 1) * kTable + kTable - 1] = 31;
  CHECK(table == expected);
}

TEST_CASE("a table part that is not of the terms is refused") {
  Message message(terms(), {0, 1, 2}, {5, 0, 2});
  const auto told = [&](const Terms& own) { return message_of([&] { (void)message.read(own); }); };
  CHECK(told(terms()) == "nothing was thrown");
  Terms other = terms();
  other.table_width = 4;
  CHECK(told(other) == "rows table_lens: expected in 0..4, got 5");
  other.table_width = 2;
  CHECK(told(other) == "rows num_entries: expected in 0..6, got 7");
  other = terms();
  other.num_kv_slots = other.table_width = 0;
  CHECK(told(other) == "rows num_entries: expected in 0..0, got 7");
  const RowsView rows = message.read(terms());
  rows.table_lens.as<std::int32_t>()[2] = 3;
  CHECK(told(terms()) == "rows num_entries: expected 8, got 7");
}

TEST_CASE("what pooled terms need of a batch") {
  const Batch batch;
  const std::vector<std::int32_t> table = host_table(), lens = {0, 0, 0}, few = {0, 0}, long_one = {0, 13, 0};
  const auto told = [&](const eaglex::DraftBatch& given, const TableRows& with) {
    return message_of([&] { check_table(given, terms(), with); });
  };
  CHECK(told(batch.view(), {table.data(), lens}) == "nothing was thrown");
  CHECK(told(batch.view(), {nullptr, lens}).find("req_to_token: expected the host's table") == 0);
  CHECK(told(batch.view(), {table.data(), few}).find("table_lens: expected 3 lengths, got 2") == 0);
  CHECK(told(batch.view(), {table.data(), long_one}).find("table_lens: expected in 0..12, got 13") == 0);
  eaglex::DraftBatch without = batch.view();
  without.out_cache_loc = {};
  CHECK(told(without, {table.data(), lens}).find("out_cache_loc: expected the rows' KV slots") == 0);
}

TEST_CASE("members agree on KV slots and on the table's width") {
  Terms other = terms();
  other.num_kv_slots = 49;
  CHECK(difference(terms(), other) == "num_kv_slots: expected 50 as in the group, got 49");
  other = terms();
  other.table_width = 13;
  CHECK(difference(terms(), other) == "table_width: expected 12 as in the group, got 13");
  other.table_width = 0;
  CHECK(message_of([&] { other.check(); }).find("table_width: expected") == 0);
  other = terms();
  other.num_kv_slots = 0;
  CHECK(message_of([&] { other.check(); }).find("table_width: expected") == 0);
  other = terms();
  other.max_rows = 0;
  CHECK(message_of([&] { other.check(); }).find("num_kv_slots: expected") == 0);
}

TEST_CASE("coverage by cycles: from a beginning on, whatever the lengths, until a cycle is missed") {
  DrafterLink link(terms(), {});
  const Time now = Clock::now();
  CHECK_FALSE(link.covers(1));
  link.joined(1, {}, now);
  REQUIRE(link.ready(now));
  CHECK(link.anew());
  link.asked(1, now);
  link.cover(1, 17);
  CHECK_FALSE(link.anew());
  CHECK(link.covers(1));
  CHECK_FALSE(link.covers(0));
  CHECK_FALSE(link.covers(kSlots));
  link.forget(1);
  CHECK_FALSE(link.covers(1));
  link.cover(1, 17);
  link.expired(now);  // it is late: rows will be missed
  CHECK_FALSE(link.covers(1));
  CHECK(link.replied({1, 1, false, {}}, now) == false);
  REQUIRE(link.ready(now + std::chrono::seconds(5)));
  CHECK(link.anew());
}
