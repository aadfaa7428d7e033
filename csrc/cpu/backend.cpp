#include "cpu/backend.h"

#include "core/error.h"
#include "core/select.h"
#include "core/tree.h"
#include "cpu/factory.h"

namespace eaglex {

std::unique_ptr<Backend> make_cpu_backend() {
  return std::make_unique<cpu::CpuBackend>();
}

}  // namespace eaglex

namespace eaglex::cpu {
namespace {

// Lengths lie in host memory here, so what kFull needs can be known before the first byte is written.
void check_full_mask(const VerifyBatch& batch) {
  constexpr std::int64_t kLongest = 1 << 30;
  std::int64_t needed = 0;
  for (std::int32_t lane = 0; lane < batch.batch; ++lane) {
    expect_range("seq_lens", batch.seq_lens[lane], 0, kLongest);
    needed += batch.num_draft_tokens * (batch.seq_lens[lane] + batch.num_draft_tokens);
  }
  expect(batch.mask_size >= needed, ErrorCode::kShape, "mask",
         concat("at least ", needed, " elements for these seq_lens"), batch.mask_size);
}

}  // namespace

void* CpuBackend::allocate(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  memory_.push_back(std::make_unique<std::byte[]>(bytes + kAlignment));
  void* block = memory_.back().get();
  std::size_t space = bytes + kAlignment;
  return std::align(kAlignment, bytes, block, space);
}

Linear CpuBackend::prepare(std::span<const Matrix> parts) {
  Linear linear;
  for (const Matrix& part : parts) linear.parts[linear.num_parts++] = part;
  return linear;
}

void CpuBackend::bind(const EngineContext& context) {
  context_ = context;
}

void CpuBackend::begin(const DraftBatch& batch, Stream /*stream*/) {
  batch_ = batch;
}

CpuBackend::LiveRows CpuBackend::live_rows(const Rows& rows) const {
  LiveRows live;
  for (std::int64_t row = 0; row < rows.max_rows; ++row) {
    const RowPlace place = locate(context_, batch_, rows, row);
    if (!place.live) continue;
    live.rows.push_back(row);
    live.places.push_back(place);
  }
  return live;
}

void CpuBackend::admit() {
  for (std::int32_t lane = 0; lane < batch_.batch; ++lane) admit_lane(context_, batch_, lane);
}

void CpuBackend::select(const SelectParams& params) {
  const bool last = params.draft_step + 1 >= context_.speculation.num_steps;
  for (std::int32_t lane = 0; lane < batch_.batch; ++lane) {
    const LaneStatus status = select_lane(context_, batch_, params, lane);
    if (last) ++context_.results.counters[static_cast<std::int32_t>(status)];
  }
}

void CpuBackend::tree(const VerifyBatch& batch, Stream /*stream*/) {
  const TreeSource source = tree_source(context_);
  if (batch.mask_mode == MaskMode::kFull) check_full_mask(batch);
  for (std::int32_t lane = 0; lane < batch.batch; ++lane) tree_lane(source, batch, lane);
}

}  // namespace eaglex::cpu
