// The launch of `admit`.
#pragma once

#include "cuda/common.cuh"
#include "cuda/live_rows.h"

namespace eaglex::cuda {

// `live`: where the rows that count are listed; null: nowhere.
void launch_admit(const Chain& chain, const LiveRows& live, int lanes, cudaStream_t stream);

}  // namespace eaglex::cuda
