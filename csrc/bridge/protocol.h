// The protocol without a transport: what a message may be, and what rank 0 makes of a dedicated drafter. No clock, no
// memory that is shared, no wait: time and messages are handed in, so every state can be tested.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bridge/terms.h"

namespace eaglex::bridge {

// Why a rank must not use a message; empty if it may. A rank that disagrees with rank 0 about the batch has split from
// it, which no local decision can mend.
[[nodiscard]] std::string complaint_about(std::span<const std::byte> message, const Terms& terms, std::uint64_t epoch,
                                          const LaneList& lanes);

// In front of a drafter's reply.
struct ReplyHeader {
  std::uint64_t generation;
  std::uint32_t failed;
  std::uint32_t padding;
};
static_assert(sizeof(ReplyHeader) == 2 * sizeof(std::uint64_t));

// How a drafter fell out of use; the index of DrafterLink::faults().
enum class Fault : std::uint8_t {
  kLate,        // no reply by the deadline
  kGone,        // its process has ended
  kRefused,     // it was made for another version, group or size
  kBadReply,    // a reply that does not belong to what was asked
  kOwnFailure,  // it replied that its engine failed
};
inline constexpr int kNumFaults = 5;
[[nodiscard]] const char* name_of(Fault fault) noexcept;

struct LinkTiming {
  Clock::duration deadline = std::chrono::seconds(1);  // for a reply
  // A fallen drafter is not used earlier, since each fall may cost a deadline; twice as long after each further fall
  // without a good reply in between, up to kLongestRest.
  Clock::duration rejoin_after = std::chrono::seconds(1);
  // How long an announced request's rows may take, which come behind the target's forward.
  Clock::duration rows_deadline = std::chrono::seconds(60);
};
inline constexpr Clock::duration kLongestRest = std::chrono::seconds(64);

// Rank 0's view of a dedicated drafter. Requests are answered in their order, and how many may be out is the caller's
// business; whatever happens to the drafter, the answer is "no draft" by the deadline, one complaint per fall, and a way
// back.
class DrafterLink {
 public:
  enum class State : std::uint8_t {
    kAbsent,    // nobody has joined, or the process has ended
    kResting,   // fell; comes back when its overdue reply was read and it has rested
    kReady,     // the next request may go out
    kDrafting,  // requests are out
    kRefused,   // unusable until another process joins
  };

  DrafterLink(const Terms& terms, LinkTiming timing);

  // A process has joined as the drafter, the `generation`th to do so. Repeated news of the same one is ignored.
  void joined(std::uint64_t generation, const std::string& difference, Time now);
  // That process cannot be used, although its terms are the group's.
  void refuse(std::uint64_t generation, const std::string& why, Time now);
  // Its process has ended.
  void left(Time now);

  // Whether a request may go out now; brings a rested drafter back.
  [[nodiscard]] bool ready(Time now);
  // Whether the drafter has the K and V of this request's first `seq_len` tokens: it was asked about all of them since
  // it joined or fell.
  [[nodiscard]] bool covers(std::int64_t slot, std::int64_t seq_len) const;
  // The same of a request whose length a host does not know when it launches: whether it took part in every cycle since
  // it began.
  [[nodiscard]] bool covers(std::int64_t slot) const;
  void cover(std::int64_t slot, std::int64_t new_len);
  void forget(std::int64_t slot);

  // Whether the next request is the first since the drafter joined or fell: what it has of earlier ones is void, since rows
  // were missed.
  [[nodiscard]] bool anew() const { return anew_; }
  // A request has gone out.
  void asked(std::uint64_t epoch, Time now) { asked(epoch, now, timing_.deadline); }
  void asked(std::uint64_t epoch, Time now, Clock::duration patience);
  [[nodiscard]] Clock::duration patience() const { return patience_; }
  [[nodiscard]] Time deadline() const { return asked_at_ + patience_; }
  // The deadline has passed without a reply.
  void expired(Time now);

  struct Reply {
    std::uint64_t generation = 0;
    std::uint64_t epoch = 0;
    bool failed = false;
    std::string complaint;  // why its message may not be used, if so
  };
  // Whether this reply is the one that is waited for, and fit for use. A late one only ends the wait for it.
  [[nodiscard]] bool replied(const Reply& reply, Time now);

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] const std::array<std::int64_t, kNumFaults>& faults() const { return faults_; }
  [[nodiscard]] std::int64_t returns() const { return returns_; }
  // What is to be told to the user, once per fall; empties it.
  [[nodiscard]] std::string take_warning();

 private:
  void fall(Fault fault, State to, const std::string& why, Time now);
  [[nodiscard]] Clock::duration rest_after(Fault fault);

  LinkTiming timing_;
  State state_ = State::kAbsent;
  std::uint64_t generation_ = 0;
  std::uint64_t epoch_ = 0;   // of the request that went out last
  std::uint64_t oldest_ = 0;  // that is still out
  bool overdue_ = false;      // resting: the last one's reply is still to come
  bool fallen_before_ = false;
  bool anew_ = true;
  Time asked_at_{};
  Clock::duration patience_;  // with the request that is out
  Clock::duration rest_;      // after the next fall
  Time rejoin_at_ = Time::min();
  std::vector<std::int64_t> covered_;  // [num_slots]
  std::array<std::int64_t, kNumFaults> faults_{};
  std::int64_t returns_ = 0;
  std::string warning_;
};

}  // namespace eaglex::bridge
