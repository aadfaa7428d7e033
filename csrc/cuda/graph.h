// One captured graph per bucket of lanes and rows, and the ring of pinned parameter blocks that its first kernel reads.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <vector>

#include "core/batch.h"
#include "core/config.h"
#include "cuda/memory.h"

namespace eaglex::cuda {

// In pinned memory. The n-th launch of any graph reads entry n % kDepth; the device counts launches itself, so that
// nothing in the graph changes from replay to replay, and says how many entries it has read.
struct ParameterRing {
  static constexpr int kDepth = 8;
  DraftBatch entries[kDepth];
  volatile unsigned long long read;
};

// Where a cycle's parameters lie on the device: the block, and the flags that are cleared with it (Chain::drafting).
struct DeviceBlock {
  DraftBatch* batch = nullptr;
  std::int32_t* drafting = nullptr;
};

class Graphs {
 public:
  // Lanes and rows that one graph is good for.
  struct Bucket {
    int lanes = 0;
    int rows = 0;
  };

  // `block` is the device's copy of the parameter block, which all kernels of the chain read.
  Graphs(const EngineLimits& limits, const SpeculationConfig& speculation, const DeviceBlock& block);
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // Captures `body` for every bucket, on a stream of its own; `body` launches to the stream that it is given.
  using Body = std::function<void(Bucket, cudaStream_t)>;
  void capture_all(const Body& body);
  // Captures what `body` launches and throws it away, never to run: its kernels are loaded by then.
  void discard(const std::function<void(cudaStream_t)>& body);
  [[nodiscard]] bool captured() const noexcept { return !execs_.empty(); }
  // The smallest bucket of as many lanes; -1 where it has too few rows for the batch, as for prompts: raw launches.
  [[nodiscard]] int find(int lanes, int rows) const noexcept;
  // One write to the ring, one launch. Waits, with a deadline, only where the host is a whole ring ahead of the device.
  void launch(int bucket, const DraftBatch& batch, cudaStream_t stream);

 private:
  void wait_for_entry(cudaStream_t stream) const;

  std::vector<Bucket> buckets_;
  std::vector<cudaGraphExec_t> execs_;
  cudaStream_t capture_stream_ = nullptr;
  DeviceBlock block_;
  PinnedMemory ring_memory_;
  ParameterRing* ring_ = nullptr;
  DeviceMemory launches_;            // unsigned long long, the device's count
  unsigned long long launched_ = 0;  // the host's
};

// The block by value: for raw launches, and for a host that captures them.
void launch_store_block(const DraftBatch& batch, const DeviceBlock& block, cudaStream_t stream);

}  // namespace eaglex::cuda
