// admit's list of the rows that count (csrc/cuda/live_rows.h) on the emulated runtime, against the loops of core/lane.h.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "cuda/admit.h"

using namespace eaglex;
using namespace eaglex::cuda;

namespace {

constexpr int kLanes = 40, kSlots = 48, kContext = 96, kVocab = 50;

// A batch with pads, held chunks, and all that can be wrong with a lane.
struct World {
  std::vector<std::int32_t> starts{0}, valid, table;
  std::vector<std::int64_t> ids, requests, lens;
  std::vector<std::uint8_t> from;
  std::vector<std::int32_t> status = std::vector<std::int32_t>(kLanes);
  std::vector<std::int64_t> new_len = std::vector<std::int64_t>(kLanes);
  std::vector<std::int64_t> drafted_for = std::vector<std::int64_t>(kSlots);
  std::vector<std::int32_t> drafting = std::vector<std::int32_t>(kMaxSteps + 1);
  std::int32_t count = 777;  // of an earlier batch
  std::vector<LiveRow> rows = std::vector<LiveRow>(LiveRows::kMost, LiveRow{7, 7, 7, 7, 7});
  DraftBatch batch;
  Chain chain;

  World(std::mt19937& random, int lanes, int most) {
    const auto any = [&random](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    for (int i = 0; i < kSlots * kContext; ++i) table.push_back(any(40) == 0 ? -1 : i);
    for (int lane = 0; lane < lanes; ++lane) {
      const int count_of = 1 + any(most);
      starts.push_back(starts.back() + count_of);
      valid.push_back(any(12) == 0 ? count_of + 1 : any(12) == 0 ? 0 : 1 + any(count_of));
      requests.push_back(any(6) == 0 ? 0 : any(12) == 0 ? kSlots : 1 + any(kSlots - 1));
      lens.push_back(any(12) == 0 ? -3 : any(12) == 0 ? kContext - 1 : any(kContext / 2));
      from.push_back(any(4) != 0);
      for (int i = 0; i < count_of; ++i) ids.push_back(any(40) == 0 ? kVocab : any(kVocab));
    }
    if (lanes > 3 && any(3) == 0) starts[2] = starts[1] - 1;  // out of order
    batch.batch = lanes;
    batch.num_rows = starts.back();
    batch.input_ids.i64 = ids.data();
    batch.row_start = starts.data();
    batch.num_valid = valid.data();
    batch.draft_from = from.data();
    batch.req_pool_indices.i64 = requests.data();
    batch.seq_lens.i64 = lens.data();
    EngineContext& context = chain.context;
    context.config.vocab_size = kVocab;
    context.config.max_positions = kContext;
    context.speculation.num_steps = 3;
    context.limits = {kLanes, 400, kSlots};
    context.kv.req_to_token = table.data();
    context.kv.max_context = kContext;
    context.kv.num_kv_slots = kSlots * kContext;
    context.lanes.status = status.data();
    context.lanes.new_len = new_len.data();
    context.results.drafted_for = drafted_for.data();
    chain.batch = &batch;
    chain.drafting = drafting.data();
  }
};

TEST_CASE("admit lists the rows that count, in order, and no row of a lane that keeps nothing") {
  std::mt19937 random(5);
  int listed = 0, unsound = 0, queries = 0;
  for (int round = 0; round < 300; ++round) {
    const int lanes = static_cast<int>(random() % (kLanes + 1));
    World world(random, lanes, round % 3 == 0 ? 9 : 6);
    launch_admit(world.chain, {&world.count, world.rows.data()}, kLanes, nullptr);
    const std::vector<std::int32_t> found = world.status;
    int at = 0;
    for (std::int32_t lane = 0; lane < lanes; ++lane) {
      const EngineContext& context = world.chain.context;
      const bool counted = keeps_kv(lane_status(context, world.batch, lane));
      admit_lane(context, world.batch, lane);
      REQUIRE(world.status[static_cast<std::size_t>(lane)] == found[static_cast<std::size_t>(lane)]);
      const LaneStatus status = status_of(context, lane);
      for (int i = 0; counted && i < world.valid[static_cast<std::size_t>(lane)]; ++i, ++at) {
        const LiveRow& row = world.rows[static_cast<std::size_t>(at)];
        if (!keeps_kv(status)) {
          REQUIRE((row.row == -1 && row.query == -1));
          ++unsound;
          continue;
        }
        const RowPlace place = locate(context, world.batch, {Pass::kExtendAll, 0, 400}, row.row);
        REQUIRE((place.live && place.lane == lane && place.position == row.position));
        REQUIRE(row.row == world.starts[static_cast<std::size_t>(lane)] + i);
        REQUIRE(row.token == world.ids[static_cast<std::size_t>(row.row)]);
        REQUIRE(row.kv_slot == write_slot(context, world.batch, lane, row.row, row.position));
        const bool last = i == world.valid[static_cast<std::size_t>(lane)] - 1;
        REQUIRE(row.query == (status == LaneStatus::kLive && last ? lane : -1));
        ++listed, queries += row.query >= 0;
      }
    }
    REQUIRE(world.count == at);
    REQUIRE(at <= world.batch.num_rows);
  }
  CHECK((listed > 3000 && unsound > 100 && queries > 500));
}

TEST_CASE("admit lists nothing where there is no list, or more rows than it holds") {
  std::mt19937 random(6);
  World world(random, kLanes, 6);
  launch_admit(world.chain, {}, kLanes, nullptr);
  CHECK(world.count == 777);
  world.batch.num_rows = LiveRows::kMost + 1;
  launch_admit(world.chain, {&world.count, world.rows.data()}, kLanes, nullptr);
  CHECK(world.count == 777);
}

}  // namespace
