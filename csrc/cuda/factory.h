// The CUDA backend: the steps as kernels on a stream, replayed as one graph per batch bucket.
#pragma once

#include <memory>

#include "core/backend.h"

namespace eaglex {

// Throws ErrorCode::kDevice, naming what is wrong, unless CUDA device `device` can run this build's kernels.
std::unique_ptr<Backend> make_cuda_backend(int device);
// One that has no draft: `tree` over results that came from elsewhere, and nothing else.
std::unique_ptr<Backend> make_cuda_follower(int device);

}  // namespace eaglex
