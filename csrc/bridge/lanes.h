// A cycle's requests as a host's tensors, checked against the results that they are of.
#pragma once

#include "bridge/message.h"
#include "core/tensor.h"

namespace eaglex::bridge {

struct LaneTensors {
  TensorView slots;      // [B] int64
  TensorView lens;       // [B] int64: what a draft is for, less num_valid
  TensorView num_valid;  // [B] int32 or empty

  // Throws ErrorCode::kShape.
  [[nodiscard]] LaneList check(Device device) const {
    const std::int64_t count = slots.rank == 1 ? slots.shape[0] : kAnySize;
    slots.expect("slots", device, {DType::kI64}, {count});
    lens.expect("new_lens", device, {DType::kI64}, {count});
    if (num_valid) num_valid.expect("num_valid", device, {DType::kI32}, {count});
    return {static_cast<std::int32_t>(count), slots.as<const std::int64_t>(), lens.as<const std::int64_t>(),
            num_valid ? num_valid.as<const std::int32_t>() : nullptr};
  }
};

}  // namespace eaglex::bridge
