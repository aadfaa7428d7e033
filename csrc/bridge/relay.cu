// The hosts' side of relay.h: announcements over the group's rings, the drafter's state, and who may reach whose memory.
#include "bridge/relay.h"

#include <cstring>
#include <memory>

namespace eaglex::bridge {
namespace {

constexpr std::size_t kExported = std::size_t{2} << 20;  // an exported allocation gets a block of its own
constexpr std::chrono::seconds kPatience{2};             // of the drafter's device, for room in rank 0's inbox
constexpr std::uint32_t kHello = 2;                      // in place of ReplyHeader::failed

struct Announcement {
  std::uint64_t epoch;
  std::int32_t num_lanes, num_rows;
  std::uint8_t aux_type;  // DType
  std::uint8_t anew;
  std::uint8_t padding[6];
  std::uint64_t rows_ns;  // how long its rows may take
};

std::uint64_t ns_of(Clock::duration time) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

std::size_t at_least(std::size_t bytes) {
  return (bytes + kExported - 1) / kExported * kExported;
}

RelayTable table_of(const Terms& terms, const RelayHost& end) {
  if (!terms.pooled()) return {};
  expect(end.req_to_token != nullptr, ErrorCode::kShape, "req_to_token", "a table on the device", "none");
  return {end.req_to_token, terms.table_width, terms.num_slots};
}

template <typename T>
T* pinned(std::size_t count = 1) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped), "pinned memory");
  auto* const made = static_cast<T*>(memory);
  std::uninitialized_value_construct_n(made, count);
  return made;
}

}  // namespace

std::size_t rows_box_bytes(const Terms& terms) {
  return static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(rows_box(nullptr, terms).aux)) +
         static_cast<std::size_t>(terms.max_rows) * static_cast<std::size_t>(terms.aux_width) * size_of(DType::kF32);
}

RowsBox rows_box(std::byte* memory, const Terms& terms) {
  const auto lanes = static_cast<std::size_t>(terms.max_lanes);
  std::size_t at = 0;
  const auto take = [&](std::size_t bytes) {
    std::byte* const found = reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(memory) + at);
    at += (bytes + 127) / 128 * 128;
    return found;
  };
  RowsBox box;
  box.arrived = reinterpret_cast<std::uint64_t*>(take(8));
  box.off = reinterpret_cast<std::uint64_t*>(take(8));
  box.seq_lens = reinterpret_cast<std::int64_t*>(take(lanes * 8));
  box.slots = reinterpret_cast<std::int64_t*>(take(lanes * 8));
  box.input_ids = reinterpret_cast<std::int64_t*>(take(static_cast<std::size_t>(terms.max_rows) * 8));
  box.row_start = reinterpret_cast<std::int32_t*>(take((lanes + 1) * 4));
  box.num_valid = reinterpret_cast<std::int32_t*>(take(lanes * 4));
  box.draft_from = reinterpret_cast<std::uint8_t*>(take(lanes));
  if (terms.pooled()) {
    box.out_cache_loc = reinterpret_cast<std::int32_t*>(take(static_cast<std::size_t>(terms.max_rows) * 4));
    box.table_lens = reinterpret_cast<std::int32_t*>(take(lanes * 4));
    box.table = reinterpret_cast<std::int32_t*>(take(lanes * static_cast<std::size_t>(terms.table_width) * 4));
  }
  box.aux = take(0);
  return box;
}

// --------------------------------------------------------------------------------------------------------- rank 0

DeviceRelayClient::DeviceRelayClient(Group& group, LinkTiming timing, const RelayHost& host)
    : group_(group),
      link_(group.terms(), timing),
      timing_(timing),
      device_(host.device),
      table_(table_of(group.terms(), host)) {
  const Terms& terms = group.terms();
  const int device = device_;
  expect(terms.dedicated(), ErrorCode::kBridge, "placement", "dedicated", "rank0");
  expect_range("lanes to a dedicated drafter", terms.max_lanes, 1, kMaxRelayLanes);
  const OnDevice here(device);
  const auto lanes = static_cast<std::size_t>(terms.max_lanes);
  inbox_ = device_memory(at_least(inbox_bytes(terms.shape())));
  kept_memory_ = device_memory(lanes * 24);
  state_ = device_memory(sizeof(PushState) + sizeof(unsigned long long));
  auto* const kept = static_cast<std::byte*>(kept_memory_.get());
  kept_ = {reinterpret_cast<std::int64_t*>(kept), reinterpret_cast<std::int64_t*>(kept + lanes * 8),
           reinterpret_cast<std::int32_t*>(kept + lanes * 16)};
  outcomes_ = pinned<RelayOutcome>(kRelayOutcomes);
  channel_.state = static_cast<PushState*>(state_.get());
  channel_.shape = terms.shape();
  channel_.inbox = static_cast<const Packet*>(inbox_.get());
  channel_.overlaps = may_overlap(device);
  staging_ = device_memory(packets_of(terms.shape().max_bytes()) * 8);
  channel_.staging = static_cast<std::byte*>(staging_.get());
  status_ = pinned<PushStatus>();
  channel_.status = status_;
  // A kernel that waits for a drafter that has ended leaves; `send` takes the word back.
  watcher_.start([this] {
    const std::lock_guard lock(stopping_);
    if (group_.gone(group_.drafter())) static_cast<volatile PushStatus*>(status_)->stop = 1;
    return true;
  });
}

DeviceRelayClient::~DeviceRelayClient() {
  watcher_.stop();
  static_cast<volatile PushStatus*>(status_)->stop = 1;
  const OnDevice here(device_);
  box_.reset();
  inbox_.reset();  // waits for the device
  static_cast<void>(cudaFreeHost(outcomes_));
  static_cast<void>(cudaFreeHost(status_));
}

std::string DeviceRelayClient::offer() const {
  const OnDevice here(device_);
  return exported(inbox_.get());
}

void DeviceRelayClient::look(Time now) {
  const std::uint64_t generation = group_.generation();
  if (generation > 0) link_.joined(generation, group_.drafter_difference(), now);
  if (group_.gone(group_.drafter())) link_.left(now);
}

// Hellos, and the ends of replies: of those that nobody waits for any more, this is all that is heard.
void DeviceRelayClient::drain(Time now) {
  for (;;) {
    const std::span<const std::byte> in = group_.replies().next(0, Time::min(), nullptr);
    if (in.empty()) break;
    ReplyHeader reply{};
    std::uint64_t epoch = 0;
    if (in.size() >= sizeof reply + sizeof epoch) {
      std::memcpy(&reply, in.data(), sizeof reply);
      if (reply.failed == kHello) {
        if (!out_.empty()) break;  // launches that may still write to its predecessor's memory
        reach(reply.generation,
              std::string(reinterpret_cast<const char*>(in.data()) + sizeof reply, in.size() - sizeof reply));
      } else {
        std::memcpy(&epoch, in.data() + sizeof reply, sizeof epoch);
        if (reply.generation == reached_) done_ = epoch;
      }
    }
    group_.replies().release(0);
  }
  if (link_.state() == DrafterLink::State::kResting)
    static_cast<void>(link_.replied({reached_, done_, false, {}}, now));
}

void DeviceRelayClient::reach(std::uint64_t generation, const std::string& handle) {
  const OnDevice here(device_);
  box_.reset();
  reached_ = done_ = 0;
  try {
    box_ = opened(handle, "the dedicated drafter");
    reached_ = generation;
  } catch (const Error& error) {  // a drafter that cannot be reached is none; it says so once
    link_.refuse(generation, error.what(), Clock::now());
  }
}

bool DeviceRelayClient::joined() {
  const Time now = Clock::now();
  look(now);
  drain(now);
  const std::uint64_t generation = group_.generation();
  if (generation == 0) return false;
  return reached_ == generation || link_.state() == DrafterLink::State::kRefused || group_.gone(group_.drafter());
}

// What has become of requests that are out; waits until at most so many of them still are. Their device has waited
// already, hosts come here a cycle later.
void DeviceRelayClient::settle(std::size_t most_out) {
  const Time latest = Clock::now() + link_.patience() + timing_.rows_deadline;
  while (!out_.empty()) {
    const std::uint64_t epoch = out_.front();
    const volatile RelayOutcome& outcome = outcomes_[epoch % kRelayOutcomes];
    if (outcome.epoch == epoch) {
      std::atomic_thread_fence(std::memory_order_acquire);
      out_.pop_front();
      if (link_.state() == DrafterLink::State::kDrafting) {
        learn(epoch, static_cast<PushCode>(outcome.code), static_cast<Verdict>(outcome.verdict));
      }
      continue;
    }
    if (out_.size() <= most_out || link_.state() != DrafterLink::State::kDrafting) return;
    if (group_.gone(group_.drafter())) return link_.left(Clock::now());
    if (Clock::now() > latest) return link_.expired(Clock::now());
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void DeviceRelayClient::learn(std::uint64_t epoch, PushCode code, Verdict verdict) {
  if (code == PushCode::kLate || code == PushCode::kEnded) {
    if (group_.gone(group_.drafter())) return link_.left(Clock::now());
    return link_.expired(Clock::now());
  }
  // Where the rows came later than it waits for them, it replies without knowing whom they are of.
  const std::string complaint = code == PushCode::kSplit ? "its reply is for another batch" : "";
  const bool failed = code == PushCode::kFine && verdict == Verdict::kNoDraft;
  static_cast<void>(link_.replied({reached_, epoch, failed, complaint}, Clock::now()));
}

Verdict DeviceRelayClient::draft(const DraftBatch& batch, const KnownLanes& lanes, const DraftResults& results,
                                 Stream stream) {
  settle(kMostOut - 1);
  const Time now = Clock::now();
  look(now);
  drain(now);
  ++epoch_;
  const Terms& terms = group_.terms();
  if (terms.pooled()) {
    expect(static_cast<bool>(batch.out_cache_loc), ErrorCode::kShape, "out_cache_loc", "the rows' KV slots", "none");
  }
  Asked asked;
  bool any = false;
  for (int lane = 0; lane < batch.batch; ++lane) {
    const auto i = static_cast<std::size_t>(lane);
    expect_range("req_pool_indices", lanes.slots.at(i), 0, terms.num_slots - 1);
    const bool asks = terms.pooled() ? lanes.slots[i] > 0 && (lanes.begins.at(i) != 0 || link_.covers(lanes.slots[i]))
                                     : link_.covers(lanes.slots[i], lanes.seq_lens.at(i));
    if (asks) asked.wanted.add(lane), any = true;
    if (asks && terms.pooled() && (lanes.begins[i] != 0 || lanes.rewritten.at(i) != 0)) asked.entries.add(lane);
    link_.forget(lanes.slots[i]);  // until these rows are on their way
  }
  const bool takes = out_.empty() ? link_.ready(now) : link_.state() == DrafterLink::State::kDrafting;
  if (!any || !takes || reached_ != group_.generation()) return Verdict::kNoDraft;
  if (!send(batch, asked, results, timing_.deadline, stream)) return Verdict::kNoDraft;
  for (int lane = 0; lane < batch.batch; ++lane) {
    const auto i = static_cast<std::size_t>(lane);
    if (asked.wanted.has(lane)) link_.cover(lanes.slots[i], terms.pooled() ? 0 : lanes.new_lens.at(i));
  }
  return Verdict::kDraft;
}

bool DeviceRelayClient::try_out(const DraftBatch& batch, const DraftResults& results, Clock::duration patience,
                                Stream stream) {
  settle(0);
  const Time now = Clock::now();
  look(now);
  drain(now);
  if (!out_.empty() || !link_.ready(now) || reached_ != group_.generation()) return false;
  ++epoch_;
  if (!send(batch, {}, results, patience, stream)) return false;
  settle(0);
  return link_.state() == DrafterLink::State::kReady;
}

bool DeviceRelayClient::send(const DraftBatch& batch, const Asked& asked, const DraftResults& results,
                             Clock::duration patience, Stream stream) {
  const Terms& terms = group_.terms();
  const Time now = Clock::now();
  const std::span<std::byte> out = group_.rows().reserve(Time::min(), nullptr);
  if (out.empty()) {  // it holds on to four requests although at most two are out
    link_.asked(epoch_, now);
    link_.expired(now);
    return false;
  }
  {
    const std::lock_guard lock(stopping_);
    static_cast<volatile PushStatus*>(status_)->stop = 0;  // of a drafter that ended before this one came
  }
  const Announcement told = {epoch_,
                             batch.batch,
                             batch.num_rows,
                             static_cast<std::uint8_t>(batch.aux_type),
                             link_.anew() ? std::uint8_t{1} : std::uint8_t{0},
                             {},
                             ns_of(timing_.rows_deadline)};
  std::memcpy(out.data(), &told, sizeof told);
  group_.rows().publish(sizeof told);
  const OnDevice here(device_);
  SendRows rows;
  rows.batch = batch;
  rows.wanted = asked.wanted;
  rows.entries = asked.entries;
  rows.failed = &static_cast<PushState*>(state_.get())->failed;
  rows.afresh = link_.anew();
  rows.table = table_;
  rows.results = results;
  rows.num_slots = terms.num_slots;
  rows.to = rows_box(static_cast<std::byte*>(box_.get()), terms);
  rows.kept = kept_;
  rows.epoch = epoch_;
  rows.finished = reinterpret_cast<unsigned long long*>(static_cast<std::byte*>(state_.get()) + sizeof(PushState));
  launch_send_rows(rows, terms.aux_width, stream);
  channel_.epoch = epoch_;
  channel_.deadline_ns = ns_of(patience);
  channel_.outcome = outcomes_ + epoch_ % kRelayOutcomes;
  LaneList kept;
  kept.count = batch.batch;
  kept.slots = kept_.slots;
  kept.lens = kept_.lens;
  kept.num_valid = kept_.num_valid;
  launch_receive(channel_, results, terms.num_slots, kept, stream);
  link_.asked(epoch_, now, patience);
  out_.push_back(epoch_);
  return true;
}

// -------------------------------------------------------------------------------------------------------- drafter

DeviceRelayServer::DeviceRelayServer(Group& group, const RelayHost& own, const std::string& offer)
    : group_(group), device_(own.device), table_(table_of(group.terms(), own)), generation_(group.generation()) {
  const int device = device_;
  expect(group.rank() == group.drafter(), ErrorCode::kBridge, "drafter rank", group.drafter(), group.rank());
  const Terms& terms = group.terms();
  const OnDevice here(device);
  box_memory_ = device_memory(at_least(rows_box_bytes(terms)));
  box_ = rows_box(static_cast<std::byte*>(box_memory_.get()), terms);
  inbox_ = opened(offer, "rank 0");
  state_ = device_memory(sizeof(PushState) + sizeof(std::uint64_t));
  // As if it were acknowledged for good: rank 0 asks for the next only when it has let go of the last.
  check_cuda(cudaMemset(static_cast<PushState*>(state_.get())->acked, 0x7f, sizeof(std::uint64_t)), "memory");
  check_cuda(cudaDeviceSynchronize(), "memory");
  status_ = pinned<PushStatus>();
  channel_.state = static_cast<PushState*>(state_.get());
  channel_.shape = terms.shape();
  channel_.num_receivers = 1;
  channel_.acks = reinterpret_cast<const std::uint64_t*>(static_cast<std::byte*>(state_.get()) + sizeof(PushState));
  channel_.inboxes[0] = static_cast<Packet*>(inbox_.get());
  channel_.status = status_;
  channel_.overlaps = may_overlap(device);
  // A kernel that waits for rows of a rank 0 that has ended leaves.
  watcher_.start([this] {
    if (group_.gone(0)) static_cast<volatile PushStatus*>(status_)->stop = 1;
    return true;
  });
  const std::string handle = exported(box_memory_.get());
  const ReplyHeader hello = {generation_, kHello, 0};
  const std::span<std::byte> out = group.replies().reserve(Clock::now() + std::chrono::seconds(60), nullptr);
  if (out.size() < sizeof hello + handle.size())
    fail(ErrorCode::kBridge, "rank 0: expected room for a word, got none within 60 s");
  std::memcpy(out.data(), &hello, sizeof hello);
  std::memcpy(out.data() + sizeof hello, handle.data(), handle.size());
  group.replies().publish(sizeof hello + handle.size());
}

DeviceRelayServer::~DeviceRelayServer() {
  watcher_.stop();
  static_cast<volatile PushStatus*>(status_)->stop = 1;
  const OnDevice here(device_);
  inbox_.reset();
  box_memory_.reset();  // waits for the device
  static_cast<void>(cudaFreeHost(status_));
}

std::optional<RowsView> DeviceRelayServer::next(Clock::duration wait, Stream stream) {
  const auto watch = [this] {
    group_.check();
    if (group_.gone(0)) group_.end(0, "its process has ended");
  };
  const std::span<const std::byte> in = group_.rows().next(0, Clock::now() + wait, watch);
  if (in.empty()) return std::nullopt;
  Announcement told{};
  expect(in.size() == sizeof told, ErrorCode::kBridge, "announcement bytes", sizeof told, in.size());
  std::memcpy(&told, in.data(), sizeof told);
  group_.rows().release(0);
  const Terms& terms = group_.terms();
  expect_range("announced num_lanes", told.num_lanes, 1, terms.max_lanes);
  expect_range("announced num_rows", told.num_rows, 1, terms.max_rows);
  const auto type = static_cast<DType>(told.aux_type);
  epoch_ = told.epoch;
  num_lanes_ = told.num_lanes;
  anew_ = told.anew != 0;
  const OnDevice here(device_);
  launch_take_rows({box_, table_, num_lanes_, epoch_, told.rows_ns, status_}, stream);
  RowsView rows;
  rows.epoch = epoch_;
  rows.anew = anew_;
  rows.aux_hidden_states = dense_view(box_.aux, type, told.num_rows, terms.aux_width);
  rows.input_ids = dense_view(box_.input_ids, DType::kI64, told.num_rows);
  rows.row_start = dense_view(box_.row_start, DType::kI32, num_lanes_ + 1);
  rows.num_valid = dense_view(box_.num_valid, DType::kI32, num_lanes_);
  rows.draft_from = dense_view(box_.draft_from, DType::kU8, num_lanes_);
  rows.req_pool_indices = dense_view(box_.slots, DType::kI64, num_lanes_);
  rows.seq_lens = dense_view(box_.seq_lens, DType::kI64, num_lanes_);
  if (terms.pooled()) rows.out_cache_loc = dense_view(box_.out_cache_loc, DType::kI32, told.num_rows);
  return rows;
}

void DeviceRelayServer::reply(const DraftResults& results, Verdict verdict, Stream stream) {
  const Terms& terms = group_.terms();
  const OnDevice here(device_);
  channel_.epoch = epoch_;
  channel_.deadline_ns = ns_of(kPatience);
  LaneList lanes;
  lanes.count = num_lanes_;
  lanes.slots = box_.slots;
  lanes.lens = box_.seq_lens;
  lanes.num_valid = box_.num_valid;
  const TreeSource source = {results, terms.num_slots, channel_.shape.num_drafted, terms.vocab_size, terms.num_steps};
  launch_push(channel_, source, lanes, verdict, stream);
}

void DeviceRelayServer::done(Verdict verdict) {
  const std::span<std::byte> out = group_.replies().reserve(Clock::now() + std::chrono::seconds(60), [this] {
    if (group_.gone(0)) group_.end(0, "its process has ended");
  });
  if (out.empty()) fail(ErrorCode::kBridge, "rank 0: expected it to take replies, got none taken within 60 s");
  const ReplyHeader reply = {generation_, verdict == Verdict::kDraft ? 0U : 1U, 0};
  std::memcpy(out.data(), &reply, sizeof reply);
  std::memcpy(out.data() + sizeof reply, &epoch_, sizeof epoch_);
  group_.replies().publish(sizeof reply + sizeof epoch_);
}

}  // namespace eaglex::bridge
