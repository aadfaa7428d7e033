// The CPU backend: the steps in plain loops. The embedded default, and what runs where there is no GPU.
#pragma once

#include <memory>

#include "core/backend.h"

namespace eaglex {

std::unique_ptr<Backend> make_cpu_backend();

}  // namespace eaglex
