// Every step as launches on the caller's stream: those of the fast chain where it takes them, else of the plain one.
// `run` replays them as one graph.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/backend.h"
#include "cuda/buffers.h"
#include "cuda/calls.h"
#include "cuda/common.cuh"
#include "cuda/fast.h"
#include "cuda/gemm.h"
#include "cuda/graph.h"
#include "cuda/memory.h"

namespace eaglex::cuda {

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(int device);
  ~CudaBackend() override;

  [[nodiscard]] const char* name() const noexcept override { return fast_ ? "cuda" : "cuda, plain chain"; }
  [[nodiscard]] Device device() const noexcept override { return {DeviceKind::kCuda, device_}; }
  // The weights' own type; known from the first prepare() on.
  [[nodiscard]] DType activation_type() const noexcept override { return type_; }
  [[nodiscard]] void* allocate(std::size_t bytes) override;
  [[nodiscard]] Linear prepare(std::span<const Matrix> parts) override;
  void bind(const EngineContext& context) override;
  void know_tokens(const DraftedTokens& tokens) override;
  [[nodiscard]] bool reads_original(const void* matrix) const override {
    return !packed_.contains(matrix) && (!fast_ || fast_->reads_original(matrix));
  }

  [[nodiscard]] std::size_t own_workspace_bytes() const noexcept override { return workspace_bytes_; }
  [[nodiscard]] std::size_t own_weight_bytes() const noexcept override { return weight_bytes_; }

  void begin(const DraftBatch& batch, Stream stream) override;
  void warm_up(const std::function<void(int, int)>& body) override;
  void replay(int lanes, int rows, const std::function<void(int, int)>& body) override;

  [[nodiscard]] CycleEnd cycle_end() const override { return {block_.batch, lanes(), stream_}; }
  std::uint64_t mark(Stream stream) override;
  [[nodiscard]] std::uint64_t reached() override;

  void admit() override;
  void fuse(const FuseParams& params) override;
  void qkv(const QkvParams& params) override;
  void attention(const AttentionParams& params) override;
  void o_proj(const ProjectionParams& params) override;
  void gate_up(const GateUpParams& params) override;
  void down(const ProjectionParams& params) override;
  void head(const HeadParams& params) override;
  void select(const SelectParams& params) override;
  void tree(const VerifyBatch& batch, Stream stream) override;

 protected:
  EngineContext context_;

 private:
  // Where the launches of a cycle go.
  enum class Purpose {
    kRun,        // to the caller's stream, with the caller's batch; a host may be capturing it
    kGraph,      // into a graph of our own, which serves any batch: nothing of batch_ may be built in
    kRehearsal,  // into a capture that is thrown away: only so that the kernels are loaded
  };
  void bind_fast();
  void unpack_weights();
  [[nodiscard]] PlainWork plain_work() const;
  [[nodiscard]] HeadScores head_scores() const;
  void rehearse(const std::function<void(Graphs::Bucket, cudaStream_t)>& capture);
  [[nodiscard]] bool streams_fuse() const;
  [[nodiscard]] GemmParams gemm_params(const RowRange& range, const Linear& weight) const;
  void project(const ProjectionParams& params);
  [[nodiscard]] bool reads_aux_directly(const FuseParams& params) const;
  [[nodiscard]] int lanes() const noexcept { return launch_lanes_; }

  int device_ = 0;
  int num_sms_ = 0;
  int compute_major_ = 0;
  int compiled_for_ = 0;  // kernels.h
  std::optional<DType> weight_type_;
  DType type_ = DType::kF32;
  std::vector<void*> k_, v_;
  Chain chain_;
  DeviceBlock block_;
  Buffers buffers_;
  std::vector<DeviceMemory> memory_;
  std::size_t workspace_bytes_ = 0;  // of it, what bind() took; the tiles apart
  std::size_t weight_bytes_ = 0;
  void* token_table_ = nullptr;  // FastChain::know_tokens
  bool tried_token_table_ = false;
  std::unique_ptr<Graphs> graphs_;
  std::vector<Linear> weights_;
  std::unordered_set<const void*> packed_;
  std::unordered_map<const void*, void*> unpacked_;  // by the packed values
  PinnedMemory failed_;
  std::unique_ptr<FastChain> fast_;  // null: the plain chain alone

  DraftBatch batch_;
  cudaStream_t stream_ = nullptr;  // where the steps launch to: the caller's, or the one that is being captured
  Purpose purpose_ = Purpose::kRun;
  bool readable_ = true;  // kRehearsal: whether the fast chain is to read the rows of fuse
  int launch_lanes_ = 0;
  Calls calls_;
};

}  // namespace eaglex::cuda
