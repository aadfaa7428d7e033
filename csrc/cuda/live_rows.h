// The rows of a batch that count, side by side. Of a draft's rows the target accepts half or fewer; the others keep no K
// and V, and a part of an extend that begins behind the last row that counts need not read its weights.
#pragma once

#include <cstdint>

namespace eaglex::cuda {

// One that `admit` has found sound, with what fuse and the projections of K and V would else look up one after another.
struct alignas(16) LiveRow {
  std::int64_t position = 0;
  std::int64_t kv_slot = 0;
  std::int32_t row = -1;  // of the batch; negative: of a lane that keeps nothing, by another of its rows
  std::int32_t token = 0;
  std::int32_t query = -1;  // the lane that drafts from this row; negative: none
};

// On the device; null: rows are taken as the batch has them.
struct LiveRows {
  static constexpr int kMost = 384;  // of a batch; `admit` writes nothing for larger ones
  std::int32_t* count = nullptr;     // [1]
  LiveRow* rows = nullptr;           // [kMost]
};

}  // namespace eaglex::cuda
