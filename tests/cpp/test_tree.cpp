#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "core/tree.h"

using namespace eaglex;

namespace {

// Slot 1 holds a tree for length 3:  root ─ a(11) ─ c(13)
//                                         └ b(12)
struct World {
  explicit World(int verifier_nodes) : n(verifier_nodes) {
    source.results = {draft_tokens.data(), parents.data(), nullptr, num_nodes.data(),
                      drafted_for.data(),  nullptr,        nullptr};
    source.num_slots = 2;
    source.num_drafted = 3;
    source.vocab_size = 100;
    source.num_steps = 2;
    const auto size = static_cast<std::size_t>(n);
    for (auto* list : {&tokens, &positions, &index, &next, &sibling}) list->resize(size, -7);
    mask.resize(size * 64, 9);
    batch.batch = 1;
    batch.num_draft_tokens = n;
    batch.req_pool_indices.i32 = &slot;
    batch.seq_lens.i64 = &seq_len;
    batch.bonus_tokens.i64 = &bonus;
    batch.draft_tokens = tokens.data();
    batch.positions = positions.data();
    batch.retrieve_index = index.data();
    batch.retrieve_next_token = next.data();
    batch.retrieve_next_sibling = sibling.data();
    batch.mask = mask.data();
    batch.mask_size = static_cast<std::int64_t>(mask.size());
  }
  void run(MaskMode mode = MaskMode::kQlenOnly) {
    batch.mask_mode = mode;
    tree_lane(source, batch, 0);
  }
  [[nodiscard]] std::vector<int> bytes(int count) const { return {mask.begin(), mask.begin() + count}; }
  [[nodiscard]] bool drafts_nothing() {
    run();
    return next[0] == -1 && tokens[1] == bonus;
  }

  int n;
  TreeSource source;
  VerifyBatch batch;
  std::vector<std::int64_t> draft_tokens = {0, 0, 0, 11, 12, 13};
  std::vector<std::int32_t> parents = {0, 0, 0, 0, 0, 1};
  std::vector<std::int32_t> num_nodes = {0, 3};
  std::vector<std::int64_t> drafted_for = {-1, 3};
  std::int32_t slot = 1;
  std::int64_t seq_len = 3;
  std::int64_t bonus = 50;
  std::vector<std::int64_t> tokens, positions, index, next, sibling;
  std::vector<std::uint8_t> mask;
};

using Ids = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("a tree of three nodes becomes the verifier's tensors") {
  World world(4);
  world.run();
  CHECK(world.tokens == Ids{50, 11, 12, 13});
  CHECK(world.positions == Ids{3, 4, 4, 5});
  CHECK(world.index == Ids{0, 1, 2, 3});
  CHECK(world.next == Ids{1, 3, -1, -1});
  CHECK(world.sibling == Ids{-1, 2, -1, -1});
  CHECK(world.bytes(16) == std::vector<int>{1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1});
}

TEST_CASE("the mask in all of the host's modes") {
  World world(4);
  world.run(MaskMode::kFull);
  CHECK(world.bytes(28) ==
        std::vector<int>{1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 1});
  world.run(MaskMode::kQlenOnlyBitpack);
  CHECK(world.bytes(4) == std::vector<int>{0b0001, 0b0011, 0b0101, 0b1011});
  CHECK(packed_mask_bytes(8) == 1);
  CHECK(packed_mask_bytes(9) == 2);
  CHECK(packed_mask_bytes(17) == 4);
  CHECK(packed_mask_bytes(33) == 8);
}

TEST_CASE("a full mask starts behind the lanes before it") {
  VerifyBatch batch;
  const Ids lens = {3, 5, 1};
  batch.seq_lens.i64 = lens.data();
  batch.num_draft_tokens = 2;
  batch.mask_mode = MaskMode::kFull;
  batch.mask_size = 2 * (3 + 2) + 2 * (5 + 2) + 2 * (1 + 2);
  CHECK(mask_offset(batch, 2) == 2 * (3 + 2) + 2 * (5 + 2));
}

TEST_CASE("a full mask that does not fit is not written, and its lane gets no draft") {
  World world(4);
  SUBCASE("too short by one") {
    world.batch.mask_size = 4 * (3 + 4) - 1;
  }
  SUBCASE("a negative length") {
    world.seq_len = -1;
  }
  SUBCASE("a length that would overflow") {
    world.seq_len = std::numeric_limits<std::int64_t>::max();
  }
  world.run(MaskMode::kFull);
  CHECK(world.mask == std::vector<std::uint8_t>(world.mask.size(), 9));
  CHECK(world.next[0] == -1);
}

TEST_CASE("a verifier with fewer nodes takes the first, one with more gets pads that nothing reaches") {
  World small(3);
  small.run();
  CHECK(small.next == Ids{1, -1, -1});
  CHECK(small.sibling == Ids{-1, 2, -1});
  World large(6);
  large.run();
  CHECK(large.tokens == Ids{50, 11, 12, 13, 50, 50});
  CHECK(large.positions == Ids{3, 4, 4, 5, 4, 4});
  CHECK(large.next == Ids{1, 3, -1, -1, -1, -1});
  CHECK(large.sibling == Ids{-1, 2, -1, -1, -1, -1});
}

TEST_CASE("64 nodes fill the last bit") {
  World world(64);
  world.run(MaskMode::kQlenOnlyBitpack);
  CHECK(world.mask[63 * 8] == 1);
  CHECK(world.mask[63 * 8 + 7] == 0x80);
}

TEST_CASE("no draft where the result is not this length's, or not a tree") {
  World world(4);
  SUBCASE("another length") {
    world.seq_len = 4;
  }
  SUBCASE("no draft, and a length that says the same") {
    world.seq_len = world.drafted_for[1] = -1;
  }
  SUBCASE("deeper than the steps") {
    world.source.num_steps = 1;
  }
  SUBCASE("the padded slot") {
    world.slot = 0;
  }
  SUBCASE("no such slot") {
    world.slot = 2;
  }
  SUBCASE("no nodes") {
    world.num_nodes[1] = 0;
  }
  SUBCASE("a count that cannot be") {
    world.num_nodes[1] = 4;
  }
  SUBCASE("a negative count") {
    world.num_nodes[1] = -1;
  }
  SUBCASE("a parent behind its child") {
    world.parents[4] = 2;
  }
  SUBCASE("a negative parent") {
    world.parents[3] = -1;
  }
  SUBCASE("a token outside the vocabulary") {
    world.draft_tokens[5] = 100;
  }
  CHECK(world.drafts_nothing());
}
