// The protocol's state machine, with a clock that the tests move.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "bridge/protocol.h"

using namespace eaglex::bridge;
using namespace std::chrono_literals;
using State = DrafterLink::State;

namespace {

Terms terms() {
  Terms made;
  made.num_ranks = 2;
  made.max_lanes = 4;
  made.num_draft_tokens = 4;
  made.num_steps = 3;
  made.num_slots = 8;
  made.vocab_size = 100;
  made.aux_width = 6;
  made.max_rows = 32;
  return made;
}

struct World {
  DrafterLink link{terms(), {100ms, 1000ms}};
  Time now{};

  void join(std::uint64_t generation = 1) { link.joined(generation, "", now); }
  void fall() {
    join();
    REQUIRE(link.ready(now));
    link.asked(7, now);
    now += 100ms;
    link.expired(now);
  }
  bool reply(std::uint64_t epoch, std::uint64_t generation = 1) {
    return link.replied({generation, epoch, false, {}}, now);
  }
  [[nodiscard]] std::int64_t count(Fault fault) const { return link.faults()[static_cast<std::size_t>(fault)]; }
};

// A message of two lanes: slot 3 has a chain of two for length 9, slot 5 nothing for length 4.
struct Message {
  Message() : bytes(shape.bytes(2)) {
    const MessageView view(bytes.data(), shape, 2);
    *view.header = {11, Verdict::kDraft, 2};
    view.lanes[0] = {9, 3, 2};
    view.lanes[1] = {4, 5, 0};
    view.nodes[0] = {42, 0};
    view.nodes[1] = {43, 1};
  }
  [[nodiscard]] MessageView<std::byte> view() { return {bytes.data(), shape, 2}; }
  [[nodiscard]] std::string complaint(std::uint64_t epoch = 11) const {
    return complaint_about(bytes, terms(), epoch, {2, slots.data(), lens.data()});
  }

  MessageShape shape = terms().shape();
  std::vector<std::byte> bytes;
  std::vector<std::int64_t> slots = {3, 5};
  std::vector<std::int64_t> lens = {9, 4};
};

}  // namespace

TEST_CASE("a message that fits is used") {
  CHECK(Message().complaint().empty());
}

TEST_CASE("a message that does not fit says what is wrong") {
  Message message;
  std::string expected;
  SUBCASE("an older epoch") {
    message.view().header->epoch = 10;
    expected = "epoch: expected 11, got 10";
  }
  SUBCASE("another batch") {
    message.view().header->num_lanes = 3;
    expected = "num_lanes: expected 2, got 3";
  }
  SUBCASE("cut short") {
    message.bytes.resize(message.bytes.size() - 8);
    expected = "message bytes: expected 96, got 88";
  }
  SUBCASE("not even a header") {
    message.bytes.resize(3);
    expected = "message bytes: expected at least 16, got 3";
  }
  SUBCASE("no verdict") {
    message.view().header->verdict = static_cast<Verdict>(7);
    expected = "verdict: expected 0 or 1, got 7";
  }
  SUBCASE("another slot") {
    message.view().lanes[1].slot = 6;
    expected = "slot of lane 1: expected 5, got 6";
  }
  SUBCASE("another length") {
    message.view().lanes[0].drafted_for = 10;
    expected = "length of lane 0: expected 9, got 10";
  }
  SUBCASE("more nodes than there can be") {
    message.view().lanes[0].num_nodes = 4;
    expected = "num_nodes of lane 0: expected in 0..3, got 4";
  }
  SUBCASE("nodes without a draft") {
    message.view().header->verdict = Verdict::kNoDraft;
    expected = "num_nodes of lane 0: expected in 0..0, got 2";
  }
  CHECK(message.complaint() == expected);
}

TEST_CASE("a slot that this rank has no room for is refused") {
  Message message;
  message.view().lanes[1].slot = 8;
  message.slots[1] = 8;
  CHECK(message.complaint() == "slot of lane 1: expected in 0..7, got 8");
}

TEST_CASE("packing and reading bring a draft to another rank, and only a sound one") {
  const MessageShape shape = terms().shape();
  std::vector<std::int64_t> tokens(24), lens = {-1, -1, -1, 9, -1, -1, -1, -1};
  std::vector<std::int32_t> parents(24), nodes = {0, 0, 0, 2, 0, 0, 0, 0};
  tokens[9] = 42, tokens[10] = 43, parents[10] = 1;
  const eaglex::DraftResults from = {tokens.data(), parents.data(), nullptr, nodes.data(),
                                     lens.data(),   nullptr,        nullptr};
  eaglex::TreeSource source = {from, 8, 3, 100, 3};
  MessageLane lane;
  std::vector<MessageNode> packed(3);
  const auto pack = [&](std::int64_t new_len, Verdict verdict) {
    pack_lane(source, 3, new_len, verdict, &lane, packed.data());
    return lane.num_nodes;
  };
  CHECK(pack(10, Verdict::kDraft) == 0);
  CHECK(lane.drafted_for == 10);
  CHECK(pack(9, Verdict::kNoDraft) == 0);
  source.vocab_size = 43;
  CHECK(pack(9, Verdict::kDraft) == 0);
  source.vocab_size = 100;
  REQUIRE(pack(9, Verdict::kDraft) == 2);

  std::vector<std::int64_t> other_tokens(24), other_lens(8, -1);
  std::vector<std::int32_t> other_parents(24), other_nodes(8);
  unpack_lane(
      lane, packed.data(), shape.num_drafted,
      {other_tokens.data(), other_parents.data(), nullptr, other_nodes.data(), other_lens.data(), nullptr, nullptr});
  CHECK(other_tokens == tokens);
  CHECK(other_parents == parents);
  CHECK(other_nodes == nodes);
  CHECK(other_lens == lens);
}

TEST_CASE("terms that differ are told by name") {
  Terms other = terms();
  CHECK(difference(terms(), other).empty());
  other.vocab_size = 101;
  CHECK(difference(terms(), other) == "vocab_size: expected 100 as in the group, got 101");
  other.version = 9;
  CHECK(difference(terms(), other) == "protocol version: expected 4 as in the group, got 9");
}

TEST_CASE("terms that cannot be are refused") {
  Terms bad = terms();
  SUBCASE("no ranks") {
    bad.num_ranks = 0;
  }
  SUBCASE("too many") {
    bad.num_ranks = kMaxRanks + 1;
  }
  SUBCASE("no lanes") {
    bad.max_lanes = 0;
  }
  SUBCASE("no root") {
    bad.num_draft_tokens = 0;
  }
  SUBCASE("only the padded slot") {
    bad.num_slots = 1;
  }
  CHECK_THROWS_AS(bad.check(), eaglex::Error);
}

TEST_CASE("an absent drafter is neither asked nor complained about") {
  World world;
  CHECK_FALSE(world.link.ready(world.now));
  world.link.left(world.now);
  CHECK(world.link.take_warning().empty());
  CHECK(world.link.state() == State::kAbsent);
}

TEST_CASE("asked and answered") {
  World world;
  world.join();
  REQUIRE(world.link.ready(world.now));
  CHECK(world.link.returns() == 0);
  world.link.asked(7, world.now);
  CHECK(world.link.state() == State::kDrafting);
  CHECK_FALSE(world.link.ready(world.now));
  CHECK(world.link.deadline() == world.now + 100ms);
  world.now += 50ms;
  CHECK(world.reply(7));
  CHECK(world.link.ready(world.now));
  CHECK_FALSE(world.reply(7));  // the same once more
  CHECK(world.link.take_warning().empty());
}

TEST_CASE("late: no draft, one warning, and back when its reply has come and it has rested") {
  World world;
  world.fall();
  CHECK(world.link.state() == State::kResting);
  CHECK(world.count(Fault::kLate) == 1);
  CHECK(world.link.take_warning().find("no reply within 100 ms") != std::string::npos);
  CHECK(world.link.take_warning().empty());
  world.now += 2000ms;
  CHECK_FALSE(world.link.ready(world.now));  // the reply is overdue: asking again would queue behind it
  CHECK_FALSE(world.reply(6));
  CHECK_FALSE(world.link.ready(world.now));
  CHECK_FALSE(world.reply(7));  // too late to be used
  CHECK(world.link.ready(world.now));
  CHECK(world.link.returns() == 1);
  world.link.asked(8, world.now);
  world.link.expired(world.now);
  CHECK(world.count(Fault::kLate) == 2);
  CHECK_FALSE(world.link.take_warning().empty());
}

TEST_CASE("late again and again: it rests twice as long each time, until it answers in time or ends") {
  World world;
  world.join();
  std::uint64_t epoch = 0;
  // The rest after one more late reply, in ms, which itself comes soon.
  const auto rest = [&] {
    REQUIRE(world.link.ready(world.now));
    world.link.asked(++epoch, world.now);
    world.now += 100ms;
    world.link.expired(world.now);
    CHECK_FALSE(world.reply(epoch));
    const Time fell = world.now;
    while (!world.link.ready(world.now)) world.now += 500ms;
    return (world.now - fell) / 1ms;
  };
  for (const int expected : {1000, 2000, 4000, 8000, 16000, 32000, 64000, 64000}) CHECK(rest() == expected);
  SUBCASE("it answers") {
    world.link.asked(++epoch, world.now);
    CHECK(world.reply(epoch));
  }
  SUBCASE("another process comes, which need not wait for the rest of its predecessor's") {
    world.link.asked(++epoch, world.now);
    world.link.expired(world.now);
    world.link.left(world.now);
    world.now += 1000ms;
    world.join(2);
    world.now += 1000ms;
    REQUIRE(world.link.ready(world.now));
    world.link.asked(++epoch, world.now);
    CHECK(world.reply(epoch, 2));
    world.link.asked(++epoch, world.now);
    world.link.expired(world.now);
    CHECK_FALSE(world.reply(epoch, 2));
    world.now += 1000ms;
    CHECK(world.link.ready(world.now));
    return;
  }
  CHECK(rest() == 1000);
}

TEST_CASE("an engine that fails again and again is asked less and less") {
  World world;
  world.join();
  for (const auto expected : {1000ms, 2000ms, 4000ms}) {
    REQUIRE(world.link.ready(world.now));
    world.link.asked(7, world.now);
    CHECK_FALSE(world.link.replied({1, 7, true, {}}, world.now));
    world.now += expected - 1ms;
    CHECK_FALSE(world.link.ready(world.now));
    world.now += 1ms;
  }
}

TEST_CASE("a request that is given more time is late later") {
  World world;
  world.join();
  REQUIRE(world.link.ready(world.now));
  world.link.asked(7, world.now, 3000ms);
  CHECK(world.link.deadline() == world.now + 3000ms);
  world.link.expired(world.now + 3000ms);
  CHECK(world.link.take_warning().find("no reply within 3000 ms") != std::string::npos);
}

TEST_CASE("two requests out are answered in their order") {
  World world;
  world.join();
  REQUIRE(world.link.ready(world.now));
  world.link.asked(7, world.now);
  world.link.asked(9, world.now);
  CHECK_FALSE(world.reply(6));
  SUBCASE("well") {
    CHECK(world.reply(7));
    CHECK(world.link.state() == State::kDrafting);
    CHECK_FALSE(world.reply(7));
    CHECK(world.reply(9));
    CHECK(world.link.ready(world.now));
    CHECK(world.link.take_warning().empty());
    return;
  }
  SUBCASE("the first one late") {
    world.link.expired(world.now);
  }
  SUBCASE("the first one without a draft") {
    CHECK_FALSE(world.link.replied({1, 7, true, {}}, world.now));
  }
  world.now += 1000ms;
  CHECK_FALSE(world.reply(7));
  CHECK_FALSE(world.link.ready(world.now));  // the second one is still to come
  CHECK_FALSE(world.reply(9));
  CHECK(world.link.ready(world.now));
  CHECK(world.link.returns() == 1);
}

TEST_CASE("a late reply that comes soon does not bring it back at once") {
  World world;
  world.fall();
  CHECK_FALSE(world.reply(7));
  CHECK_FALSE(world.link.ready(world.now));
  world.now += 1000ms;
  CHECK(world.link.ready(world.now));
}

TEST_CASE("its end is noticed in every state, once") {
  World world;
  SUBCASE("ready") {
    world.join();
    REQUIRE(world.link.ready(world.now));
  }
  SUBCASE("drafting") {
    world.join();
    REQUIRE(world.link.ready(world.now));
    world.link.asked(7, world.now);
  }
  world.link.left(world.now);
  world.link.left(world.now);
  CHECK(world.link.state() == State::kAbsent);
  CHECK(world.count(Fault::kGone) == 1);
  CHECK(world.link.take_warning().find("its process has ended") != std::string::npos);
  world.join(2);
  CHECK_FALSE(world.link.ready(world.now));
  world.now += 1000ms;
  CHECK(world.link.ready(world.now));
  CHECK(world.link.returns() == 1);
}

TEST_CASE("its end after it was late is no second fault") {
  World world;
  world.fall();
  (void)world.link.take_warning();
  world.link.left(world.now);
  CHECK(world.link.state() == State::kAbsent);
  CHECK(world.count(Fault::kGone) == 0);
  CHECK(world.link.take_warning().empty());
}

TEST_CASE("a successor that comes before its predecessor's end was seen") {
  World world;
  world.join();
  REQUIRE(world.link.ready(world.now));
  world.link.asked(7, world.now);
  world.join(2);
  CHECK(world.count(Fault::kGone) == 1);
  CHECK_FALSE(world.reply(7, 1));  // a message that the predecessor left behind
  CHECK(world.link.state() == State::kResting);
  world.now += 1000ms;
  REQUIRE(world.link.ready(world.now));
  world.link.asked(8, world.now);
  CHECK_FALSE(world.reply(8, 1));
  CHECK(world.link.state() == State::kDrafting);
  CHECK(world.reply(8, 2));
}

TEST_CASE("made for something else: refused until another one comes") {
  World world;
  world.link.joined(1, "vocab_size: expected 100 as in the group, got 101", world.now);
  CHECK(world.link.state() == State::kRefused);
  CHECK(world.count(Fault::kRefused) == 1);
  CHECK(world.link.take_warning().find("vocab_size: expected 100") != std::string::npos);
  world.now += 5000ms;
  world.link.joined(1, "vocab_size: expected 100 as in the group, got 101", world.now);
  CHECK_FALSE(world.link.ready(world.now));
  CHECK(world.count(Fault::kRefused) == 1);
  world.join(2);
  CHECK(world.link.ready(world.now));
}

TEST_CASE("a reply that does not belong to what was asked") {
  World world;
  world.join();
  REQUIRE(world.link.ready(world.now));
  world.link.asked(7, world.now);
  Fault fault = Fault::kBadReply;
  SUBCASE("of the future") {
    CHECK_FALSE(world.reply(8));
  }
  SUBCASE("of another batch") {
    CHECK_FALSE(world.link.replied({1, 7, false, "num_lanes: expected 2, got 3"}, world.now));
  }
  SUBCASE("of an engine that failed") {
    CHECK_FALSE(world.link.replied({1, 7, true, "verdict"}, world.now));
    fault = Fault::kOwnFailure;
  }
  CHECK(world.link.state() == State::kResting);
  CHECK(world.count(fault) == 1);
  CHECK_FALSE(world.link.take_warning().empty());
  world.now += 1000ms;
  CHECK(world.link.ready(world.now));  // what it missed or mistook is over with its rest
}

TEST_CASE("only requests whose whole prefix it was given are asked about") {
  World world;
  world.join();
  REQUIRE(world.link.ready(world.now));
  CHECK(world.link.covers(3, 0));
  CHECK_FALSE(world.link.covers(3, 9));
  world.link.cover(3, 9);
  CHECK(world.link.covers(3, 9));
  CHECK_FALSE(world.link.covers(3, 10));
  CHECK_FALSE(world.link.covers(0, 0));
  CHECK_FALSE(world.link.covers(8, 0));
  SUBCASE("a fall forgets them: rows were missed meanwhile") {
    world.link.left(world.now);
  }
  SUBCASE("or rows that did not reach it") {
    world.link.forget(3);
  }
  CHECK_FALSE(world.link.covers(3, 9));
  CHECK(world.link.covers(3, 0));
}
