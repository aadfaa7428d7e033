// The push kernels on the emulated runtime, one after the other: what is sent arrives, what is wrong is told.
#include <doctest/doctest.h>

#include <vector>

#include "bridge/packet.cuh"
#include "bridge/push.h"
#include "core/error.h"

using namespace eaglex;
using namespace eaglex::bridge;

namespace {

constexpr int kSlots = 6;
constexpr int kNodes = 4;
constexpr int kReceivers = 3;

struct Results {
  std::vector<std::int64_t> tokens = std::vector<std::int64_t>(kSlots * kNodes);
  std::vector<std::int32_t> parents = std::vector<std::int32_t>(kSlots * kNodes);
  std::vector<std::int32_t> nodes = std::vector<std::int32_t>(kSlots);
  std::vector<std::int64_t> lens = std::vector<std::int64_t>(kSlots, -1);

  DraftResults view() {
    DraftResults made;
    made.draft_tokens = tokens.data();
    made.parents = parents.data();
    made.num_nodes = nodes.data();
    made.drafted_for = lens.data();
    return made;
  }
};

struct World {
  World() {
    for (int r = 0; r < kReceivers; ++r) {
      inboxes.emplace_back(inbox_bytes(shape) / sizeof(Packet));
      received.emplace_back();
    }
    for (auto& inbox : inboxes) to.push_back(inbox.data());
    sender.shape = shape;
    sender.epochs = epochs.data();
    sender.staging = sent_bytes.data();
    sender.inboxes = to.data();
    sender.num_receivers = kReceivers;
    sender.status = &status;
  }
  [[nodiscard]] PushChannel receiver(int r) {
    PushChannel made;
    made.shape = shape;
    made.epochs = &own_epochs[static_cast<std::size_t>(r)];
    made.staging = own_bytes.data();
    made.inbox = inboxes[static_cast<std::size_t>(r)].data();
    made.status = &status;
    made.deadline_ns = 1'000'000;
    return made;
  }
  [[nodiscard]] PushLanes lanes() { return {{2, slots.data(), lens.data()}, &verdict}; }
  // Slot 4 gets a chain for length `length`, slot 2 nothing.
  void draft(std::int64_t length) {
    lens = {length, length + 1};
    results.nodes[4] = 3;
    results.lens[4] = length;
    for (std::size_t i = 0; i < 3; ++i) {
      results.tokens[4 * kNodes + i] = length * 3 + static_cast<std::int64_t>(i);
      results.parents[4 * kNodes + i] = static_cast<std::int32_t>(i);
    }
  }
  void push() { launch_push(sender, {results.view(), kSlots, kNodes, 1000, kNodes}, lanes(), nullptr); }
  void receive(int r) {
    launch_receive(receiver(r), received[static_cast<std::size_t>(r)].view(), kSlots, lanes(), nullptr);
  }

  MessageShape shape{3, kNodes};
  std::vector<std::vector<Packet>> inboxes;
  std::vector<Packet*> to;
  std::vector<Results> received;
  Results results;
  std::vector<std::uint64_t> epochs = std::vector<std::uint64_t>(kReceivers), own_epochs = epochs;
  std::vector<std::byte> sent_bytes = std::vector<std::byte>(kReceivers * (shape.max_bytes() + 8));
  std::vector<std::byte> own_bytes = std::vector<std::byte>(shape.max_bytes() + 8);
  std::vector<std::int64_t> slots = {4, 2};
  std::vector<std::int64_t> lens = {0, 0};
  Verdict verdict = Verdict::kDraft;
  PushStatus status;
  PushChannel sender;
};

}  // namespace

TEST_CASE("push: cycles reach every receiver, over the end of the inbox") {
  World world;
  for (std::int64_t cycle = 10; cycle < 23; ++cycle) {
    world.draft(cycle);
    world.verdict = cycle % 3 == 0 ? Verdict::kNoDraft : Verdict::kDraft;
    world.push();
    for (int r = 0; r < kReceivers; ++r) {
      world.receive(r);
      const Results& found = world.received[static_cast<std::size_t>(r)];
      REQUIRE(world.status.code == PushCode::kFine);
      CHECK(found.nodes[4] == (cycle % 3 == 0 ? 0 : 3));
      CHECK(found.nodes[2] == 0);
      CHECK(found.lens[4] == cycle);
      CHECK(found.lens[2] == cycle + 1);
      if (cycle % 3 == 0) continue;
      CHECK(found.tokens[4 * kNodes + 2] == cycle * 3 + 2);
      CHECK(found.parents[4 * kNodes + 2] == 2);
    }
  }
}

TEST_CASE("receive: no message by the deadline is told once and leaves no draft") {
  World world;
  world.draft(10);
  world.push();
  world.receive(0);
  world.lens = {11, 12};
  world.receive(0);
  CHECK(world.status.code == PushCode::kLate);
  CHECK(world.status.epoch == 2);
  CHECK(world.received[0].nodes[4] == 0);
  CHECK(world.received[0].lens[4] == -1);
  world.receive(0);
  CHECK(world.status.epoch == 2);
}

TEST_CASE("receive: another batch is a split, and its lane is told") {
  World world;
  world.draft(10);
  world.push();
  SUBCASE("another length") {
    world.lens[1] = 99;
  }
  SUBCASE("another slot") {
    world.slots[1] = 3;
  }
  world.receive(1);
  CHECK(world.status.code == PushCode::kSplit);
  CHECK(world.status.lane == 1);
  CHECK(world.received[1].nodes[4] == 0);
}

TEST_CASE("push: more lanes than agreed are refused") {
  World world;
  world.slots = {1, 2, 3, 4};
  world.lens = {1, 1, 1, 1};
  const PushLanes many = {{4, world.slots.data(), world.lens.data()}, &world.verdict};
  CHECK_THROWS_AS(launch_push(world.sender, {}, many, nullptr), Error);
}
