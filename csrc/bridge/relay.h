// A dedicated drafter on a GPU of its own, in a process of its own: rank 0's GPU writes the rows into the drafter's memory
// and the drafter's GPU writes its drafts back. Hosts only say that a request is coming and of what size, ahead of it; no
// host waits for a device but the drafter's, behind its reply. Needs GPUs that reach each other (CUDA IPC); without, rows
// and drafts go through host memory (DrafterClient).
#pragma once

#include "bridge/device.h"
#include "bridge/rows.h"

namespace eaglex::bridge {

// One request in a device's memory: as in shared memory (rows.cpp), the hidden states in the target's own type.
struct RowsBox {
  std::uint64_t* arrived = nullptr;  // the epoch of what lies here, written last
  std::int64_t* seq_lens = nullptr;
  std::int64_t* slots = nullptr;
  std::int64_t* input_ids = nullptr;
  std::int32_t* row_start = nullptr;
  std::int32_t* num_valid = nullptr;
  std::uint8_t* draft_from = nullptr;
  std::byte* aux = nullptr;
};
[[nodiscard]] std::size_t rows_box_bytes(const Terms& terms);
[[nodiscard]] RowsBox rows_box(std::byte* memory, const Terms& terms);

inline constexpr int kMaxRelayLanes = 1024;

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

struct SendRows {
  DraftBatch batch;
  DraftResults results;  // emptied for the batch's slots
  int num_slots = 0;
  LaneMask wanted;
  RowsBox to;
  RelayLanes kept;
  std::uint64_t epoch = 0;
  unsigned long long* finished = nullptr;  // blocks of this launch that have; zero before and after
};
// `width` values per row.
void launch_send_rows(const SendRows& rows, int width, Stream stream);
// Waits until the request is there; else no lane has a slot, so that nothing is drafted.
struct TakeRows {
  RowsBox from;
  int num_lanes = 0;
  std::uint64_t epoch = 0;
  std::uint64_t deadline_ns = 0;
  const PushStatus* status = nullptr;
};
void launch_take_rows(const TakeRows& rows, Stream stream);

// Of a batch, what rank 0's host knows without asking the device.
struct KnownLanes {
  std::vector<std::int64_t> slots, seq_lens, new_lens;
};

// Rank 0's end. Nothing that the drafter does throws here.
class RelayClient {
 public:
  RelayClient(Group& group, LinkTiming timing, int device);
  ~RelayClient();
  RelayClient(const RelayClient&) = delete;
  RelayClient& operator=(const RelayClient&) = delete;

  // What the drafter needs to reach this device, as text.
  [[nodiscard]] std::string offer() const;
  // One cycle: rows out, and, at the deadline at the latest, drafts or none into the results of these slots, all of it on
  // `stream`. kNoDraft where nothing was asked, and then nothing was enqueued.
  Verdict draft(const DraftBatch& batch, const KnownLanes& lanes, const DraftResults& results, Stream stream);
  [[nodiscard]] DrafterLink& link() { return link_; }

 private:
  void look(Time now);
  void drain(Time now);
  void settle();
  void reach(std::uint64_t generation, const std::string& handle);

  Group& group_;
  DrafterLink link_;
  LinkTiming timing_;
  int device_;
  DeviceMemory inbox_, kept_memory_, state_, staging_;
  RelayLanes kept_;
  OpenedMemory box_;
  std::uint64_t reached_ = 0;  // the generation whose box this is
  PushStatus* status_ = nullptr;
  RelayOutcome* outcome_ = nullptr;
  PushChannel channel_;
  std::uint64_t epoch_ = 0;
};

// The drafter's end.
class RelayServer {
 public:
  // `offer` is RelayClient's.
  RelayServer(Group& group, int device, const std::string& offer);
  ~RelayServer();
  RelayServer(const RelayServer&) = delete;
  RelayServer& operator=(const RelayServer&) = delete;

  // The next request's rows in this device's memory, which lie there when what follows on `stream` runs; nothing if none
  // was announced in time. Throws ErrorCode::kBridge once rank 0 is gone.
  [[nodiscard]] std::optional<RowsView> next(Clock::duration wait, Stream stream);
  // The drafts of its lanes, or that the engine failed, to rank 0's device.
  void reply(const DraftResults& results, Verdict verdict, Stream stream);
  // To be called when the reply has left, or cannot: a late one is over.
  void done(Verdict verdict);

 private:
  Group& group_;
  int device_;
  std::uint64_t generation_;
  DeviceMemory box_memory_, state_;
  OpenedMemory inbox_;
  RowsBox box_;
  PushStatus* status_ = nullptr;
  PushChannel channel_;
  std::uint64_t epoch_ = 0;
  int num_lanes_ = 0;
};

}  // namespace eaglex::bridge
