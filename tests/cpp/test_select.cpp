#include <doctest/doctest.h>

#include <vector>

#include "core/select.h"

using namespace eaglex;

namespace {

// One live lane in slot 1; the head's top-k is written by hand.
struct World {
  explicit World(SpeculationConfig speculation) {
    context.config.vocab_size = 100;
    context.speculation = speculation;
    context.limits = {1, 8, 2};
    const auto k = static_cast<std::size_t>(speculation.topk);
    const auto grid = static_cast<std::size_t>(speculation.num_candidates());
    tokens.resize(k);
    nodes.resize(k);
    parents.resize(k);
    scores.resize(k);
    for (auto& list : ancestors) list.resize(k * static_cast<std::size_t>(speculation.num_steps), -9);
    grid_tokens.resize(grid);
    grid_parents.resize(grid);
    grid_nodes.resize(grid);
    grid_scores.resize(grid);
    top_scores.resize(k * k);
    top_ids.resize(k * k);
    const auto out = static_cast<std::size_t>(speculation.num_draft_tokens - 1) * 2;
    draft_tokens.resize(out, -1);
    draft_parents.resize(out, -1);
    draft_scores.resize(out, -1);
    context.lanes = {&status,
                     &new_len,
                     tokens.data(),
                     nodes.data(),
                     scores.data(),
                     parents.data(),
                     {ancestors[0].data(), ancestors[1].data()},
                     grid_tokens.data(),
                     grid_parents.data(),
                     grid_scores.data(),
                     grid_nodes.data(),
                     top_scores.data(),
                     top_ids.data()};
    context.results = {
        draft_tokens.data(), draft_parents.data(), draft_scores.data(), num_nodes, drafted_for, nullptr, nullptr};
    batch.batch = 1;
    batch.req_pool_indices.i32 = &slot;
  }
  LaneStatus step(int draft_step, std::vector<float> new_scores, std::vector<std::int32_t> ids) {
    std::copy(new_scores.begin(), new_scores.end(), top_scores.begin());
    std::copy(ids.begin(), ids.end(), top_ids.begin());
    return select_lane(context, batch, {draft_step, d2t}, 0);
  }
  template <typename T>
  std::vector<T> slot_one(const std::vector<T>& all) const {
    return {all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end()};
  }

  EngineContext context;
  DraftBatch batch;
  const std::int64_t* d2t = nullptr;
  std::int32_t slot = 1;
  std::int32_t status = 0;
  std::int64_t new_len = 42;
  std::vector<std::int64_t> tokens, grid_tokens, draft_tokens;
  std::vector<std::int32_t> nodes, parents, ancestors[2], grid_parents, grid_nodes, top_ids, draft_parents;
  std::vector<float> scores, grid_scores, top_scores, draft_scores;
  std::int32_t num_nodes[2] = {9, 9};
  std::int64_t drafted_for[2] = {-1, -1};
};

}  // namespace

TEST_CASE("a chain: each token under the one before, scores add up, d2t adds its difference") {
  World world({3, 1, 4});
  const std::vector<std::int64_t> d2t = {10, 10, 10, 10};
  world.d2t = d2t.data();
  world.step(0, {-0.5F}, {3});
  CHECK(world.tokens[0] == 13);
  world.step(1, {-0.25F}, {1});
  CHECK(world.step(2, {-1.0F}, {2}) == LaneStatus::kLive);
  CHECK(world.slot_one(world.draft_tokens) == std::vector<std::int64_t>{13, 11, 12});
  CHECK(world.slot_one(world.draft_parents) == std::vector<std::int32_t>{0, 1, 2});
  CHECK(world.slot_one(world.draft_scores) == std::vector<float>{-0.5F, -0.75F, -1.75F});
  CHECK(world.num_nodes[1] == 3);
  CHECK(world.drafted_for[1] == 42);
  CHECK(world.num_nodes[0] == 9);  // the other slot is left alone
}

TEST_CASE("a tree: the frontier is the best k of k², re-ranking keeps the best and restores grid order") {
  World world({3, 2, 5});
  world.step(0, {-0.1F, -2.0F}, {5, 6});
  CHECK(world.tokens == std::vector<std::int64_t>{5, 6});
  // Children of 5: 7 at -0.6, 8 at -0.9; of 6: 9 at -2.1, 4 at -7. The frontier is 7 and 8, both under 5.
  world.step(1, {-0.5F, -0.8F, -0.1F, -5.0F}, {7, 8, 9, 4});
  CHECK(world.tokens == std::vector<std::int64_t>{7, 8});
  CHECK(world.parents == std::vector<std::int32_t>{0, 0});
  CHECK(world.nodes == std::vector<std::int32_t>{3, 4});  // grid index + 1
  CHECK(world.ancestors[1] ==
        std::vector<std::int32_t>{0, 2, -9, 0, 3, -9});  // scratch nodes: step · k + frontier index
  // Children of 7: 1 at -0.7, 2 at -3.6; of 8: 3 at -2.9, 4 at -3.9.
  world.step(2, {-0.1F, -3.0F, -2.0F, -3.0F}, {1, 2, 3, 4});
  CHECK(world.slot_one(world.draft_tokens) == std::vector<std::int64_t>{5, 7, 8, 1});
  CHECK(world.slot_one(world.draft_parents) == std::vector<std::int32_t>{0, 1, 1, 2});
}

TEST_CASE("ties go to the lowest index, in the frontier and in the re-ranking") {
  World world({2, 2, 3});
  world.step(0, {-1.0F, -1.0F}, {8, 9});
  CHECK(world.tokens == std::vector<std::int64_t>{8, 9});
  world.step(1, {0.0F, 0.0F, 0.0F, 0.0F}, {1, 2, 3, 4});  // every score is -1
  CHECK(world.slot_one(world.draft_tokens) == std::vector<std::int64_t>{8, 9});
}

TEST_CASE("no draft: the count is 0 and the length is said, whatever the reason") {
  World world({2, 1, 3});
  SUBCASE("not finite") {
    world.status = static_cast<std::int32_t>(LaneStatus::kNotFinite);
  }
  SUBCASE("held") {
    world.status = static_cast<std::int32_t>(LaneStatus::kHeld);
  }
  world.step(0, {-1.0F}, {1});
  world.step(1, {-1.0F}, {1});
  CHECK(world.num_nodes[1] == 0);
  CHECK(world.drafted_for[1] == 42);
}

TEST_CASE("a draft that falls below the threshold ends with that step, and later steps leave it alone") {
  World world({4, 1, 5});
  world.context.speculation.stop_score = -1.0F;
  CHECK(world.step(0, {-0.5F}, {3}) == LaneStatus::kLive);
  CHECK(world.num_nodes[1] == 9);
  CHECK(world.step(1, {-0.75F}, {1}) == LaneStatus::kStopped);
  CHECK(world.num_nodes[1] == 2);
  CHECK(world.drafted_for[1] == 42);
  CHECK(world.step(2, {-0.1F}, {2}) == LaneStatus::kStopped);
  CHECK(world.step(3, {-0.1F}, {2}) == LaneStatus::kStopped);
  CHECK(world.num_nodes[1] == 2);
  CHECK(world.slot_one(world.draft_tokens)[0] == 3);
  CHECK(world.slot_one(world.draft_tokens)[1] == 1);
}

TEST_CASE("in the last step there is nothing left to stop") {
  World world({2, 1, 3});
  world.context.speculation.stop_score = -1.0F;
  CHECK(world.step(0, {-0.5F}, {3}) == LaneStatus::kLive);
  CHECK(world.step(1, {-9.0F}, {1}) == LaneStatus::kLive);
  CHECK(world.num_nodes[1] == 2);
}

TEST_CASE("a tree stops by its best node and keeps what there is") {
  World world({3, 2, 7});
  world.context.speculation.stop_score = -0.4F;
  CHECK(world.step(0, {-0.1F, -2.0F}, {5, 6}) == LaneStatus::kLive);
  CHECK(world.step(1, {-0.5F, -0.8F, -0.1F, -5.0F}, {7, 8, 9, 4}) == LaneStatus::kStopped);
  CHECK(world.num_nodes[1] == 6);  // all candidates so far
}

TEST_CASE("a d2t that leaves the vocabulary voids the lane's draft") {
  World world({2, 1, 3});
  const std::vector<std::int64_t> d2t = {0, 99, 0};  // id 1 → 100, one past the end
  world.d2t = d2t.data();
  CHECK(world.step(0, {-1.0F}, {1}) == LaneStatus::kBadIndex);
  CHECK(world.step(1, {-1.0F}, {0}) == LaneStatus::kBadIndex);
  CHECK(world.num_nodes[1] == 0);
}
