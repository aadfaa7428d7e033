// A backend that passes every step on and remembers it, so that a benchmark can launch one step again and again as the
// engine launches it: the same pointers, the same rows.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"

namespace eaglex::bench {

struct RecordedStep {
  std::string name;
  std::function<void()> launch;
};

class Recorder final : public Backend {
 public:
  explicit Recorder(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  // Forgets what was recorded and records the launches from here on.
  void start() { steps_.clear(), recording_ = true; }
  [[nodiscard]] std::vector<RecordedStep> stop() {
    recording_ = false;
    return std::exchange(steps_, {});
  }

  [[nodiscard]] const char* name() const noexcept override { return inner_->name(); }
  [[nodiscard]] Device device() const noexcept override { return inner_->device(); }
  [[nodiscard]] DType activation_type() const noexcept override { return inner_->activation_type(); }
  // The loop asks once: for what lies between the steps.
  [[nodiscard]] void* allocate(std::size_t bytes) override {
    workspace_bytes_ = bytes;
    return workspace_ = inner_->allocate(bytes);
  }
  [[nodiscard]] cudaError_t poison(cudaStream_t stream) const {
    return cudaMemsetAsync(workspace_, 0xFF, workspace_bytes_, stream);
  }
  [[nodiscard]] Linear prepare(std::span<const eaglex::Matrix> parts) override { return inner_->prepare(parts); }
  void bind(const EngineContext& context) override { inner_->bind(context); }
  void know_tokens(const DraftedTokens& tokens) override { inner_->know_tokens(tokens); }
  [[nodiscard]] bool reads_original(const void* matrix) const override { return inner_->reads_original(matrix); }
  [[nodiscard]] std::size_t own_workspace_bytes() const noexcept override { return inner_->own_workspace_bytes(); }
  [[nodiscard]] std::size_t own_weight_bytes() const noexcept override { return inner_->own_weight_bytes(); }
  [[nodiscard]] CycleEnd cycle_end() const override { return inner_->cycle_end(); }
  std::uint64_t mark(Stream stream) override { return inner_->mark(stream); }
  [[nodiscard]] std::uint64_t reached() override { return inner_->reached(); }
  void begin(const DraftBatch& batch, Stream stream) override {
    batch_ = batch;
    inner_->begin(batch, stream);
  }
  void warm_up(const std::function<void(int, int)>& body) override { inner_->warm_up(body); }
  void replay(int lanes, int rows, const std::function<void(int, int)>& body) override {
    inner_->replay(lanes, rows, body);
  }

  // The last cycle's block again, for launches to `stream`.
  void aim(Stream stream) { inner_->begin(batch_, stream); }

  void admit() override {
    note("admit", [this] { inner_->admit(); });
  }
  void fuse(const FuseParams& p) override {
    note("fuse", [this, p] { inner_->fuse(p); });
  }
  void qkv(const QkvParams& p) override {
    note("qkv", [this, p] { inner_->qkv(p); });
  }
  void attention(const AttentionParams& p) override {
    note("attention", [this, p] { inner_->attention(p); });
  }
  void o_proj(const ProjectionParams& p) override {
    note("o_proj", [this, p] { inner_->o_proj(p); });
  }
  void gate_up(const GateUpParams& p) override {
    note("gate_up", [this, p] { inner_->gate_up(p); });
  }
  void down(const ProjectionParams& p) override {
    note("down", [this, p] { inner_->down(p); });
  }
  void head(const HeadParams& p) override {
    note("head", [this, p] { inner_->head(p); });
  }
  void select(const SelectParams& p) override {
    note("select", [this, p] { inner_->select(p); });
  }
  void tree(const VerifyBatch& batch, Stream stream) override { inner_->tree(batch, stream); }

 private:
  void note(const char* name, std::function<void()> launch) {
    launch();
    if (recording_) steps_.push_back({name, std::move(launch)});
  }

  std::unique_ptr<Backend> inner_;
  DraftBatch batch_;
  std::vector<RecordedStep> steps_;
  bool recording_ = false;
  void* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace eaglex::bench
