// A dedicated drafter between two processes, as relay.h has it, without a model: what comes back is computed from the rows
// that arrived, and compared with what the rows were. For compute-sanitizer, and for many requests in little time.
//
//   bench_relay [requests [stall_us]]     two GPUs, or one that both processes share; either side stalls up to stall_us
//
// Prints one JSON row; ends with 1 where a request was lost or a value is wrong.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "bridge/device.h"
#include "bridge/relay.h"
#include "bridge/segment.h"
#include "two_processes.h"

using namespace eaglex;          // NOLINT(google-build-using-namespace)
using namespace eaglex::bridge;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int kLanes = 7;
constexpr int kRowsOfLane = 5;
constexpr int kPromptRows = 150;  // of one lane now and then, so that several blocks copy
constexpr int kMaxRows = kPromptRows + kLanes * kRowsOfLane;
constexpr int kWidth = 3 * 264;  // of 16-bit values; rows lie further apart than that
constexpr int kStride = kWidth + 8;
constexpr int kNodes = 6;
constexpr GroupId kIdentity = {0x6561676c65780001, 0x72656c6179000001};

Terms terms_of_all() {
  Terms terms;
  terms.num_ranks = 1;
  terms.max_lanes = kLanes;
  terms.num_draft_tokens = kNodes + 1;
  terms.num_steps = kNodes;
  terms.num_slots = kLanes + 3;
  terms.vocab_size = 1 << 20;
  terms.aux_width = kWidth;
  terms.max_rows = kMaxRows;
  return terms;
}

template <typename T>
T* device(std::size_t count) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, count * sizeof(T)), "memory");
  check_cuda(cudaMemset(memory, 0, count * sizeof(T)), "memory");
  return static_cast<T*>(memory);
}

DraftResults results_of(const Terms& terms) {
  const auto slots = static_cast<std::size_t>(terms.num_slots);
  DraftResults results;
  results.draft_tokens = device<std::int64_t>(slots * kNodes);
  results.parents = device<std::int32_t>(slots * kNodes);
  results.num_nodes = device<std::int32_t>(slots);
  results.drafted_for = device<std::int64_t>(slots);
  return results;
}

// The draft of one lane: a hash of all its rows that count, their ids and its place in the batch. One block per lane.
struct Lane {
  const std::uint16_t* aux;
  std::int64_t stride;
  const std::int64_t* ids;
  std::int32_t begin, count;
  std::int64_t slot, length;
};
__device__ std::uint32_t hash_of(const Lane& lane) {
  __shared__ std::uint32_t sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  std::uint32_t own = 0;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < lane.count * kWidth; i += blockDim.x) {
    const std::int32_t row = lane.begin + i / kWidth;
    own += (lane.aux[row * lane.stride + i % kWidth] + 1U) * (static_cast<std::uint32_t>(lane.ids[row]) * 2U + 1U) *
           (static_cast<std::uint32_t>(i) * 2654435761U + 1U);
  }
  atomicAdd(&sum, own);
  __syncthreads();
  return sum ^ static_cast<std::uint32_t>(lane.length * 7919 + lane.slot);
}
__device__ std::int64_t token_of(std::uint32_t hash, int node) {
  return (hash + static_cast<std::uint32_t>(node) * 104729U) % (1U << 20);
}

__global__ void draft_kernel(const std::uint16_t* aux, const std::int64_t* ids, const std::int32_t* row_start,
                             const std::int32_t* num_valid, const std::uint8_t* draft_from, const std::int64_t* slots,
                             const std::int64_t* seq_lens, DraftResults results) {
  const int i = static_cast<int>(blockIdx.x);
  const std::int64_t slot = slots[i];
  if (slot == 0) return;
  const std::int64_t length = seq_lens[i] + num_valid[i];
  const std::uint32_t hash = hash_of({aux, kWidth, ids, row_start[i], num_valid[i], slot, length});
  if (threadIdx.x != 0) return;
  for (int node = 0; node < kNodes; ++node) {
    results.draft_tokens[slot * kNodes + node] = token_of(hash, node);
    results.parents[slot * kNodes + node] = node;
  }
  results.num_nodes[slot] = draft_from[i] != 0 ? kNodes : 0;
  results.drafted_for[slot] = length;
}

// On rank 0, behind the reply. `found[0]` counts drafts, `found[1]` what is wrong with them.
__global__ void check_kernel(DraftBatch batch, DraftResults results, unsigned long long* found) {
  const int i = static_cast<int>(blockIdx.x);
  const std::int64_t slot = batch.req_pool_indices[i];
  const std::int64_t length = batch.seq_lens[i] + batch.num_valid[i];
  const std::uint32_t hash = hash_of({static_cast<const std::uint16_t*>(batch.aux_hidden_states), batch.aux_stride,
                                      batch.input_ids.i64, batch.row_start[i], batch.num_valid[i], slot, length});
  if (threadIdx.x != 0) return;
  const int count = results.num_nodes[slot];
  if (count == 0 && results.drafted_for[slot] == -1) return;  // no reply
  bool good = results.drafted_for[slot] == length && count == (batch.draft_from[i] != 0 ? kNodes : 0);
  for (int node = 0; node < count; ++node) {
    good = good && results.draft_tokens[slot * kNodes + node] == token_of(hash, node) &&
           results.parents[slot * kNodes + node] == node;
  }
  atomicAdd(found, 1ULL);
  if (!good) atomicAdd(found + 1, 1ULL);
}

__global__ void fill_kernel(std::uint16_t* aux, std::int64_t* ids, std::uint32_t seed, int rows) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < rows * kStride;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    aux[i] = static_cast<std::uint16_t>((static_cast<std::uint32_t>(i) ^ seed) * 2654435761U >> 13);
    if (i < rows) ids[i] = (static_cast<std::uint32_t>(i) * 31U + seed) % (1U << 20);
  }
}

// What the two processes tell each other before the group has met, and at its end.
struct Shared {
  char address[256], offer[256];
  std::atomic<int> open, done;
};

void until(const std::atomic<int>& word) {
  for (int i = 0; word == 0; ++i) {
    if (i > 60'000) fail(ErrorCode::kBridge, "the other process: expected within 60 s, got no word");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

class Stalls {
 public:
  Stalls(unsigned seed, int most_us) : draw_(seed), most_us_(most_us) {}
  // One in ten times.
  void stall() {
    if (most_us_ > 0 && draw_() % 10 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(draw_() % static_cast<unsigned>(most_us_)));
  }

 private:
  std::mt19937 draw_;
  int most_us_;
};

struct Rows {
  std::uint16_t* aux = device<std::uint16_t>(std::size_t{kMaxRows} * kStride);
  std::int64_t* ids = device<std::int64_t>(kMaxRows);
  std::int32_t* row_start = device<std::int32_t>(kLanes + 1);
  std::int32_t* num_valid = device<std::int32_t>(kLanes);
  std::uint8_t* draft_from = device<std::uint8_t>(kLanes);
  std::int64_t* slots = device<std::int64_t>(kLanes);
  std::int64_t* seq_lens = device<std::int64_t>(kLanes);
};

template <typename T>
void put(T* to, const std::vector<T>& from) {
  check_cuda(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
}

int rank0(int requests, int most_us, Shared& shared) {
  check_cuda(cudaSetDevice(0), "device");
  const Terms terms = terms_of_all();
  Group group = Group::create(terms, kIdentity);
  // What a sanitizer slows down is not late.
  DeviceRelayClient client(group, {std::chrono::seconds(20), std::chrono::seconds(1)}, RelayHost{});
  std::snprintf(shared.address, sizeof shared.address, "%s", group.address().c_str());
  std::snprintf(shared.offer, sizeof shared.offer, "%s", client.offer().c_str());
  shared.open = 1;
  for (int i = 0; !client.joined(); ++i) {
    if (i > 60'000) fail(ErrorCode::kBridge, "drafter: expected it to join within 60 s, got no word");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Rows rows;
  const DraftResults results = results_of(terms);
  auto* const found = device<unsigned long long>(2);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::mt19937 draw(1);
  Stalls stalls(2, most_us);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(terms.num_slots), 0);
  std::uint64_t asked = 0;
  const Time begun = Clock::now();
  for (int request = 0; request < requests; ++request) {
    KnownLanes lanes;
    std::vector<std::int32_t> row_start = {0}, num_valid;
    std::vector<std::uint8_t> draft_from;
    const int count = 1 + static_cast<int>(draw() % kLanes);
    for (int i = 0; i < count; ++i) {
      const std::int64_t slot = 1 + (i + request) % (terms.num_slots - 1);
      const int most = i == 0 && request % 16 == 0 ? kPromptRows : kRowsOfLane;
      const int here = 1 + static_cast<int>(draw() % static_cast<unsigned>(most));
      std::int64_t& length = lengths[static_cast<std::size_t>(slot)];
      if (length > 1000) length = 0;
      lanes.slots.push_back(slot);
      lanes.seq_lens.push_back(length);
      num_valid.push_back(1 + static_cast<std::int32_t>(draw() % static_cast<unsigned>(here)));
      lanes.new_lens.push_back(length += num_valid.back());
      row_start.push_back(row_start.back() + here);
      draft_from.push_back(draw() % 8 == 0 ? 0 : 1);
    }
    put(rows.row_start, row_start);
    put(rows.num_valid, num_valid);
    put(rows.draft_from, draft_from);
    put(rows.slots, lanes.slots);
    put(rows.seq_lens, lanes.seq_lens);
    DraftBatch batch;
    batch.batch = count;
    batch.num_rows = row_start.back();
    batch.aux_hidden_states = rows.aux;
    batch.aux_type = DType::kBF16;
    batch.aux_stride = kStride;
    batch.input_ids = {nullptr, rows.ids};
    batch.row_start = rows.row_start;
    batch.num_valid = rows.num_valid;
    batch.draft_from = rows.draft_from;
    batch.req_pool_indices = {nullptr, rows.slots};
    batch.seq_lens = {nullptr, rows.seq_lens};
    fill_kernel<<<32, 256, 0, stream>>>(rows.aux, rows.ids, static_cast<std::uint32_t>(draw()), batch.num_rows);
    stalls.stall();
    if (client.draft(batch, lanes, results, stream) != Verdict::kDraft)
      fail(ErrorCode::kBridge, "request ", request,
           ": expected it to be asked, got none: ", client.link().take_warning());
    asked += static_cast<std::uint64_t>(count);
    check_kernel<<<static_cast<unsigned>(count), 128, 0, stream>>>(batch, results, found);
    check_cuda(cudaStreamSynchronize(stream), "request");  // the batch's tensors are written again
  }
  const double us = std::chrono::duration<double, std::micro>(Clock::now() - begun).count() / requests;
  unsigned long long counted[2] = {};
  check_cuda(cudaMemcpy(counted, found, sizeof counted, cudaMemcpyDeviceToHost), "copy");
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "devices");
  std::printf(
      "{\"relay\": \"p2p\", \"gpus\": %d, \"requests\": %d, \"lanes\": %llu, \"drafts\": %llu, \"wrong\": %llu, "
      "\"us_per_request\": %.1f}\n",
      std::min(devices, 2), requests, static_cast<unsigned long long>(asked), counted[0], counted[1], us);
  shared.done = 1;
  return counted[0] == asked && counted[1] == 0 ? 0 : 1;
}

int drafter(int most_us, Shared& shared) {
  until(shared.open);
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "devices");
  const int own = devices > 1 ? 1 : 0;
  check_cuda(cudaSetDevice(own), "device");
  const Terms terms = terms_of_all();
  Group group = Group::join(shared.address, terms, kIdentity, terms.num_ranks);
  DeviceRelayServer server(group, {own, nullptr}, shared.offer);
  const DraftResults results = results_of(terms);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Stalls stalls(3, most_us);
  while (shared.done == 0) {
    const std::optional<RowsView> rows = server.next(std::chrono::milliseconds(100), stream);
    if (!rows) continue;
    stalls.stall();
    const auto lanes = static_cast<unsigned>(rows->seq_lens.shape[0]);
    draft_kernel<<<lanes, 128, 0, stream>>>(
        static_cast<const std::uint16_t*>(rows->aux_hidden_states.data),
        static_cast<const std::int64_t*>(rows->input_ids.data), static_cast<const std::int32_t*>(rows->row_start.data),
        static_cast<const std::int32_t*>(rows->num_valid.data), static_cast<const std::uint8_t*>(rows->draft_from.data),
        static_cast<const std::int64_t*>(rows->req_pool_indices.data),
        static_cast<const std::int64_t*>(rows->seq_lens.data), results);
    server.reply(results, Verdict::kDraft, stream);
    check_cuda(cudaStreamSynchronize(stream), "reply");
    server.done(Verdict::kDraft);
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const int requests = count > 1 ? std::atoi(arguments[1]) : 1000;
  const int most_us = count > 2 ? std::atoi(arguments[2]) : 0;
  Segment memory = Segment::create(4096, "bench-relay");  // before any use of CUDA, which does not survive a fork
  auto& shared = *reinterpret_cast<Shared*>(memory.data());
  return in_two_processes([&](int which) {
    try {
      return which == 0 ? rank0(requests, most_us, shared) : drafter(most_us, shared);
    } catch (const std::exception& error) {
      if (which == 1 && shared.done != 0) return 0;  // rank 0 has ended, as it does
      std::fprintf(stderr, "%s: %s\n", which == 0 ? "rank 0" : "drafter", error.what());
      shared.done = 1;
      return 1;
    }
  });
}
