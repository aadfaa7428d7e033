// Every step as a loop over the live rows; activations and sums in float.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/lane.h"

namespace eaglex::cpu {

class CpuBackend final : public Backend {
 public:
  [[nodiscard]] const char* name() const noexcept override { return "cpu"; }
  [[nodiscard]] Device device() const noexcept override { return {DeviceKind::kCpu, 0}; }
  [[nodiscard]] DType activation_type() const noexcept override { return DType::kF32; }
  [[nodiscard]] void* allocate(std::size_t bytes) override;
  [[nodiscard]] Linear prepare(std::span<const Matrix> parts) override;
  void bind(const EngineContext& context) override;

  void begin(const DraftBatch& batch, Stream stream) override;
  void warm_up(const std::function<void(int, int)>&) override {}
  void replay(int lanes, int rows, const std::function<void(int, int)>& body) override { body(lanes, rows); }

  [[nodiscard]] CycleEnd cycle_end() const override { return {&batch_, batch_.batch, nullptr}; }

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
  // The rows of a launch that are live, and where each belongs.
  struct LiveRows {
    std::vector<std::int64_t> rows;
    std::vector<RowPlace> places;
    [[nodiscard]] std::int64_t count() const noexcept { return static_cast<std::int64_t>(rows.size()); }
  };
  [[nodiscard]] LiveRows live_rows(const Rows& rows) const;
  void project(const ProjectionParams& params) const;
  [[nodiscard]] std::vector<float> layer_input(const QkvParams& params, const LiveRows& live) const;
  void attend_row(const AttentionParams& params, std::int64_t row, const RowPlace& place, std::int64_t kv_head) const;
  // One row of the head: its normed hidden state [H] and its logits [Vd], whose best may be replaced by exact ones.
  struct ScoredRow {
    std::int64_t row = 0;
    const float* x = nullptr;
    float* logits = nullptr;
  };
  [[nodiscard]] std::vector<std::int32_t> candidates(const HeadParams& params, const ScoredRow& row) const;
  // The chosen log-probabilities and draft ids of one row; false where the logits are not finite.
  bool rank_row(const HeadParams& params, const RowPlace& place, const ScoredRow& row) const;

  EngineContext context_;
  DraftBatch batch_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

}  // namespace eaglex::cpu
