// load_block, store_block: the parameters of one cycle, from the pinned ring (graph) or the kernel's arguments (raw).
// Caller: first kernel of every cycle.
// Bytes: 150 over PCIe.
// Mapping: one warp, one word per thread.
#include "cuda/graph.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace eaglex::cuda {
namespace {

constexpr std::chrono::seconds kDeadline{30};
constexpr int kDepth = ParameterRing::kDepth;

// What is captured so far is thrown away unless finish() was reached.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    EAGLEX_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  }
  ~Capture() {
    if (!finished_) {
      static_cast<void>(cudaStreamEndCapture(stream_, &graph_));
      static_cast<void>(cudaGetLastError());
    }
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  cudaGraphExec_t finish() {
    finished_ = true;
    EAGLEX_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph_));
    cudaGraphExec_t exec = nullptr;
    EAGLEX_CUDA_CHECK(cudaGraphInstantiate(&exec, graph_, 0));
    return exec;
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  bool finished_ = false;
};

using Word = std::uint32_t;
static_assert(std::is_trivially_copyable_v<DraftBatch> && sizeof(DraftBatch) % sizeof(Word) == 0);

__device__ void clear_flags(const DeviceBlock& block) {
  static_assert(kMaxSteps < kWarp);
  if (threadIdx.x <= kMaxSteps) block.drafting[threadIdx.x] = 0;
}

__global__ void store_block(const __grid_constant__ DraftBatch batch, DeviceBlock block) {
  clear_flags(block);
  if (threadIdx.x == 0) *block.batch = batch;
}

__global__ void load_block(ParameterRing* ring, unsigned long long* launches, DeviceBlock block) {
  clear_flags(block);
  const unsigned long long launch = *launches;
  const auto* const from = reinterpret_cast<const Word*>(&ring->entries[launch % kDepth]);
  for (unsigned i = threadIdx.x; i < sizeof(DraftBatch) / sizeof(Word); i += kWarp)
    reinterpret_cast<Word*>(block.batch)[i] = from[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  *launches = launch + 1;
  __threadfence_system();  // the entry is read before the host hears so
  ring->read = launch + 1;
}

// Batches of many sizes share few graphs: every size to 8, then steps of an eighth to a quarter.
std::vector<Graphs::Bucket> plan_buckets(const EngineLimits& limits, const SpeculationConfig& speculation) {
  std::vector<Graphs::Bucket> buckets;
  int lanes = 1;
  while (true) {
    lanes = std::min(lanes, limits.max_batch);
    const long long rows = static_cast<long long>(lanes) * std::max(speculation.num_draft_tokens, 1);
    buckets.push_back({lanes, static_cast<int>(std::min<long long>(rows, limits.max_rows))});
    if (lanes == limits.max_batch) return buckets;
    int step = 1;
    while (step * 8 <= lanes) step *= 2;
    lanes += step;
  }
}

}  // namespace

PinnedMemory allocate_pinned(std::size_t bytes) {
  void* block = nullptr;
  EAGLEX_CUDA_CHECK(cudaHostAlloc(&block, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(block, 0, bytes);
  return PinnedMemory(block);
}

Graphs::Graphs(const EngineLimits& limits, const SpeculationConfig& speculation, const DeviceBlock& block)
    : buckets_(plan_buckets(limits, speculation)),
      block_(block),
      ring_memory_(allocate_pinned(sizeof(ParameterRing))),
      ring_(static_cast<ParameterRing*>(ring_memory_.get())),
      launches_(allocate_device(sizeof(unsigned long long))) {
  EAGLEX_CUDA_CHECK(cudaStreamCreateWithFlags(&capture_stream_, cudaStreamNonBlocking));
}

Graphs::~Graphs() {
  for (cudaGraphExec_t exec : execs_) static_cast<void>(cudaGraphExecDestroy(exec));
  static_cast<void>(cudaStreamDestroy(capture_stream_));
}

void Graphs::capture_all(const Body& body) {
  std::vector<cudaGraphExec_t> execs;
  try {
    for (const Bucket& bucket : buckets_) {
      Capture capture(capture_stream_);
      cuda::launch("load_block", load_block, {dim3(1), kWarp, 0, capture_stream_}, ring_,
                   static_cast<unsigned long long*>(launches_.get()), block_);
      body(bucket, capture_stream_);
      execs.push_back(capture.finish());
      EAGLEX_CUDA_CHECK(cudaGraphUpload(execs.back(), capture_stream_));
    }
  } catch (...) {
    for (cudaGraphExec_t exec : execs) static_cast<void>(cudaGraphExecDestroy(exec));
    throw;
  }
  EAGLEX_CUDA_CHECK(cudaStreamSynchronize(capture_stream_));
  execs_ = std::move(execs);
}

void Graphs::discard(const std::function<void(cudaStream_t)>& body) {
  Capture capture(capture_stream_);
  body(capture_stream_);
  EAGLEX_CUDA_CHECK(cudaGraphExecDestroy(capture.finish()));
}

int Graphs::find(int lanes, int rows) const noexcept {
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (lanes <= buckets_[i].lanes) return rows <= buckets_[i].rows ? static_cast<int>(i) : -1;
  }
  return -1;
}

void Graphs::wait_for_entry(cudaStream_t stream) const {
  if (ring_->read + kDepth > launched_) return;
  const RelaxedCapture relaxed;
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (ring_->read + kDepth <= launched_) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // no error, and not for the check of a later launch
    } else {
      check(status, "parameter ring");
    }
    if (std::chrono::steady_clock::now() > deadline) {
      fail(ErrorCode::kDevice, "parameter ring: expected launch ", launched_ - kDepth + 1, " to have started within ",
           kDeadline.count(), " s, got ", static_cast<unsigned long long>(ring_->read), " started");
    }
    std::this_thread::yield();
  }
}

void Graphs::launch(int bucket, const DraftBatch& batch, cudaStream_t stream) {
  wait_for_entry(stream);
  ring_->entries[launched_ % kDepth] = batch;
  EAGLEX_CUDA_CHECK(cudaGraphLaunch(execs_[static_cast<std::size_t>(bucket)], stream));
  ++launched_;
}

void launch_store_block(const DraftBatch& batch, const DeviceBlock& block, cudaStream_t stream) {
  launch("store_block", store_block, {dim3(1), kWarp, 0, stream}, batch, block);
}

}  // namespace eaglex::cuda
