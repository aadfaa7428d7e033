// Both ends of the way to a dedicated drafter over shared memory.
#include <cstring>

#include "bridge/bridge.h"

namespace eaglex::bridge {
DrafterClient::DrafterClient(Group& group, LinkTiming timing, const std::int32_t* req_to_token)
    : group_(group), link_(group.terms(), timing), req_to_token_(req_to_token) {
  expect(group.terms().dedicated(), ErrorCode::kBridge, "placement", "dedicated", "rank0");
}

// News of the drafter's process: a new one, or its end.
void DrafterClient::look(Time now) {
  const std::uint64_t generation = group_.generation();
  if (generation > 0) link_.joined(generation, group_.drafter_difference(), now);
  if (group_.gone(group_.drafter())) link_.left(now);
}

// Replies that nobody waits for any more.
void DrafterClient::drain(Time now) {
  for (;;) {
    const std::span<const std::byte> in = group_.replies().next(0, Time::min(), nullptr);
    if (in.empty()) return;
    ReplyHeader reply{};
    MessageHeader header;
    if (in.size() >= sizeof reply + sizeof header) {
      std::memcpy(&reply, in.data(), sizeof reply);
      std::memcpy(&header, in.data() + sizeof reply, sizeof header);
      (void)link_.replied({reply.generation, header.epoch, reply.failed != 0, {}}, now);
    }
    group_.replies().release(0);
  }
}

Verdict DrafterClient::draft(const DraftBatch& batch, const DraftResults& results, const PooledLanes& pooled) {
  const Terms& terms = group_.terms();
  const TableRows table = {req_to_token_, pooled.table_lens};
  check_table(batch, terms, table);
  if (terms.pooled()) {
    expect(static_cast<std::int32_t>(pooled.begins.size()) == batch.batch, ErrorCode::kShape, "begins",
           concat(batch.batch, " flags"), pooled.begins.size());
  }
  Time now = Clock::now();
  look(now);
  drain(now);
  ++epoch_;
  std::vector<int> wanted;
  std::vector<std::int64_t> slots, new_lens;
  for (int lane = 0; lane < batch.batch; ++lane) {
    const std::int64_t slot = batch.req_pool_indices[lane];
    expect_range("req_pool_indices", slot, 0, terms.num_slots - 1);
    results.num_nodes[slot] = 0;
    results.drafted_for[slot] = -1;
    const bool asks = terms.pooled()
                          ? slot > 0 && (pooled.begins[static_cast<std::size_t>(lane)] != 0 || link_.covers(slot))
                          : link_.covers(slot, batch.seq_lens[lane]);
    if (asks) {
      wanted.push_back(lane);
      slots.push_back(slot);
      new_lens.push_back(batch.seq_lens[lane] + batch.num_valid[lane]);
    }
    link_.forget(slot);  // until these rows are on their way
  }
  if (wanted.empty() || !link_.ready(now)) return Verdict::kNoDraft;
  const std::span<std::byte> out = group_.rows().reserve(Time::min(), nullptr);
  if (out.empty()) {  // it holds on to four requests although at most one is out
    link_.asked(epoch_, now);
    link_.expired(now);
    return Verdict::kNoDraft;
  }
  const std::size_t bytes = pack_rows(batch, terms, {epoch_, link_.anew(), wanted, table}, out);
  group_.rows().publish(bytes);
  link_.asked(epoch_, now);
  for (std::size_t i = 0; i < slots.size(); ++i) link_.cover(slots[i], new_lens[i]);
  return await(epoch_, slots, new_lens, results) ? Verdict::kDraft : Verdict::kNoDraft;
}

bool DrafterClient::await(std::uint64_t epoch, const std::vector<std::int64_t>& slots,
                          const std::vector<std::int64_t>& new_lens, const DraftResults& results) {
  const LaneList lanes = {static_cast<std::int32_t>(slots.size()), slots.data(), new_lens.data()};
  const Terms& terms = group_.terms();
  while (link_.state() == DrafterLink::State::kDrafting) {
    // In slices, since the end of the drafter's process is news too. The last look begins behind the deadline: a reply
    // that lies there when this process runs again, after a pause, has come in time.
    const Time begun = Clock::now();
    const Time slice = std::min(link_.deadline(), begun + std::chrono::milliseconds(20));
    const std::span<const std::byte> in = group_.replies().next(0, slice, nullptr);
    const Time now = Clock::now();
    if (in.empty()) {
      look(now);
      if (begun >= link_.deadline()) link_.expired(now);
      continue;
    }
    ReplyHeader reply{};
    MessageHeader header;
    bool use = false;
    if (in.size() >= sizeof reply + sizeof header) {
      const std::span<const std::byte> message = in.subspan(sizeof reply);
      std::memcpy(&reply, in.data(), sizeof reply);
      std::memcpy(&header, message.data(), sizeof header);
      use = link_.replied(
          {reply.generation, header.epoch, reply.failed != 0, complaint_about(message, terms, epoch, lanes)}, now);
      if (use) {
        const MessageShape shape = terms.shape();
        const MessageView view(message.data(), shape, header.num_lanes);
        for (std::int32_t i = 0; i < lanes.count; ++i) {
          unpack_lane(view.lanes[i], view.nodes + static_cast<std::ptrdiff_t>(i) * shape.num_drafted, shape.num_drafted,
                      results);
        }
      }
    }
    group_.replies().release(0);
    if (use) return true;
  }
  return false;
}

DrafterServer::DrafterServer(Group& group) : group_(group), generation_(group.generation()) {
  expect(group.rank() == group.drafter(), ErrorCode::kBridge, "drafter rank", group.drafter(), group.rank());
}

std::optional<RowsView> DrafterServer::next(Clock::duration wait) {
  const auto watch = [this] {
    group_.check();
    if (group_.gone(0)) group_.end(0, "its process has ended");
  };
  const std::span<const std::byte> in = group_.rows().next(0, Clock::now() + wait, watch);
  if (in.empty()) return std::nullopt;
  rows_ = read_rows({const_cast<std::byte*>(in.data()), in.size()}, group_.terms());
  return rows_;
}

void DrafterServer::reply(const DraftResults& results, Verdict verdict) {
  const Terms& terms = group_.terms();
  const MessageShape shape = terms.shape();
  const auto lanes = static_cast<std::uint32_t>(rows_.num_valid.shape[0]);
  // Rank 0 may stay away from this ring for as long as it likes; it has room for more than may be under way.
  const std::span<std::byte> out = group_.replies().reserve(Clock::now() + std::chrono::seconds(60), [this] {
    if (group_.gone(0)) group_.end(0, "its process has ended");
  });
  if (out.empty()) fail(ErrorCode::kBridge, "rank 0: expected it to take replies, got none taken within 60 s");
  const ReplyHeader reply = {generation_, verdict == Verdict::kDraft ? 0U : 1U, 0};
  std::memcpy(out.data(), &reply, sizeof reply);
  const MessageView message(out.data() + sizeof reply, shape, lanes);
  *message.header = {rows_.epoch, verdict, lanes};
  const TreeSource source = {results, terms.num_slots, shape.num_drafted, terms.vocab_size, terms.num_steps};
  for (std::uint32_t i = 0; i < lanes; ++i) {
    pack_lane(source, rows_.req_pool_indices.as<std::int64_t>()[i],
              rows_.seq_lens.as<std::int64_t>()[i] + rows_.num_valid.as<std::int32_t>()[i], verdict, message.lanes + i,
              message.nodes + static_cast<std::size_t>(i) * static_cast<std::size_t>(shape.num_drafted));
  }
  group_.rows().release(0);
  group_.replies().publish(sizeof reply + shape.bytes(lanes));
}

}  // namespace eaglex::bridge
