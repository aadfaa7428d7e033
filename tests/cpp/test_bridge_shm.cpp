// Shared memory, rings and groups between real processes: order, deadlines, and what is left when one is killed.
#include <doctest/doctest.h>
#include <signal.h>

#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bridge/bridge.h"
#include "support/processes.h"

using namespace eaglex::bridge;
using namespace support;
using namespace std::chrono_literals;

namespace {

constexpr GroupId kId = {0x1234, 0x5678};

Terms terms(int ranks = 2, int max_rows = 0) {
  Terms made;
  made.num_ranks = ranks;
  made.max_lanes = 3;
  made.num_draft_tokens = 4;
  made.num_steps = 3;
  made.num_slots = 4;
  made.vocab_size = 100000;
  made.aux_width = max_rows > 0 ? 5 : 0;
  made.max_rows = max_rows;
  return made;
}

struct Lanes {
  std::vector<std::int64_t> slots = {2, 1};
  std::vector<std::int64_t> lens;
  explicit Lanes(std::int64_t cycle) : lens{cycle + 5, cycle + 9} {}
  [[nodiscard]] LaneList view() const { return {2, slots.data(), lens.data()}; }
};

}  // namespace

TEST_CASE("ten thousand cycles reach two other processes in order, with stalls on both sides") {
  Group group = Group::create(terms(3), kId);
  const std::string address = group.address();
  constexpr std::int64_t kCycles = 10000;
  const auto peer = [&](int rank) {
    return [&, rank] {
      Group own = Group::join(address, terms(3), kId, rank);
      const auto bridge = make_shm_bridge(own, 20s);
      Results results;
      for (std::int64_t cycle = 0; cycle < kCycles; ++cycle) {
        if (cycle % (300 + rank * 11) == 0) std::this_thread::sleep_for(1ms);
        const bool drafted = bridge->receive(Lanes(cycle).view(), results.view(), nullptr) == Verdict::kDraft;
        if (drafted != (cycle % 5 != 0)) return false;
        if (drafted && !(results.has(2, cycle + 5, cycle) && results.has(1, cycle + 9, cycle))) return false;
        if (!drafted && (results.nodes[1] != 0 || results.lens[1] != cycle + 9)) return false;
      }
      return bridge->counters().received == kCycles && bridge->counters().drafts == kCycles - kCycles / 5;
    };
  };
  Child one(peer(1)), two(peer(2));
  wait_until([&] { return !group.gone(1) && !group.gone(2); });
  const auto bridge = make_shm_bridge(group, 20s);
  Results results;
  for (std::int64_t cycle = 0; cycle < kCycles; ++cycle) {
    if (cycle % 417 == 0) std::this_thread::sleep_for(1ms);
    results.draft(2, cycle + 5, cycle);
    results.draft(1, cycle + 9, cycle);
    bridge->push(Lanes(cycle).view(), results.view(), cycle % 5 == 0 ? Verdict::kNoDraft : Verdict::kDraft, nullptr);
    if ((results.nodes[1] == 0) != (cycle % 5 == 0)) FAIL("rank 0 has other drafts than it sent");
  }
  CHECK(one.wait() == 0);
  CHECK(two.wait() == 0);
}

TEST_CASE("a group leaves no file behind") {
  const auto files = [] {
    const std::filesystem::directory_iterator shm("/dev/shm");
    return std::count_if(begin(shm), end(shm), [](const auto& entry) {
      return entry.path().filename().string().find("eaglex") != std::string::npos;
    });
  };
  const auto before = files();
  Child holder([] {
    const Group group = Group::create(terms(), kId);
    std::this_thread::sleep_for(30s);
    return true;
  });
  std::this_thread::sleep_for(50ms);
  CHECK(files() == before);
  holder.signal(SIGKILL);
  CHECK(holder.wait() == -SIGKILL);
  CHECK(files() == before);
}

TEST_CASE("who may join") {
  Group group = Group::create(terms(), kId);
  const auto join = [&](const Terms& own, const GroupId& id, int rank) {
    return message_of([&] { (void)Group::join(group.address(), own, id, rank); });
  };
  CHECK(join(terms(), {1, 2}, 1).find("group: expected") == 0);
  Terms other = terms();
  other.num_slots = 5;
  CHECK(join(other, kId, 1) == "num_slots: expected 4 as in the group, got 5 on rank 1");
  other = terms();
  other.version = 9;
  CHECK(join(other, kId, 1) == "protocol version: expected 4 as in the group, got 9 on rank 1");
  CHECK(join(terms(), kId, 2) == "rank: expected in 1..1, got 2");
  CHECK(join(terms(), kId, 0) == "rank: expected in 1..1, got 0");
  const Group one = Group::join(group.address(), terms(), kId, 1);
  CHECK(join(terms(), kId, 1).find("rank: expected a free one, got 1, which process") == 0);
  CHECK(message_of([] {
          (void)Group::join("/proc/1/fd/9999", terms(), kId, 1);
        }).find("shared memory: expected rank 0's") == 0);
  CHECK(message_of([] { (void)Group::join("/dev/null", terms(), kId, 1); }).find("shared memory") == 0);
}

TEST_CASE("a lost rank is named on all others by the deadline") {
  Group group = Group::create(terms(3), kId);
  const std::string address = group.address();
  Group own = Group::join(address, terms(3), kId, 1);
  Child victim([&] {
    const Group joined = Group::join(address, terms(3), kId, 2);
    std::this_thread::sleep_for(30s);
    return true;
  });
  wait_until([&] { return !group.gone(2); });
  const auto bridge = make_shm_bridge(group, 300ms);
  const auto peer = make_shm_bridge(own, 300ms);
  Results results;
  std::string expected;
  Clock::duration limit = 1300ms;
  SUBCASE("killed") {
    victim.signal(SIGKILL);
    victim.wait();
    expected = "rank 2: its process has ended";
  }
  SUBCASE("stopped") {
    victim.signal(SIGSTOP);
    expected = "rank 2: it took no message of rank 0 within 0.3 s";
  }
  const Time begun = Clock::now();
  const std::string told = message_of([&] {
    for (std::int64_t cycle = 0; cycle < 10; ++cycle) {
      bridge->push(Lanes(cycle).view(), results.view(), Verdict::kNoDraft, nullptr);
      (void)peer->receive(Lanes(cycle).view(), results.view(), nullptr);
    }
  });
  CHECK(told == expected);
  CHECK(Clock::now() - begun < limit);
  CHECK(message_of([&] { (void)peer->receive(Lanes(99).view(), results.view(), nullptr); }) == expected);
  CHECK(message_of([&] { bridge->push(Lanes(99).view(), results.view(), Verdict::kNoDraft, nullptr); }) == expected);
  REQUIRE(group.suspects().size() == 1);
  CHECK(group.suspects()[0].rank == 2);
  CHECK(group.suspects()[0].why.find("its process ") == 0);
}

TEST_CASE("without rank 0 the others end, by name") {
  auto group = std::make_unique<Group>(Group::create(terms(), kId));
  Group own = Group::join(group->address(), terms(), kId, 1);
  const auto peer = make_shm_bridge(own, 200ms);
  Results results;
  std::string expected = "rank 0: no message to rank 1 within 0.2 s";
  SUBCASE("silent") {}
  SUBCASE("gone") {
    group.reset();
    expected = "rank 0: its process has ended";
  }
  CHECK(message_of([&] { (void)peer->receive(Lanes(0).view(), results.view(), nullptr); }) == expected);
}

TEST_CASE("a rank with another batch has split, which ends the group for all") {
  Group group = Group::create(terms(), kId);
  Group own = Group::join(group.address(), terms(), kId, 1);
  const auto bridge = make_shm_bridge(group, 1s), peer = make_shm_bridge(own, 1s);
  Results results;
  bridge->push(Lanes(3).view(), results.view(), Verdict::kNoDraft, nullptr);
  const std::string expected = "rank 1: it has split from rank 0: length of lane 0: expected 9, got 8";
  CHECK(message_of([&] { (void)peer->receive(Lanes(4).view(), results.view(), nullptr); }) == expected);
  CHECK(message_of([&] { group.check(); }) == expected);
}

TEST_CASE("who is behind in the target's collectives is suspected") {
  Group group = Group::create(terms(), kId);
  Group own = Group::join(group.address(), terms(), kId, 1);
  CHECK(group.suspects().empty());
  group.enter();
  group.enter();
  own.enter();
  REQUIRE(group.suspects().size() == 1);
  CHECK(group.suspects()[0].why == "it entered 1 of 2 collectives of the target");
  CHECK(own.suspects().empty());
}
