// A dedicated drafter that is killed, stopped, late, failing or made for something else: rank 0 says "no draft" in time,
// warns once, and takes it back.
#include <doctest/doctest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "bridge/bridge.h"
#include "support/drafter_terms.h"
#include "support/processes.h"

using namespace eaglex::bridge;
using namespace support;
using namespace std::chrono_literals;
using State = DrafterLink::State;

namespace {

constexpr GroupId kId = {0xabc, 0xdef};
// Where drafts are expected, a machine that is busy may take its time; where silence is, the test waits for it.
constexpr LinkTiming kPatient = {20s, 100ms};
constexpr LinkTiming kShort = {600ms, 100ms};
constexpr int kWidth = 5;

Terms terms() {
  return drafter_terms(kWidth);
}

// One request of `rows` rows, the first `valid` of which count.
struct Batch {
  Batch(std::int64_t slot, std::int64_t seq_len, int rows, int valid)
      : slots{slot}, lens{seq_len}, row_start{0, rows}, num_valid{valid}, draft_from{1} {
    for (int row = 0; row < rows; ++row) {
      input_ids.push_back(static_cast<std::int32_t>(seq_len) + row + 1);
      for (int i = 0; i < kWidth; ++i) aux.push_back(static_cast<float>(seq_len + row) + static_cast<float>(i) / 8);
    }
  }
  [[nodiscard]] eaglex::DraftBatch view() const {
    eaglex::DraftBatch batch;
    batch.batch = 1;
    batch.num_rows = row_start[1];
    batch.aux_hidden_states = aux.data();
    batch.aux_stride = kWidth;
    batch.input_ids.i32 = input_ids.data();
    batch.row_start = row_start.data();
    batch.num_valid = num_valid.data();
    batch.draft_from = draft_from.data();
    batch.req_pool_indices.i64 = slots.data();
    batch.seq_lens.i64 = lens.data();
    return batch;
  }

  std::vector<std::int64_t> slots, lens;
  std::vector<std::int32_t> row_start, num_valid, input_ids;
  std::vector<std::uint8_t> draft_from;
  std::vector<float> aux;
};

bool rows_are_right(const RowsView& rows) {
  const std::int64_t seq_len = rows.seq_lens.as<std::int64_t>()[0];
  for (std::int64_t row = 0; row < rows.input_ids.shape[0]; ++row) {
    if (rows.input_ids.as<std::int64_t>()[row] != seq_len + row + 1) return false;
    for (int i = 0; i < kWidth; ++i) {
      const float expected = static_cast<float>(seq_len + row) + static_cast<float>(i) / 8;
      if (rows.aux_hidden_states.as<float>()[row * kWidth + i] != expected) return false;
    }
  }
  return true;
}

enum class Habit : std::uint8_t { kGood, kSilent, kFailing };

// What a drafter's process does; its draft tells the length that it is for.
bool serve(const std::string& address, const Terms& own, Habit habit = Habit::kGood) {
  Group group = Group::join(address, own, kId, 1);
  DrafterServer server(group);
  Results results;
  for (;;) {
    const auto rows = server.next(10s);
    if (!rows) return false;
    if (!rows_are_right(*rows)) return false;
    if (habit == Habit::kSilent) std::this_thread::sleep_for(60s);
    const std::int64_t slot = rows->req_pool_indices.as<std::int64_t>()[0];
    const std::int64_t length = rows->seq_lens.as<std::int64_t>()[0] + rows->num_valid.as<std::int32_t>()[0];
    results.draft(slot, length, length);
    server.reply(results.view(), habit == Habit::kFailing ? Verdict::kNoDraft : Verdict::kDraft);
  }
}

struct World {
  explicit World(LinkTiming chosen = kPatient) : timing(chosen) {}

  std::unique_ptr<Child> drafter(Habit habit = Habit::kGood, const Terms& own = terms()) {
    const std::uint64_t before = group.generation();
    auto child = std::make_unique<Child>([&, address = group.address()] { return serve(address, own, habit); });
    wait_until([&] { return group.generation() > before; });
    return child;
  }
  // A request's whole life of `cycles` cycles; whether each was drafted for.
  std::string request(std::int64_t slot, int cycles = 3) {
    std::string drafted;
    std::int64_t length = 0;
    for (int cycle = 0; cycle < cycles; ++cycle) drafted += this->cycle(slot, length) ? '+' : '-';
    return drafted;
  }
  bool cycle(std::int64_t slot, std::int64_t& length) {
    const int rows = length == 0 ? 7 : 4, valid = length == 0 ? 7 : 2;
    results.draft(slot, length + valid, length + valid);  // of an earlier request: must not be taken for an answer
    const Time begun = Clock::now();
    const bool drafted = client.draft(Batch(slot, length, rows, valid).view(), results.view()) == Verdict::kDraft;
    CHECK(Clock::now() - begun < timing.deadline + 1s);
    length += valid;
    CHECK(drafted == results.has(slot, length, length));
    const std::string warning = client.link().take_warning();
    if (!warning.empty()) warnings.push_back(warning);
    return drafted;
  }
  [[nodiscard]] std::int64_t count(Fault fault) { return client.link().faults()[static_cast<std::size_t>(fault)]; }
  [[nodiscard]] std::int64_t faults() {
    std::int64_t sum = 0;
    for (const std::int64_t one : client.link().faults()) sum += one;
    return sum;
  }

  LinkTiming timing;
  Group group = Group::create(terms(), kId);
  DrafterClient client{group, timing};
  Results results;
  std::vector<std::string> warnings;
};

}  // namespace

TEST_CASE("a drafter that works") {
  World world;
  CHECK(world.request(1) == "---");  // nobody there, which is no fault
  CHECK(world.faults() == 0);
  const auto drafter = world.drafter();
  CHECK(world.request(1) == "+++");
  CHECK(world.request(2) == "+++");
  CHECK(world.request(2) == "+++");
  CHECK(world.warnings.empty());
}

TEST_CASE("a drafter that comes while requests run drafts for the next ones") {
  World world;
  std::int64_t length = 0;
  CHECK_FALSE(world.cycle(1, length));
  const auto drafter = world.drafter();
  CHECK_FALSE(world.cycle(1, length));  // it lacks this request's prompt
  CHECK(world.request(2) == "+++");
  CHECK_FALSE(world.cycle(1, length));
  CHECK(world.faults() == 0);
}

TEST_CASE("killed") {
  World world;
  std::unique_ptr<Child> drafter;
  SUBCASE("between two cycles") {
    drafter = world.drafter();
    CHECK(world.request(1) == "+++");
    drafter->signal(SIGKILL);
    drafter->wait();
    CHECK(world.request(1) == "---");
  }
  SUBCASE("while it drafts") {
    drafter = world.drafter(Habit::kSilent);
    std::thread killer([&] {
      std::this_thread::sleep_for(40ms);
      drafter->signal(SIGKILL);
    });
    CHECK(world.request(1) == "---");
    killer.join();
    drafter->wait();
  }
  CHECK(world.count(Fault::kGone) == 1);
  CHECK(world.faults() == 1);
  REQUIRE(world.warnings.size() == 1);
  CHECK(world.warnings[0].find("its process has ended") != std::string::npos);
  CHECK(world.request(1, 20) == std::string(20, '-'));
  CHECK(world.faults() == 1);
  drafter = world.drafter();
  std::this_thread::sleep_for(kPatient.rejoin_after);
  CHECK(world.request(1) == "+++");
  CHECK(world.client.link().returns() == 1);
  CHECK(world.warnings.size() == 1);
}

TEST_CASE("killed before its first request, or after it fell") {
  World world(kShort);
  std::unique_ptr<Child> drafter;
  SUBCASE("before rank 0 saw it") {
    drafter = world.drafter();
    drafter->signal(SIGKILL);
    drafter->wait();
    CHECK(world.request(1) == "---");
    CHECK(world.faults() == 0);  // it never was of use
  }
  SUBCASE("while it rests") {
    drafter = world.drafter(Habit::kSilent);
    CHECK(world.request(1) == "---");
    CHECK(world.count(Fault::kLate) == 1);
    drafter->signal(SIGKILL);
    drafter->wait();
    CHECK(world.request(1) == "---");
    CHECK(world.faults() == 1);
  }
  drafter = world.drafter();
  std::this_thread::sleep_for(kPatient.rejoin_after);
  CHECK(world.request(1) == "+++");
}

TEST_CASE("stopped, and resumed") {
  World world(kShort);
  const auto drafter = world.drafter();
  CHECK(world.request(1) == "+++");
  drafter->signal(SIGSTOP);
  const Time begun = Clock::now();
  CHECK(world.request(1, 50) == std::string(50, '-'));
  CHECK(Clock::now() - begun < kShort.deadline + 1s);  // only the first of the fifty waits
  CHECK(world.count(Fault::kLate) == 1);
  CHECK(world.faults() == 1);
  CHECK(world.warnings.size() == 1);
  SUBCASE("resumed") {
    drafter->signal(SIGCONT);
    std::this_thread::sleep_for(kPatient.rejoin_after + 50ms);
    CHECK(world.request(2) == "+++");
    CHECK(world.client.link().returns() == 1);
  }
  SUBCASE("nobody else gets its place while it lives") {
    CHECK(message_of([&] {
            (void)Group::join(world.group.address(), terms(), kId, 1);
          }).find("the dedicated drafter's place: expected a free one") == 0);
  }
  CHECK(world.warnings.size() == 1);
}

TEST_CASE("a drafter that is late again and again costs a deadline per rest, and a warning each") {
  World world(kShort);
  const auto drafter = world.drafter(Habit::kSilent);
  CHECK(world.request(1, 30) == std::string(30, '-'));
  CHECK(world.count(Fault::kLate) == 1);  // its one reply never came, so it was not asked again
  CHECK(world.warnings.size() == 1);
}

TEST_CASE("an engine that fails") {
  World world;
  const auto drafter = world.drafter(Habit::kFailing);
  CHECK(world.request(1) == "---");
  CHECK(world.count(Fault::kOwnFailure) == 1);
  CHECK(world.warnings.size() == 1);
}

TEST_CASE("made for something else") {
  World world;
  Terms other = terms();
  std::string expected;
  SUBCASE("another version") {
    other.version = 9;
    expected = "protocol version: expected 4 as in the group, got 9";
  }
  SUBCASE("another target") {
    other.aux_width = 6;
    expected = "aux_width: expected 5 as in the group, got 6";
  }
  SUBCASE("another shape of draft") {
    other.num_draft_tokens = 5;
    expected = "num_draft_tokens: expected 4 as in the group, got 5";
  }
  const auto wrong = std::make_unique<Child>(
      [&, address = world.group.address()] { return message_of([&] { serve(address, other); }).find(expected) == 0; });
  CHECK(wrong->wait() == 0);
  CHECK(world.request(1) == "---");
  CHECK(world.count(Fault::kRefused) == 1);
  REQUIRE(world.warnings.size() == 1);
  CHECK(world.warnings[0].find(expected) != std::string::npos);
  const auto right = world.drafter();
  std::this_thread::sleep_for(kPatient.rejoin_after);
  const std::string drafted = world.request(1);
  INFO(world.warnings.back());
  CHECK(drafted == "+++");
  CHECK(world.faults() == 1);
}

TEST_CASE("of another group: it does not get in, and rank 0 need not know") {
  World world;
  const std::string told = message_of([&] { (void)Group::join(world.group.address(), terms(), {1, 2}, 1); });
  CHECK(told.find("group: expected") == 0);
  CHECK(world.request(1) == "---");
  CHECK(world.faults() == 0);
}

TEST_CASE("the drafter ends when rank 0 is killed") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  Child rank0([&] {
    const Group group = Group::create(terms(), kId);
    const std::string address = group.address();
    if (write(ends[1], address.c_str(), address.size() + 1) < 0) return false;
    std::this_thread::sleep_for(30s);
    return true;
  });
  char address[64] = {};
  REQUIRE(read(ends[0], address, sizeof address - 1) > 0);
  close(ends[0]);
  close(ends[1]);
  Group group = Group::join(address, terms(), kId, 1);
  DrafterServer server(group);
  CHECK_FALSE(server.next(50ms).has_value());
  rank0.signal(SIGKILL);
  rank0.wait();
  CHECK(message_of([&] { (void)server.next(10s); }) == "rank 0: its process has ended");
  CHECK(message_of([&] { (void)Group::join(address, terms(), kId, 1); }).find("shared memory: expected rank 0's") == 0);
}

TEST_CASE("rows that are not of the terms are refused") {
  std::vector<std::byte> message(max_rows_bytes(terms()));
  const Batch batch(1, 4, 3, 2);
  const std::vector<int> lanes = {0};
  const std::size_t bytes = pack_rows(batch.view(), terms(), {9, false, lanes, {}}, message);
  const auto told = [&](std::size_t size, const Terms& own) {
    return message_of([&] { (void)read_rows({message.data(), size}, own); });
  };
  CHECK(rows_are_right(read_rows({message.data(), bytes}, terms())));
  CHECK(told(4, terms()) == "rows bytes: expected at least 32, got 4");
  CHECK(told(bytes - 1, terms()).find("rows bytes: expected ") == 0);
  Terms other = terms();
  other.aux_width = 4;
  CHECK(told(bytes, other) == "rows aux_width: expected 4, got 5");
  other = terms();
  other.max_rows = 2;
  CHECK(told(bytes, other) == "rows num_rows: expected in 1..2, got 3");
}
