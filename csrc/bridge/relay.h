// A dedicated drafter on a GPU of its own, in a process of its own: rank 0's GPU writes the rows into the drafter's memory
// and the drafter's GPU writes its drafts back. Hosts only say that a request is coming and of what size, ahead of it; no
// host waits for a device but the drafter's, behind its reply. Needs GPUs that reach each other (CUDA IPC); without, rows
// and drafts go through host memory (DrafterClient).
#pragma once

#include <deque>
#include <mutex>

#include "bridge/device.h"
#include "bridge/relay_ends.h"

namespace eaglex::bridge {

// One request in a device's memory: as in shared memory (rows.cpp), the hidden states in the target's own type.
struct RowsBox {
  std::uint64_t* arrived = nullptr;  // the epoch of what lies here, written last
  std::uint64_t* off = nullptr;      // the same epoch where nothing was written for it
  std::int64_t* seq_lens = nullptr;
  std::int64_t* slots = nullptr;
  std::int64_t* input_ids = nullptr;
  std::int32_t* row_start = nullptr;
  std::int32_t* num_valid = nullptr;
  std::uint8_t* draft_from = nullptr;
  // With pooled terms; rows of the host's table [max_lanes, table_width], as far as table_lens says.
  std::int32_t* out_cache_loc = nullptr;
  std::int32_t* table_lens = nullptr;
  std::int32_t* table = nullptr;
  std::byte* aux = nullptr;
};
[[nodiscard]] std::size_t rows_box_bytes(const Terms& terms);
[[nodiscard]] RowsBox rows_box(std::byte* memory, const Terms& terms);

inline constexpr int kMaxRelayLanes = 1024;
// A host that runs ahead of its device asks for the next draft while the last one is being made: with one request out it
// would wait for that. What a device does for two is in their order, so they share the drafter's box.
inline constexpr std::size_t kMostOut = 2;
inline constexpr std::size_t kRelayOutcomes = 4;

// Lanes that are asked about: the others' rows the drafter has not all seen.
struct LaneMask {
  std::uint32_t words[kMaxRelayLanes / 32] = {};

  [[nodiscard]] constexpr bool has(int lane) const { return (words[lane / 32] >> (lane % 32) & 1U) != 0; }
  constexpr void add(int lane) { words[lane / 32] |= 1U << (lane % 32); }
};

// What rank 0 keeps of a request for its reply: slots, 0 for lanes that were not asked about, and lengths.
struct RelayLanes {
  std::int64_t* slots = nullptr;
  std::int64_t* lens = nullptr;
  std::int32_t* num_valid = nullptr;
};

// A table [num_slots, width] of KV slots by position, on this device; width 0 where none travels.
struct RelayTable {
  std::int32_t* entries = nullptr;
  std::int64_t width = 0;
  int num_slots = 0;
};

struct SendRows {
  DraftBatch batch;
  RelayTable table;      // the host's
  LaneMask entries;      // lanes whose row of it travels, up to their length before these rows
  DraftResults results;  // emptied for the batch's slots
  int num_slots = 0;
  LaneMask wanted;
  RowsBox to;
  RelayLanes kept;
  std::uint64_t epoch = 0;
  unsigned long long* finished = nullptr;  // blocks of this launch that have; zero before and after
  // Nonzero once a reply has failed: the drafter may still read what it was sent before, so its box is left alone.
  // `afresh` takes that back, in the first request since.
  std::uint64_t* failed = nullptr;
  bool afresh = true;
};
// `width` values per row.
void launch_send_rows(const SendRows& rows, int width, Stream stream);
// Waits until the request is there; else no lane has a slot, so that nothing is drafted.
struct TakeRows {
  RowsBox from;
  RelayTable table;  // the drafter's, which becomes what the host's is
  int num_lanes = 0;
  std::uint64_t epoch = 0;
  std::uint64_t deadline_ns = 0;
  const PushStatus* status = nullptr;
};
void launch_take_rows(const TakeRows& rows, Stream stream);

class DeviceRelayClient final : public RelayClient {
 public:
  DeviceRelayClient(Group& group, LinkTiming timing, const RelayHost& host);
  ~DeviceRelayClient() override;

  [[nodiscard]] std::string offer() const override;
  Verdict draft(const DraftBatch& batch, const KnownLanes& lanes, const DraftResults& results, Stream stream) override;
  [[nodiscard]] bool try_out(const DraftBatch& batch, const DraftResults& results, Clock::duration patience,
                             Stream stream) override;
  [[nodiscard]] bool joined() override;
  [[nodiscard]] DrafterLink& link() override { return link_; }

 private:
  // Lanes of a batch that are asked about, and of them those whose row of the host's table travels.
  struct Asked {
    LaneMask wanted, entries;
  };
  bool send(const DraftBatch& batch, const Asked& asked, const DraftResults& results, Clock::duration patience,
            Stream stream);
  void look(Time now);
  void drain(Time now);
  void settle(std::size_t most_out);
  void learn(std::uint64_t epoch, PushCode code, Verdict verdict);
  void reach(std::uint64_t generation, const std::string& handle);

  Group& group_;
  DrafterLink link_;
  LinkTiming timing_;
  int device_;
  RelayTable table_;
  DeviceMemory inbox_, kept_memory_, state_, staging_;
  RelayLanes kept_;
  OpenedMemory box_;
  std::uint64_t reached_ = 0;  // the generation whose box this is
  PushStatus* status_ = nullptr;
  std::mutex stopping_;               // who writes status_->stop
  RelayOutcome* outcomes_ = nullptr;  // [kRelayOutcomes], by epoch
  PushChannel channel_;
  std::uint64_t epoch_ = 0;
  std::deque<std::uint64_t> out_;  // launched, and what has become of them not yet known
  std::uint64_t done_ = 0;         // the last request that the drafter's host was done with
  Watcher watcher_;
};

class DeviceRelayServer final : public RelayServer {
 public:
  DeviceRelayServer(Group& group, const RelayHost& own, const std::string& offer);
  ~DeviceRelayServer() override;

  [[nodiscard]] std::optional<RowsView> next(Clock::duration wait, Stream stream) override;
  void reply(const DraftResults& results, Verdict verdict, Stream stream) override;
  void done(Verdict verdict) override;
  [[nodiscard]] bool anew() const override { return anew_; }

 private:
  Group& group_;
  int device_;
  RelayTable table_;
  bool anew_ = false;
  std::uint64_t generation_;
  DeviceMemory box_memory_, state_;
  OpenedMemory inbox_;
  RowsBox box_;
  PushStatus* status_ = nullptr;
  PushChannel channel_;
  std::uint64_t epoch_ = 0;
  int num_lanes_ = 0;
  Watcher watcher_;
};

}  // namespace eaglex::bridge
