// Both ends of the way to a dedicated drafter on a GPU of its own, as callers see them; relay.h has what they do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bridge/group.h"
#include "bridge/protocol.h"
#include "bridge/rows.h"
#include "core/batch.h"

namespace eaglex::bridge {

// Of a batch, what rank 0's host knows without asking the device.
struct KnownLanes {
  std::vector<std::int64_t> slots;
  std::vector<std::int64_t> seq_lens, new_lens;  // not with pooled terms, where a host need not know them yet
  // With pooled terms: 1 for a prompt's rows, and 1 for a row of the host's table that it has rewritten. Either sends the
  // row up to the request's length before these rows, which the device knows.
  std::vector<std::uint8_t> begins, rewritten;
};

// An end's device and, with pooled terms, its table [num_slots, table_width] there: the host's, or the drafter's own.
struct RelayHost {
  int device = 0;
  std::int32_t* req_to_token = nullptr;
};

// Rank 0's end. Nothing that the drafter does throws here.
class RelayClient {
 public:
  RelayClient() = default;
  RelayClient(const RelayClient&) = delete;
  RelayClient& operator=(const RelayClient&) = delete;
  virtual ~RelayClient() = default;

  // What the drafter needs to reach this device, as text.
  [[nodiscard]] virtual std::string offer() const = 0;
  // One cycle: rows out, and, at the deadline at the latest, drafts or none into the results of these slots, all of it on
  // `stream`. kNoDraft where nothing was asked, and then nothing was enqueued.
  virtual Verdict draft(const DraftBatch& batch, const KnownLanes& lanes, const DraftResults& results,
                        Stream stream) = 0;
  // A request of padded lanes, before there are others: loads what both ends launch, and shows that rows and replies
  // arrive. Waits for the reply, `patience` at most behind what `stream` has to do; whether it came and fits.
  [[nodiscard]] virtual bool try_out(const DraftBatch& batch, const DraftResults& results, Clock::duration patience,
                                     Stream stream) = 0;
  // Whether a drafter has joined and said how to reach it, or was refused, or has left again.
  [[nodiscard]] virtual bool joined() = 0;
  [[nodiscard]] virtual DrafterLink& link() = 0;
};

// The drafter's end.
class RelayServer {
 public:
  RelayServer() = default;
  RelayServer(const RelayServer&) = delete;
  RelayServer& operator=(const RelayServer&) = delete;
  virtual ~RelayServer() = default;

  // The next request's rows in this device's memory, which lie there when what follows on `stream` runs; nothing if none
  // was announced in time. Throws ErrorCode::kBridge once rank 0 is gone.
  [[nodiscard]] virtual std::optional<RowsView> next(Clock::duration wait, Stream stream) = 0;
  // The drafts of its lanes, or that the engine failed, to rank 0's device.
  virtual void reply(const DraftResults& results, Verdict verdict, Stream stream) = 0;
  // To be called when the reply has left, or cannot: a late one is over.
  virtual void done(Verdict verdict) = 0;
  // Of the request that came last: whether the K and V that the drafter has are void.
  [[nodiscard]] virtual bool anew() const = 0;
};

// Throw ErrorCode::kDevice where this build has no CUDA. `offer` is the client's.
[[nodiscard]] std::unique_ptr<RelayClient> make_relay_client(Group& group, LinkTiming timing, const RelayHost& host);
[[nodiscard]] std::unique_ptr<RelayServer> make_relay_server(Group& group, const RelayHost& own,
                                                             const std::string& offer);

}  // namespace eaglex::bridge
