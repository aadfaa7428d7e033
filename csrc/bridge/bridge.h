// The bridge: rank 0's drafts reach every rank of the target. One interface for all transports; docs/bridge.md
// has the protocol. Every wait has a deadline.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bridge/group.h"
#include "bridge/protocol.h"
#include "bridge/rows.h"
#include "core/batch.h"

namespace eaglex::bridge {

struct Counters {
  std::int64_t pushed = 0;    // messages, on rank 0
  std::int64_t received = 0;  // messages, on the others
  std::int64_t drafts = 0;    // of those, with a verdict "draft"
};

// Rank 0's end, or another rank's. A failure of either is fatal for the group: the error names the rank, and every rank
// gets it within the deadline. Where results are in device memory, lanes are too, calls return when the work is enqueued
// (a stream that is being captured takes it), and a failure shows in a later call.
class Bridge {
 public:
  Bridge() = default;
  Bridge(const Bridge&) = delete;
  Bridge& operator=(const Bridge&) = delete;
  virtual ~Bridge() = default;

  [[nodiscard]] virtual const char* transport() const noexcept = 0;
  // What the other ranks need to reach this one, as text; and the ends of all, by rank, once each has been handed round.
  [[nodiscard]] virtual std::string offer() { return {}; }
  virtual void connect(const std::vector<std::string>& /*offers*/) {}
  // Rank 0: the drafts of these requests, or that there are none, to all other ranks. Afterwards the results hold what
  // was sent: rank 0 follows its own word like the others.
  virtual void push(const LaneList& lanes, const DraftResults& results, Verdict verdict, Stream stream) = 0;
  // The others: rank 0's word on these requests into this rank's own results. Nothing where only the device knows yet.
  virtual std::optional<Verdict> receive(const LaneList& lanes, const DraftResults& results, Stream stream) = 0;
  // Throws if the group has ended, or a device has told of a failure. To be called before what a cycle emitted is used.
  virtual void check() = 0;
  // Of launches from now on.
  virtual void set_deadline(Clock::duration deadline) = 0;
  [[nodiscard]] virtual Counters counters() const = 0;
};

// Both ends over shared memory, results in host memory. `deadline` bounds every wait for another rank.
[[nodiscard]] std::unique_ptr<Bridge> make_shm_bridge(Group& group, Clock::duration deadline);

// Of a batch, what its host knows in front of a drafter with pooled terms. An empty one is not of pooled terms.
struct PooledLanes {
  std::vector<std::uint8_t> begins;      // [B]: 1 for a prompt's rows: what the request had before is in table_lens
  std::vector<std::int32_t> table_lens;  // [B]: entries of the request's table row that are new to the drafter
};

// Rank 0's way to a dedicated drafter. Nothing that the drafter does throws here.
class DrafterClient {
 public:
  // `req_to_token` [num_slots, table_width] is the host's, with pooled terms.
  DrafterClient(Group& group, LinkTiming timing, const std::int32_t* req_to_token = nullptr);

  // One cycle: rows out, drafts into `results` (host memory, by request slot), none for lanes that were not asked about.
  // kNoDraft where nothing came back in time,
  // or nothing was worth asking.
  // With pooled terms a request is asked about from a prompt of its own on, for as long as it is in every cycle: its length
  // may be anything. Throws ErrorCode::kShape where `pooled` does not fit the batch.
  Verdict draft(const DraftBatch& batch, const DraftResults& results, const PooledLanes& pooled = {});
  [[nodiscard]] DrafterLink& link() { return link_; }

 private:
  void look(Time now);
  bool await(std::uint64_t epoch, const std::vector<std::int64_t>& slots, const std::vector<std::int64_t>& new_lens,
             const DraftResults& results);
  void drain(Time now);

  Group& group_;
  DrafterLink link_;
  const std::int32_t* req_to_token_;
  std::uint64_t epoch_ = 0;
};

// The drafter's end, in its own process.
class DrafterServer {
 public:
  explicit DrafterServer(Group& group);

  // The next request's rows, in shared memory until reply(); nothing if none came by the deadline. Throws
  // ErrorCode::kBridge once rank 0 is gone.
  [[nodiscard]] std::optional<RowsView> next(Clock::duration wait);
  // With pooled terms, in front of the engine's cycle: its table [num_slots, table_width], in host memory, as this request
  // has it.
  [[nodiscard]] const Terms& terms() const { return group_.terms(); }
  // Of the request that came last: whether all K and V that the drafter has are void.
  [[nodiscard]] bool anew() const { return rows_.anew; }
  void write_table(std::int32_t* table) const { bridge::write_table(rows_, group_.terms(), table); }
  // The drafts of the request's lanes, or that the engine failed.
  void reply(const DraftResults& results, Verdict verdict);

 private:
  Group& group_;
  std::uint64_t generation_;
  RowsView rows_;
};

}  // namespace eaglex::bridge
