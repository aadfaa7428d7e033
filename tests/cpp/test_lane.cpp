#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "core/lane.h"

using namespace eaglex;

namespace {

// Three lanes: a decode of 4 rows with 2 that count, a padded lane, a prompt chunk of 3 rows.
struct World {
  EngineContext context;
  DraftBatch batch;
  std::vector<std::int64_t> input_ids = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<std::int32_t> row_start = {0, 4, 5, 8};
  std::vector<std::int32_t> num_valid = {2, 1, 3};
  std::vector<std::uint8_t> draft_from = {1, 1, 0};
  std::vector<std::int32_t> req_pool_indices = {3, 0, 1};
  std::vector<std::int64_t> seq_lens = {10, 0, 20};
  std::vector<std::int32_t> req_to_token;
  std::vector<std::int32_t> status = std::vector<std::int32_t>(3);
  std::vector<std::int64_t> new_len = std::vector<std::int64_t>(3);
  std::vector<std::int32_t> frontier_parents = {0, 0, 0, 0, 0, 0};
  std::vector<std::int64_t> drafted_for = std::vector<std::int64_t>(4, 7);

  World() {
    context.config.vocab_size = 100;
    context.config.max_positions = 64;
    context.speculation = {4, 2, 8};
    context.limits = {3, 8, 4};
    req_to_token.resize(4 * 64);
    for (std::size_t i = 0; i < req_to_token.size(); ++i) req_to_token[i] = static_cast<std::int32_t>(i);
    context.kv.req_to_token = req_to_token.data();
    context.kv.max_context = 64;
    context.kv.num_kv_slots = 256;
    context.lanes.status = status.data();
    context.lanes.new_len = new_len.data();
    context.lanes.frontier_parents = frontier_parents.data();
    context.results.drafted_for = drafted_for.data();
    batch.batch = 3;
    batch.num_rows = 8;
    batch.input_ids.i64 = input_ids.data();
    batch.row_start = row_start.data();
    batch.num_valid = num_valid.data();
    batch.draft_from = draft_from.data();
    batch.req_pool_indices.i32 = req_pool_indices.data();
    batch.seq_lens.i64 = seq_lens.data();
  }
  void admit() {
    for (int lane = 0; lane < 3; ++lane) admit_lane(context, batch, lane);
  }
  [[nodiscard]] LaneStatus status_of_first() {
    admit();
    return static_cast<LaneStatus>(status[0]);
  }
};

}  // namespace

TEST_CASE("admit: live, padded, held; new lengths; old results voided") {
  World world;
  world.admit();
  CHECK(world.status == std::vector<std::int32_t>{static_cast<int>(LaneStatus::kLive),
                                                  static_cast<int>(LaneStatus::kPadded),
                                                  static_cast<int>(LaneStatus::kHeld)});
  CHECK(world.new_len[0] == 12);
  CHECK(world.new_len[2] == 23);
  CHECK(world.drafted_for == std::vector<std::int64_t>{7, -1, 7, -1});
}

TEST_CASE("admit: whatever is out of range makes the lane touch nothing") {
  World world;
  SUBCASE("request slot") {
    world.req_pool_indices[0] = 4;
  }
  SUBCASE("negative request slot") {
    world.req_pool_indices[0] = -1;
  }
  SUBCASE("no valid row") {
    world.num_valid[0] = 0;
  }
  SUBCASE("more valid rows than rows") {
    world.num_valid[0] = 5;
  }
  SUBCASE("rows beyond the batch") {
    world.row_start[1] = 9;
  }
  SUBCASE("negative length") {
    world.seq_lens[0] = -1;
  }
  SUBCASE("beyond the context") {
    world.seq_lens[0] = 63;
  }
  SUBCASE("token") {
    world.input_ids[1] = 100;
  }
  SUBCASE("negative token") {
    world.input_ids[0] = -1;
  }
  SUBCASE("no KV slot for a row to be written") {
    world.req_to_token[3 * 64 + 11] = -1;
  }
  SUBCASE("KV slot outside the pool") {
    world.req_to_token[3 * 64 + 10] = 256;
  }
  CHECK(world.status_of_first() == LaneStatus::kBadIndex);
  CHECK_FALSE(keeps_kv(LaneStatus::kBadIndex));
}

TEST_CASE("admit: rows that do not count are not looked at") {
  World world;
  world.input_ids[2] = -5;
  world.req_to_token[3 * 64 + 12] = -1;
  CHECK(world.status_of_first() == LaneStatus::kLive);
}

TEST_CASE("admit: room for K more tokens below the context") {
  World world;
  world.seq_lens[0] = 64 - 4 - 2 - 1;  // new length 59, the deepest node at 63
  CHECK(world.status_of_first() == LaneStatus::kLive);
  world.seq_lens[0] += 1;
  CHECK(world.status_of_first() == LaneStatus::kNoRoom);
}

TEST_CASE("locate: rows of the extend belong to their lane and sit behind its length") {
  World world;
  world.admit();
  const Rows all{Pass::kExtendAll, 0, 10};
  const std::array<bool, 10> live = {true, true, false, false, false, true, true, true, false, false};
  for (int row = 0; row < 10; ++row) {
    const RowPlace place = locate(world.context, world.batch, all, row);
    CHECK(place.live == live[static_cast<std::size_t>(row)]);
    if (place.live) {
      CHECK(place.lane == (row < 4 ? 0 : 2));
      CHECK(place.position == (row < 4 ? 10 + row : 20 + row - 5));
    }
  }
}

TEST_CASE("locate: an empty lane in between owns no row") {
  World world;
  world.row_start = {0, 4, 4, 8};
  world.admit();
  CHECK(locate(world.context, world.batch, {Pass::kExtendAll, 0, 8}, 4).lane == 2);
}

TEST_CASE("locate: drafting starts from the last row that counts, steps continue their parent's row") {
  World world;
  world.admit();
  const RowPlace last = locate(world.context, world.batch, {Pass::kExtendLast, 0, 3}, 0);
  CHECK(last.live);
  CHECK(last.source == 1);
  CHECK(last.position == 11);
  CHECK_FALSE(locate(world.context, world.batch, {Pass::kExtendLast, 0, 3}, 2).live);  // held
  CHECK_FALSE(locate(world.context, world.batch, {Pass::kExtendLast, 0, 9}, 8).live);  // no such lane

  world.frontier_parents = {0, 0, 1, 1, 0, 1};
  world.req_pool_indices[1] = 2;
  world.seq_lens[1] = 5;
  world.admit();
  const RowPlace first = locate(world.context, world.batch, {Pass::kStep, 1, 6}, 1);
  CHECK(first.source == 0);  // the extend's one row per lane
  CHECK(first.position == 12);
  const RowPlace second = locate(world.context, world.batch, {Pass::kStep, 2, 6}, 2);
  CHECK(second.lane == 1);
  CHECK(second.source == 1 * 2 + 1);
  CHECK(second.position == 6 + 1);
}
