// The push kernels on the emulated runtime, one after the other: what is sent arrives, what is wrong is told.
#include <doctest/doctest.h>

#include <random>
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

// One sender, and receivers one after the other, all in this process. No host answers: a kernel that tells of a failure
// waits for as long as it may.
struct World {
  World() {
    for (int r = 0; r < kReceivers; ++r) {
      inboxes.emplace_back(inbox_bytes(shape) / sizeof(Packet));
      received.emplace_back();
    }
    sender = channel(states[kReceivers], statuses[kReceivers]);
    for (int r = 0; r < kReceivers; ++r) sender.inboxes[r] = inboxes[static_cast<std::size_t>(r)].data();
    sender.num_receivers = kReceivers;
    sender.acks = acks;
  }
  [[nodiscard]] PushChannel channel(PushState& state, PushStatus& status) {
    PushChannel made;
    made.shape = shape;
    made.state = &state;
    made.staging = bytes.data();
    made.status = &status;
    made.deadline_ns = 1'000'000;
    return made;
  }
  [[nodiscard]] PushChannel receiver(int r) {
    PushChannel made = channel(states[r], statuses[r]);
    made.inbox = inboxes[static_cast<std::size_t>(r)].data();
    made.ack = acks + r;
    return made;
  }
  [[nodiscard]] LaneList lanes() { return {2, slots.data(), lens.data()}; }
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
  void push() { launch_push(sender, {results.view(), kSlots, kNodes, 1000, kNodes}, lanes(), verdict, nullptr); }
  void receive(int r) {
    launch_receive(receiver(r), received[static_cast<std::size_t>(r)].view(), kSlots, lanes(), nullptr);
  }

  MessageShape shape{3, kNodes};
  std::vector<std::vector<Packet>> inboxes;
  std::vector<Results> received;
  Results results;
  PushState states[kReceivers + 1] = {};
  PushStatus statuses[kReceivers + 1] = {};
  std::uint64_t acks[kReceivers] = {};
  std::vector<std::byte> bytes = std::vector<std::byte>(packets_of(shape.max_bytes()) * 8);
  std::vector<std::int64_t> slots = {4, 2};
  std::vector<std::int64_t> lens = {0, 0};
  Verdict verdict = Verdict::kDraft;
  PushChannel sender;
};

}  // namespace

TEST_CASE("push: cycles reach every receiver, over the end of the inbox") {
  World world;
  std::uint64_t drafts = 0;
  for (std::int64_t cycle = 10; cycle < 45; ++cycle) {
    world.draft(cycle);
    world.verdict = cycle % 3 == 0 ? Verdict::kNoDraft : Verdict::kDraft;
    drafts += cycle % 3 == 0 ? 0 : 1;
    world.push();
    CHECK(world.results.nodes[4] == (cycle % 3 == 0 ? 0 : 3));
    CHECK(world.results.lens[2] == cycle + 1);  // rank 0 has what it sent
    for (int r = 0; r < kReceivers; ++r) {
      world.receive(r);
      const Results& found = world.received[static_cast<std::size_t>(r)];
      REQUIRE(world.statuses[r].code == PushCode::kFine);
      CHECK(world.acks[r] == static_cast<std::uint64_t>(cycle - 9) / kAckEvery * kAckEvery);
      CHECK(found.nodes[4] == (cycle % 3 == 0 ? 0 : 3));
      CHECK(found.nodes[2] == 0);
      CHECK(found.lens[4] == cycle);
      CHECK(found.lens[2] == cycle + 1);
      if (cycle % 3 == 0) continue;
      CHECK(found.tokens[4 * kNodes + 2] == cycle * 3 + 2);
      CHECK(found.parents[4 * kNodes + 2] == 2);
    }
  }
  for (const PushState& state : world.states) {
    CHECK(state.epoch == 35);
    CHECK(state.drafts == drafts);
  }
}

// Drafts of 7 + 3 and 9 + 2 tokens have come as those of 10 and 11.
void check_sums(World& world) {
  world.lens = {10, 11};
  world.receive(0);
  CHECK(world.statuses[0].code == PushCode::kFine);
  CHECK(world.received[0].nodes[4] == 3);
  CHECK(world.received[0].lens[2] == 11);
}

TEST_CASE("push: lengths before the rows of this cycle, and how many of those count") {
  World world;
  world.draft(10);
  std::vector<std::int32_t> valid = {3, 2};
  world.lens = {7, 9};
  LaneList lanes = world.lanes();
  lanes.num_valid = valid.data();
  launch_push(world.sender, {world.results.view(), kSlots, kNodes, 1000, kNodes}, lanes, Verdict::kDraft, nullptr);
  check_sums(world);
}

TEST_CASE("push: a cycle's graph finds its lanes in the parameter block") {
  World world;
  world.draft(10);
  std::vector<std::int32_t> valid = {3, 2}, slots = {4, 2};
  std::vector<std::int64_t> before = {7, 9};
  DraftBatch block;
  block.batch = 2;
  block.req_pool_indices = {slots.data(), nullptr};
  block.seq_lens = {nullptr, before.data()};
  block.num_valid = valid.data();
  LaneList lanes;
  lanes.count = 3;
  lanes.block = &block;
  launch_push(world.sender, {world.results.view(), kSlots, kNodes, 1000, kNodes}, lanes, Verdict::kDraft, nullptr);
  check_sums(world);
}

TEST_CASE("push: which drafts are fit to be sent is core's judgement") {
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int used = 0;
  World world;
  for (std::int64_t round = 1; round < 400; ++round) {
    world.lens = {round, round};
    for (const std::size_t slot : {2, 4}) {
      world.results.nodes[slot] = draw(0, 9) == 0 ? draw(-1, kNodes + 1) : draw(0, kNodes);
      world.results.lens[slot] = round - (draw(0, 9) == 0 ? 1 : 0);
      for (int i = 0; i < kNodes; ++i) {
        const std::size_t at = slot * kNodes + static_cast<std::size_t>(i);
        world.results.tokens[at] = draw(0, 30) == 0 ? draw(0, 1) * 1001 - 1 : draw(0, 999);
        world.results.parents[at] = draw(0, 30) == 0 ? draw(-1, kNodes + 1) : draw(0, i);
      }
    }
    const TreeSource source = {world.results.view(), kSlots, kNodes, 1000, 2};
    const int expected[] = {usable_nodes(source, 4, round, kNodes), usable_nodes(source, 2, round, kNodes)};
    launch_push(world.sender, source, world.lanes(), Verdict::kDraft, nullptr);
    for (int r = 0; r < kReceivers; ++r) world.receive(r);
    CHECK(world.received[0].nodes[4] == expected[0]);
    CHECK(world.received[2].nodes[2] == expected[1]);
    for (std::size_t i = 0; i < static_cast<std::size_t>(expected[0]); ++i) {
      CHECK(world.received[1].tokens[4 * kNodes + i] == world.results.tokens[4 * kNodes + i]);
      CHECK(world.received[1].parents[4 * kNodes + i] == world.results.parents[4 * kNodes + i]);
    }
    used += expected[0] > 0 ? 1 : 0;
  }
  CHECK(used > 50);
  CHECK(used < 350);
}

TEST_CASE("push: more lanes than one tile of the kernel holds") {
  constexpr int kMany = 700;
  World world;
  const MessageShape shape = {kMany, kNodes};
  std::vector<std::vector<Packet>> boxes(kReceivers, std::vector<Packet>(inbox_bytes(shape) / sizeof(Packet)));
  std::vector<std::byte> bytes(packets_of(shape.max_bytes()) * 8);
  world.sender.shape = shape;
  for (std::size_t r = 0; r < kReceivers; ++r) world.sender.inboxes[r] = boxes[r].data();
  std::vector<std::int64_t> tokens((kMany + 1) * kNodes), got_tokens(tokens.size()), lens(kMany + 1),
      got_lens(kMany + 1);
  std::vector<std::int32_t> parents(tokens.size()), got_parents(tokens.size()), nodes(kMany + 1), got_nodes(kMany + 1);
  std::vector<std::int64_t> slots(kMany), wanted(kMany);
  for (std::size_t i = 0; i < kMany; ++i) {
    slots[i] = static_cast<std::int64_t>(kMany - i);
    wanted[i] = static_cast<std::int64_t>(i) + 5;
    const auto slot = static_cast<std::size_t>(slots[i]);
    lens[slot] = wanted[i];
    nodes[slot] = static_cast<std::int32_t>(i % (kNodes + 1));
    for (std::size_t n = 0; n < kNodes; ++n) tokens[slot * kNodes + n] = static_cast<std::int64_t>(slot * 7 + n) % 1000;
  }
  DraftResults sent, found;
  sent.draft_tokens = tokens.data();
  sent.parents = parents.data();
  sent.num_nodes = nodes.data();
  sent.drafted_for = lens.data();
  found.draft_tokens = got_tokens.data();
  found.parents = got_parents.data();
  found.num_nodes = got_nodes.data();
  found.drafted_for = got_lens.data();
  const LaneList lanes = {kMany, slots.data(), wanted.data()};
  launch_push(world.sender, {sent, kMany + 1, kNodes, 1000, kNodes}, lanes, Verdict::kDraft, nullptr);
  PushChannel receiver = world.receiver(2);
  receiver.shape = shape;
  receiver.staging = bytes.data();
  receiver.inbox = boxes[2].data();
  launch_receive(receiver, found, kMany + 1, lanes, nullptr);
  REQUIRE(world.statuses[2].code == PushCode::kFine);
  CHECK(got_nodes == nodes);
  CHECK(got_lens == lens);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (static_cast<int>(i % kNodes) < nodes[i / kNodes]) CHECK(got_tokens[i] == tokens[i]);
  }
}

TEST_CASE("without inboxes the message travels by other means") {
  World world;
  world.sender.acks = nullptr;
  for (std::int64_t cycle = 10; cycle < 13; ++cycle) {
    world.draft(cycle);
    world.push();
    CHECK(world.states[kReceivers].epoch == static_cast<std::uint64_t>(cycle - 9));
    launch_mark(world.sender, Mark::kDone, nullptr);
    CHECK(world.states[kReceivers].marked == static_cast<std::uint64_t>(cycle - 9));
    PushChannel receiver = world.receiver(1);
    receiver.inbox = nullptr;
    receiver.ack = nullptr;
    launch_mark(receiver, Mark::kBegun, nullptr);
    CHECK(world.states[1].marked == static_cast<std::uint64_t>(cycle - 9));
    launch_receive(receiver, world.received[1].view(), kSlots, world.lanes(), nullptr);
    REQUIRE(world.statuses[1].code == PushCode::kFine);
    CHECK(world.states[1].epoch == static_cast<std::uint64_t>(cycle - 9));
    CHECK(world.received[1].tokens[4 * kNodes + 1] == cycle * 3 + 1);
  }
  PushChannel receiver = world.receiver(1);
  receiver.inbox = nullptr;
  world.statuses[1].stop = 1;
  launch_receive(receiver, world.received[1].view(), kSlots, world.lanes(), nullptr);  // an old message: none came
  CHECK(world.statuses[1].code == PushCode::kEnded);
  CHECK(world.received[1].nodes[4] == 0);
}

TEST_CASE("receive: no message by the deadline is told once and leaves no draft") {
  World world;
  world.draft(10);
  world.push();
  world.receive(0);
  world.lens = {11, 12};
  world.receive(0);
  CHECK(world.statuses[0].code == PushCode::kLate);
  CHECK(world.statuses[0].epoch == 2);
  CHECK(world.received[0].nodes[4] == 0);
  CHECK(world.received[0].lens[4] == -1);
  world.receive(0);
  CHECK(world.statuses[0].epoch == 2);
}

TEST_CASE("push: a receiver that takes nothing is waited for, then named") {
  World world;
  for (std::int64_t cycle = 10; cycle < 10 + kInboxDepth; ++cycle) {
    world.draft(cycle);
    world.push();
    world.receive(0);
    world.receive(2);
  }
  CHECK(world.statuses[kReceivers].code == PushCode::kFine);
  world.draft(99);
  world.push();
  CHECK(world.statuses[kReceivers].code == PushCode::kLate);
  CHECK(world.statuses[kReceivers].who == 1);
  CHECK(world.results.nodes[4] == 0);
  CHECK(world.results.lens[4] == -1);
}

TEST_CASE("receive: another batch is a split, and what differs is told") {
  World world;
  world.draft(10);
  world.push();
  std::uint32_t lane = 1;
  SplitField field = SplitField::kLength;
  std::int64_t expected = 99, got = 11;
  SUBCASE("another length") {
    world.lens[1] = 99;
  }
  SUBCASE("another slot") {
    world.slots[1] = 3;
    field = SplitField::kSlot;
    expected = 3;
    got = 2;
  }
  SUBCASE("more lanes") {
    world.slots.push_back(5);
    world.lens.push_back(5);
    lane = 0;
    field = SplitField::kNumLanes;
    expected = 3;
    got = 2;
  }
  const LaneList lanes = {static_cast<std::int32_t>(world.slots.size()), world.slots.data(), world.lens.data()};
  launch_receive(world.receiver(1), world.received[1].view(), kSlots, lanes, nullptr);
  const PushStatus& status = world.statuses[1];
  CHECK(status.code == PushCode::kSplit);
  CHECK(status.who == lane);
  CHECK(status.field == field);
  CHECK(status.expected == expected);
  CHECK(status.got == got);
  CHECK(world.received[1].nodes[4] == 0);
}

TEST_CASE("the host's word ends every wait") {
  World world;
  world.statuses[0].stop = 1;
  PushChannel receiver = world.receiver(0);
  receiver.deadline_ns = 10'000'000;  // of threads that run before the one that asks
  world.draft(10);
  launch_receive(receiver, world.received[0].view(), kSlots, world.lanes(), nullptr);
  CHECK(world.statuses[0].code == PushCode::kEnded);
}

TEST_CASE("push: more lanes than agreed are refused") {
  World world;
  world.slots = {1, 2, 3, 4};
  world.lens = {1, 1, 1, 1};
  const LaneList many = {4, world.slots.data(), world.lens.data()};
  CHECK_THROWS_AS(launch_push(world.sender, {}, many, Verdict::kDraft, nullptr), Error);
}
