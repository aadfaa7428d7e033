#include "bridge/protocol.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace eaglex::bridge {

std::string complaint_about(std::span<const std::byte> message, const Terms& terms, std::uint64_t epoch,
                            const LaneList& lanes) {
  const MessageShape shape = terms.shape();
  MessageHeader header;
  if (message.size() < sizeof header)
    return concat("message bytes: expected at least ", sizeof header, ", got ", message.size());
  std::memcpy(&header, message.data(), sizeof header);
  if (header.epoch != epoch) return concat("epoch: expected ", epoch, ", got ", header.epoch);
  if (header.num_lanes != static_cast<std::uint32_t>(lanes.count)) {
    return concat("num_lanes: expected ", lanes.count, ", got ", header.num_lanes);
  }
  if (message.size() != shape.bytes(header.num_lanes)) {
    return concat("message bytes: expected ", shape.bytes(header.num_lanes), ", got ", message.size());
  }
  if (header.verdict != Verdict::kDraft && header.verdict != Verdict::kNoDraft) {
    return concat("verdict: expected 0 or 1, got ", static_cast<std::uint32_t>(header.verdict));
  }
  const MessageView view(message.data(), shape, header.num_lanes);
  for (std::int32_t i = 0; i < lanes.count; ++i) {
    const MessageLane& lane = view.lanes[i];
    if (lane.slot != lanes.slots[i])
      return concat("slot of lane ", i, ": expected ", lanes.slots[i], ", got ", lane.slot);
    if (lane.slot < 0 || lane.slot >= terms.num_slots) {
      return concat("slot of lane ", i, ": expected in 0..", terms.num_slots - 1, ", got ", lane.slot);
    }
    if (lane.drafted_for != lanes.new_len(i)) {
      return concat("length of lane ", i, ": expected ", lanes.new_len(i), ", got ", lane.drafted_for);
    }
    const int most = header.verdict == Verdict::kDraft ? shape.num_drafted : 0;
    if (lane.num_nodes < 0 || lane.num_nodes > most) {
      return concat("num_nodes of lane ", i, ": expected in 0..", most, ", got ", lane.num_nodes);
    }
  }
  return {};
}

const char* name_of(Fault fault) noexcept {
  constexpr const char* kNames[kNumFaults] = {"late", "gone", "refused", "bad_reply", "own_failure"};
  return kNames[static_cast<std::size_t>(fault)];
}

DrafterLink::DrafterLink(const Terms& terms, LinkTiming timing)
    : timing_(timing),
      patience_(timing.deadline),
      rest_(timing.rejoin_after),
      covered_(static_cast<std::size_t>(terms.num_slots), -1) {}

void DrafterLink::joined(std::uint64_t generation, const std::string& difference, Time now) {
  if (generation == generation_) return;
  // A successor's news may come before those of its predecessor's end.
  if (state_ == State::kDrafting || state_ == State::kReady) left(now);
  generation_ = generation;
  overdue_ = false;
  rest_ = timing_.rejoin_after;  // how often its predecessor was late says nothing of this one
  rejoin_at_ = std::min(rejoin_at_, now + rest_);
  if (difference.empty()) {
    state_ = State::kResting;
  } else {
    fall(Fault::kRefused, State::kRefused, difference, now);
  }
}

void DrafterLink::refuse(std::uint64_t generation, const std::string& why, Time now) {
  joined(generation, {}, now);
  fall(Fault::kRefused, State::kRefused, why, now);
}

void DrafterLink::left(Time now) {
  overdue_ = false;
  if (state_ == State::kReady || state_ == State::kDrafting) {
    fall(Fault::kGone, State::kAbsent, "its process has ended", now);
  } else {
    state_ = State::kAbsent;
  }
}

bool DrafterLink::ready(Time now) {
  if (state_ == State::kResting && !overdue_ && now >= rejoin_at_) {
    state_ = State::kReady;
    anew_ = true;
    returns_ += fallen_before_ ? 1 : 0;
  }
  return state_ == State::kReady;
}

bool DrafterLink::covers(std::int64_t slot, std::int64_t seq_len) const {
  if (slot <= 0 || slot >= static_cast<std::int64_t>(covered_.size())) return false;
  return seq_len == 0 || covered_[static_cast<std::size_t>(slot)] == seq_len;
}

bool DrafterLink::covers(std::int64_t slot) const {
  if (slot <= 0 || slot >= static_cast<std::int64_t>(covered_.size())) return false;
  return covered_[static_cast<std::size_t>(slot)] >= 0;
}

void DrafterLink::cover(std::int64_t slot, std::int64_t new_len) {
  covered_.at(static_cast<std::size_t>(slot)) = new_len;
}

void DrafterLink::forget(std::int64_t slot) {
  if (slot > 0 && slot < static_cast<std::int64_t>(covered_.size())) covered_[static_cast<std::size_t>(slot)] = -1;
}

void DrafterLink::asked(std::uint64_t epoch, Time now, Clock::duration patience) {
  if (state_ != State::kDrafting) oldest_ = epoch;
  state_ = State::kDrafting;
  patience_ = patience;
  anew_ = false;
  epoch_ = epoch;
  asked_at_ = now;
}

void DrafterLink::expired(Time now) {
  if (state_ != State::kDrafting) return;
  using std::chrono::duration_cast;
  using std::chrono::milliseconds;
  fall(Fault::kLate, State::kResting, concat("no reply within ", duration_cast<milliseconds>(patience_).count(), " ms"),
       now);
  overdue_ = true;
}

bool DrafterLink::replied(const Reply& reply, Time now) {
  if (reply.generation != generation_) return false;  // of a process that was here before
  if (state_ == State::kResting) {
    if (reply.epoch >= epoch_) overdue_ = false;
    return false;
  }
  if (state_ != State::kDrafting || reply.epoch < oldest_) return false;
  if (reply.epoch > epoch_) {
    fall(Fault::kBadReply, State::kResting, concat("epoch of its reply: expected ", epoch_, ", got ", reply.epoch),
         now);
  } else if (reply.failed) {
    fall(Fault::kOwnFailure, State::kResting, "its engine failed", now);
  } else if (!reply.complaint.empty()) {
    fall(Fault::kBadReply, State::kResting, reply.complaint, now);
  } else {
    oldest_ = reply.epoch + 1;
    if (reply.epoch == epoch_) state_ = State::kReady;
    rest_ = timing_.rejoin_after;
    return true;
  }
  overdue_ = reply.epoch < epoch_;
  return false;
}

std::string DrafterLink::take_warning() {
  return std::exchange(warning_, {});
}

// An end says nothing of the process that comes next.
Clock::duration DrafterLink::rest_after(Fault fault) {
  if (fault == Fault::kGone || fault == Fault::kRefused) return timing_.rejoin_after;
  return std::exchange(rest_, std::max(rest_, std::min(2 * rest_, kLongestRest)));
}

void DrafterLink::fall(Fault fault, State to, const std::string& why, Time now) {
  state_ = to;
  fallen_before_ = true;
  overdue_ = false;
  rejoin_at_ = now + rest_after(fault);
  std::fill(covered_.begin(), covered_.end(), -1);
  ++faults_[static_cast<std::size_t>(fault)];
  warning_ = concat("the dedicated drafter fell out of use (", name_of(fault), "): ", why,
                    "; going on without speculation until it is back");
}

}  // namespace eaglex::bridge
