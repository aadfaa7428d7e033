// The steps as weight-streaming kernels (csrc/cuda/stream), chained by programmatic dependent launch. CudaBackend asks
// it first and takes the plain chain for what it leaves: whole drafts that it cannot stream, and launches of more than
// 64 rows (fuse and K, V of an extend: of more than 384).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/params.h"
#include "cuda/head_scores.h"
#include "cuda/live_rows.h"

namespace eaglex::cuda {

class FastChain {
 public:
  // All that the plain chain knows by the time it is bound.
  struct Setup {
    EngineContext context;          // kv.k and kv.v may be null
    std::span<void* const> pool_k;  // by layer
    std::span<void* const> pool_v;
    std::span<const Linear> weights;
    const DraftBatch* batch = nullptr;  // the device's copy of the parameter block
    std::int32_t* drafting = nullptr;   // Chain::drafting
    HeadScores head_scores = HeadScores::kAsTheyAre;
    int compiled_for = 0;                      // compute capability of this build's code, 90 for 9.0
    std::function<void*(std::size_t)> device;  // memory on the device, zeroed
    std::function<void*(std::size_t)> tiles;   // the same, for the weights
    std::function<void*(std::size_t)> pinned;  // memory of the host that the device can write, zeroed
  };

  // Null where the draft cannot be streamed (`refusal` says why) or EAGLEX_CHAIN=plain forbids it. Brings the weights
  // into tiles: as much memory again until their owner drops the originals. The plain chain still reads fc and the
  // projections of K and V for prompts, and all of them where layers are several or max_batch · topk exceeds 64.
  static std::unique_ptr<FastChain> make(const Setup& setup);
  // Empty, or what stands in the way: "head_dim 80".
  [[nodiscard]] static std::string refusal(const Setup& setup);

  virtual ~FastChain() = default;
  FastChain(const FastChain&) = delete;
  FastChain& operator=(const FastChain&) = delete;

  // Whether fuse can read these auxiliary hidden states: bf16, aligned to 16 bytes.
  [[nodiscard]] static bool reads(const DraftBatch& batch) noexcept;
  // Whether the plain chain may still be asked for a product with this matrix of Setup::weights.
  [[nodiscard]] virtual bool reads_original(const void* matrix) const = 0;
  // Bytes of what may be known of each token that can be drafted: products with its embedding. 0: nothing is.
  [[nodiscard]] virtual std::size_t token_bytes() const = 0;
  // Computes that, into `memory` of so many bytes; the device is idle behind it.
  virtual void know_tokens(const DraftedTokens& tokens, void* memory) = 0;
  // Where admit lists the rows that count.
  [[nodiscard]] virtual LiveRows live_rows() const noexcept = 0;
  // Before a cycle on `stream`. Throws ErrorCode::kDevice, once, where a block has waited in vain for another: what was
  // drafted since the last call is void. From then on no block waits. Waits for the stream only in that case; while the
  // stream is captured, which must not be waited for, it leaves the error to the call after.
  virtual void check(cudaStream_t stream) = 0;
  // The same without the error, which the next check() throws: a host that replays cycles it has captured calls nothing
  // else, and must not fail in the middle of a verification.
  virtual void heal(cudaStream_t stream) = 0;

  // Launches the step and returns true, or returns false: a launch for the plain chain.
  virtual bool fuse(const FuseParams& params, cudaStream_t stream) = 0;
  virtual bool qkv(const QkvParams& params, cudaStream_t stream) = 0;
  virtual bool attention(const AttentionParams& params, cudaStream_t stream) = 0;
  virtual bool project(const ProjectionParams& params, cudaStream_t stream) = 0;
  virtual bool gate_up(const GateUpParams& params, cudaStream_t stream) = 0;
  virtual bool head(const HeadParams& params, cudaStream_t stream) = 0;
  // True where the head's second kernel selects as well: for chains, after head() returned true.
  virtual bool select(const SelectParams& params, cudaStream_t stream) = 0;
  // Whether the head that was asked for last was launched here and lets the kernel behind it begin early.
  [[nodiscard]] virtual bool releases() const = 0;

 protected:
  FastChain() = default;
};

}  // namespace eaglex::cuda
