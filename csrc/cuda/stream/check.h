// The room's one check under this namespace's name.
#pragma once

#include "cuda/check.h"

namespace eaglex::stream {

using cuda::check;

}  // namespace eaglex::stream
