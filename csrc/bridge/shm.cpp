// The bridge over shared memory: CPU targets, and the protocol's tests.
#include "bridge/bridge.h"

namespace eaglex::bridge {
namespace {

class ShmBridge final : public Bridge {
 public:
  ShmBridge(Group& group, Clock::duration deadline) : group_(group), deadline_(deadline) {}

  [[nodiscard]] const char* transport() const noexcept override { return "shm"; }

  void push(const LaneList& given, const DraftResults& results, Verdict verdict, Stream /*stream*/) override {
    const LaneIds lanes = given.ids();
    const Terms& terms = group_.terms();
    expect(group_.rank() == 0, ErrorCode::kBridge, "push", "rank 0", group_.rank());
    group_.check();
    expect_range("push lanes", lanes.count, 1, terms.max_lanes);
    for (std::int32_t i = 0; i < lanes.count; ++i) expect_range("push slot", lanes.slot(i), 0, terms.num_slots - 1);
    const std::span<std::byte> out = group_.messages().reserve(Clock::now() + deadline_, [this] { watch_readers(); });
    if (out.empty()) group_.end(slowest(), concat("it took no message of rank 0 within ", seconds(), " s"));
    ++epoch_;
    const auto count = static_cast<std::uint32_t>(lanes.count);
    const MessageShape shape = terms.shape();
    const MessageView message(out.data(), shape, count);
    *message.header = {epoch_, verdict, count};
    const TreeSource source = {results, terms.num_slots, shape.num_drafted, terms.vocab_size, terms.num_steps};
    for (std::int32_t i = 0; i < lanes.count; ++i) {
      pack_lane(source, lanes.slot(i), lanes.new_len(i), verdict, message.lanes + i,
                message.nodes + static_cast<std::ptrdiff_t>(i) * shape.num_drafted);
      // Rank 0 itself must verify what it has sent and nothing else: an older draft for the same length may lie there.
      unpack_lane(message.lanes[i], message.nodes + static_cast<std::ptrdiff_t>(i) * shape.num_drafted,
                  shape.num_drafted, results);
    }
    group_.messages().publish(shape.bytes(count));
    ++counters_.pushed;
    counters_.drafts += verdict == Verdict::kDraft ? 1 : 0;
  }

  std::optional<Verdict> receive(const LaneList& lanes, const DraftResults& results, Stream /*stream*/) override {
    const int rank = group_.rank();
    const Terms& terms = group_.terms();
    expect(rank > 0, ErrorCode::kBridge, "receive", "a rank above 0", rank);
    group_.check();
    expect_range("receive lanes", lanes.count, 1, terms.max_lanes);
    const std::span<const std::byte> in =
        group_.messages().next(rank - 1, Clock::now() + deadline_, [this] { watch_rank0(); });
    if (in.empty()) group_.end(0, concat("no message to rank ", rank, " within ", seconds(), " s"));
    ++epoch_;
    const std::string wrong = complaint_about(in, terms, epoch_, lanes);
    if (!wrong.empty()) group_.end(rank, concat("it has split from rank 0: ", wrong));
    const MessageShape shape = terms.shape();
    const MessageView message(in.data(), shape, static_cast<std::uint32_t>(lanes.count));
    for (std::int32_t i = 0; i < lanes.count; ++i) {
      unpack_lane(message.lanes[i], message.nodes + static_cast<std::ptrdiff_t>(i) * shape.num_drafted,
                  shape.num_drafted, results);
    }
    const Verdict verdict = message.header->verdict;
    group_.messages().release(rank - 1);
    ++counters_.received;
    counters_.drafts += verdict == Verdict::kDraft ? 1 : 0;
    return verdict;
  }

  void check() override { group_.check(); }
  void set_deadline(Clock::duration deadline) override { deadline_ = deadline; }
  [[nodiscard]] Counters counters() const override { return counters_; }

 private:
  void watch_rank0() {
    group_.check();
    if (group_.gone(0)) group_.end(0, "its process has ended");
  }
  void watch_readers() {
    group_.check();
    for (int rank = 1; rank < group_.terms().num_ranks; ++rank) {
      if (group_.gone(rank)) group_.end(rank, "its process has ended");
    }
  }
  [[nodiscard]] int slowest() const {
    int found = 1;
    for (int rank = 2; rank < group_.terms().num_ranks; ++rank) {
      if (group_.messages().released(rank - 1) < group_.messages().released(found - 1)) found = rank;
    }
    return found;
  }
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(deadline_).count(); }

  Group& group_;
  Clock::duration deadline_;
  std::uint64_t epoch_ = 0;
  Counters counters_;
};

}  // namespace

std::unique_ptr<Bridge> make_shm_bridge(Group& group, Clock::duration deadline) {
  return std::make_unique<ShmBridge>(group, deadline);
}

}  // namespace eaglex::bridge
