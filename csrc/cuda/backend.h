// Every step as a few kernels on the caller's stream: the plain chain. `run` replays it as one graph.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/backend.h"
#include "core/workspace.h"
#include "cuda/common.cuh"
#include "cuda/fast.h"
#include "cuda/gemm.h"
#include "cuda/graph.h"
#include "cuda/memory.h"

namespace eaglex::cuda {

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(int device);

  [[nodiscard]] const char* name() const noexcept override { return fast_ ? "cuda" : "cuda, plain chain"; }
  [[nodiscard]] Device device() const noexcept override { return {DeviceKind::kCuda, device_}; }
  // The weights' own type; known from the first prepare() on.
  [[nodiscard]] DType activation_type() const noexcept override { return type_; }
  [[nodiscard]] void* allocate(std::size_t bytes) override;
  [[nodiscard]] Linear prepare(std::span<const Matrix> parts) override;
  void bind(const EngineContext& context) override;
  [[nodiscard]] bool reads_original(const void* matrix) const override {
    return !packed_.contains(matrix) && (!fast_ || fast_->reads_original(matrix));
  }

  void begin(const DraftBatch& batch, Stream stream) override;
  void warm_up(const std::function<void(int, int)>& body) override;
  void replay(int lanes, int rows, const std::function<void(int, int)>& body) override;

  void admit() override;
  void fuse(const FuseParams& params) override;
  void qkv(const QkvParams& params) override;
  void attention(const AttentionParams& params) override;
  void o_proj(const ProjectionParams& params) override { project(params); }
  void gate_up(const GateUpParams& params) override;
  void down(const ProjectionParams& params) override { project(params); }
  void head(const HeadParams& params) override;
  void select(const SelectParams& params) override;
  void tree(const VerifyBatch& batch, Stream stream) override;

 private:
  // Between the kernels of one step. Long prompts go through them in chunks of `rows`.
  struct Buffers {
    DeviceBlock block;
    void* x = nullptr;           // [rows, widest input of a product]
    float* raw = nullptr;        // [rows, q | k | v]
    float* logits = nullptr;     // [head_rows, Vd]
    float* ranked = nullptr;     // [head_rows, segments, 2 + 2k]
    float* attention = nullptr;  // [attention_rows, partial results]
  };
  // Sizes that follow from the config once.
  struct Plan {
    int rows = 0;
    int head_rows = 0;
    int attention_rows = 0;
  };
  void plan();
  void carve(Workspace& workspace);
  void bind_fast();
  void unpack_weights();
  [[nodiscard]] GemmParams gemm_params(const RowRange& range, const Linear& weight) const;
  void project(const ProjectionParams& params);
  [[nodiscard]] bool reads_aux_directly(const FuseParams& params) const;
  [[nodiscard]] int lanes() const noexcept { return launch_lanes_; }

  int device_ = 0;
  int num_sms_ = 0;
  int compute_major_ = 0;
  std::optional<DType> weight_type_;
  DType type_ = DType::kF32;
  EngineContext context_;
  std::vector<void*> k_, v_;
  Chain chain_;
  Plan plan_;
  Buffers buffers_;
  std::vector<DeviceMemory> memory_;
  std::unique_ptr<Graphs> graphs_;
  std::vector<Linear> weights_;
  std::unordered_set<const void*> packed_;
  std::unordered_map<const void*, void*> unpacked_;  // by the packed values
  PinnedMemory failed_;
  std::unique_ptr<FastChain> fast_;  // null: the plain chain alone

  DraftBatch batch_;
  cudaStream_t stream_ = nullptr;  // where the steps launch to: the caller's, or the one that is being captured
  bool capturing_ = false;         // a graph of our own: what batch_ says must not be built in
  int launch_lanes_ = 0;
};

}  // namespace eaglex::cuda
