#include "bridge/group.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>

#include "bridge/rows.h"

namespace eaglex::bridge {
namespace {

constexpr std::uint64_t kMagic = 0x786c676165;  // "eaglx"
constexpr std::size_t kMaxWhy = 240;
constexpr std::size_t kReplyHeader = 16;
constexpr std::size_t kHandle = 128;  // of a drafter's memory, as text (relay.cu)

struct Member {
  std::atomic<std::int64_t> process;
  std::atomic<std::uint64_t> entered;  // collectives of the target
};

// R, S, T, Z, …; '?' where this process cannot see that one.
char state_of(std::int64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');  // the name may hold anything
  return name_end != std::string::npos && name_end + 2 < text.size() ? text[name_end + 2] : '?';
}

}  // namespace

struct Group::Shared {
  std::uint64_t magic;
  GroupId id;
  Terms terms;
  // Set once, by the member that ends the group: claimed, then written, then told.
  std::atomic<std::uint32_t> end_claimed;
  std::atomic<std::uint32_t> ended;
  char why[kMaxWhy];
  std::atomic<std::uint64_t> generation;
  Terms drafter_terms;
  Member members[kMaxRanks + 1];
};

struct Group::Layout {
  explicit Layout(const Terms& terms)
      : messages{terms.num_ranks - 1, terms.shape().max_bytes()},
        rows{1, max_rows_bytes(terms)},
        replies{1, kReplyHeader + std::max(kHandle, terms.shape().max_bytes())} {}
  [[nodiscard]] static std::size_t messages_at() {
    return (sizeof(Shared) + Ring::kAlign - 1) / Ring::kAlign * Ring::kAlign;
  }
  [[nodiscard]] std::size_t rows_at() const { return messages_at() + Ring::bytes(messages); }
  [[nodiscard]] std::size_t replies_at() const { return rows_at() + Ring::bytes(rows); }
  [[nodiscard]] std::size_t bytes(const Terms& terms) const {
    return terms.dedicated() ? replies_at() + Ring::bytes(replies) : rows_at();
  }

  Ring::Shape messages, rows, replies;
};

Group::Group(Segment segment, const Terms& terms, int rank) : segment_(std::move(segment)), terms_(terms), rank_(rank) {
  const Layout layout(terms);
  messages_ = Ring(segment_.data() + Layout::messages_at(), layout.messages);
  if (terms.dedicated()) {
    rows_ = Ring(segment_.data() + layout.rows_at(), layout.rows);
    replies_ = Ring(segment_.data() + layout.replies_at(), layout.replies);
  }
}

Group Group::create(const Terms& terms, const GroupId& id) {
  terms.check();
  Group group(Segment::create(Layout(terms).bytes(terms), concat("eaglex-", std::hex, id[0], id[1])), terms, 0);
  Shared& shared = group.shared();
  shared.id = id;
  shared.terms = terms;
  shared.members[0].process = getpid();
  if (!group.segment_.claim(0)) fail(ErrorCode::kBridge, "rank 0: expected a free place, got a taken one");
  shared.magic = kMagic;
  return group;
}

Group Group::join(const std::string& address, const Terms& terms, const GroupId& id, int rank) {
  terms.check();
  Segment segment = Segment::open(address);
  expect(segment.size() >= sizeof(Shared), ErrorCode::kBridge, "shared memory bytes",
         concat("at least ", sizeof(Shared)), segment.size());
  Shared& shared = *reinterpret_cast<Shared*>(segment.data());
  expect(shared.magic == kMagic, ErrorCode::kBridge, "shared memory", "a group of eaglex", "something else");
  expect(shared.id == id, ErrorCode::kBridge, "group", concat(std::hex, id[0], id[1]),
         concat(std::hex, shared.id[0], shared.id[1]));
  const bool drafter = rank == shared.terms.num_ranks && shared.terms.dedicated();
  const std::string wrong = difference(shared.terms, terms);
  if (!wrong.empty() && !drafter) fail(ErrorCode::kBridge, wrong, " on rank ", rank);
  expect(drafter || (rank > 0 && rank < shared.terms.num_ranks), ErrorCode::kBridge, "rank",
         concat("in 1..", shared.terms.num_ranks - (shared.terms.dedicated() ? 0 : 1)), rank);
  if (!segment.claim(rank)) {
    fail(ErrorCode::kBridge, drafter ? "the dedicated drafter's place" : "rank", ": expected a free one, got ", rank,
         ", which process ", shared.members[rank].process.load(), " has");
  }
  shared.members[rank].process = getpid();
  const Terms agreed = shared.terms;
  Group group(std::move(segment), agreed, rank);
  if (drafter) {
    group.rows_.skip(0);
    group.shared().drafter_terms = terms;
    group.shared().generation.fetch_add(1, std::memory_order_release);
    if (!wrong.empty()) fail(ErrorCode::kBridge, wrong, " on the dedicated drafter");
  }
  return group;
}

void Group::enter() {
  shared().members[rank_].entered.fetch_add(1, std::memory_order_relaxed);
}

void Group::check() const {
  const Shared& here = shared();
  if (here.ended.load(std::memory_order_acquire) != 0) fail(ErrorCode::kBridge, std::string(here.why));
}

void Group::end(int culprit, const std::string& why) {
  Shared& here = shared();
  const std::string text = concat("rank ", culprit, ": ", why);
  std::uint32_t nobody = 0;
  if (here.end_claimed.compare_exchange_strong(nobody, 1)) {
    std::strncpy(here.why, text.c_str(), kMaxWhy - 1);
    here.ended.store(1, std::memory_order_release);
  }
  check();
  fail(ErrorCode::kBridge, text);  // another member is just writing its own word
}

std::vector<Suspect> Group::suspects() const {
  const Shared& here = shared();
  const std::uint64_t own = here.members[rank_].entered.load(std::memory_order_relaxed);
  std::vector<Suspect> found;
  for (int rank = 0; rank < terms_.num_ranks; ++rank) {
    if (rank == rank_) continue;
    const Member& member = here.members[rank];
    const std::uint64_t entered = member.entered.load(std::memory_order_relaxed);
    const char state = state_of(member.process.load());
    using Kind = Suspect::Kind;
    if (gone(rank)) {
      found.push_back({rank, Kind::kGone, "its process has ended"});
    } else if (state == 'T' || state == 't') {
      found.push_back({rank, Kind::kStopped, "its process is stopped"});
    } else if (entered < own) {
      found.push_back({rank, Kind::kBehind, concat("it entered ", entered, " of ", own, " collectives of the target")});
    }
  }
  return found;
}

std::uint64_t Group::generation() const {
  return shared().generation.load(std::memory_order_acquire);
}

std::string Group::drafter_difference() const {
  return difference(terms_, shared().drafter_terms);
}

}  // namespace eaglex::bridge
