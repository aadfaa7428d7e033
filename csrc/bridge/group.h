// The members of one group on one host: who is there, how far each has come, and why the group has ended, if it has.
#pragma once

#include <string>
#include <vector>

#include "bridge/ring.h"
#include "bridge/segment.h"
#include "bridge/terms.h"

namespace eaglex::bridge {

// A rank that looks lost, and why. Being behind says nothing while others still arrive.
struct Suspect {
  enum class Kind : std::uint8_t { kGone, kStopped, kBehind };
  int rank = 0;
  Kind kind = Kind::kGone;
  std::string why;
};

class Group {
 public:
  // Rank 0 makes the group and hands its address to the others.
  static Group create(const Terms& terms, const GroupId& id);
  // A further rank of the target, or (rank == terms.num_ranks) the dedicated drafter. Throws ErrorCode::kBridge unless
  // the address leads to this very group, the terms are its own and the place is free. A drafter with other terms
  // throws too, and rank 0 learns of it.
  static Group join(const std::string& address, const Terms& terms, const GroupId& id, int rank);

  Group(Group&&) noexcept = default;

  [[nodiscard]] std::string address() const { return segment_.address(); }
  [[nodiscard]] const Terms& terms() const { return terms_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int drafter() const { return terms_.num_ranks; }

  // Rank 0's messages to the other ranks (reader r - 1 is rank r), its rows to the drafter, and the drafter's replies.
  [[nodiscard]] const Ring& messages() const { return messages_; }
  [[nodiscard]] const Ring& rows() const { return rows_; }
  [[nodiscard]] const Ring& replies() const { return replies_; }

  // Marks that this rank is about to enter a collective of the target: whoever has marked fewer is waited for.
  void enter();
  // Throws ErrorCode::kBridge if the group has ended, naming the rank at fault.
  void check() const;
  // Ends the group for all: the first word stands. Throws it.
  [[noreturn]] void end(int culprit, const std::string& why);
  // Which other ranks look lost: gone, stopped, or behind in the target's collectives.
  [[nodiscard]] std::vector<Suspect> suspects() const;
  // Whether nobody has that rank's place.
  [[nodiscard]] bool gone(int rank) const { return !segment_.taken(rank); }

  // The dedicated drafter's place: how many processes have taken it, and what is wrong with the terms of the last.
  [[nodiscard]] std::uint64_t generation() const;
  [[nodiscard]] std::string drafter_difference() const;

 private:
  struct Shared;
  struct Layout;
  Group(Segment segment, const Terms& terms, int rank);
  [[nodiscard]] Shared& shared() const { return *reinterpret_cast<Shared*>(segment_.data()); }

  Segment segment_;
  Terms terms_;
  int rank_ = 0;
  Ring messages_, rows_, replies_;
};

}  // namespace eaglex::bridge
