// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/tensor.h"

namespace eaglex::bindings {

// What `field` was given as a borrowed tensor, or an error that names it.
[[nodiscard]] TensorView borrow(pybind11::handle value, const std::string& field);
[[nodiscard]] std::string show(const TensorView& view);

void bind_bridge(pybind11::module_& m);

}  // namespace eaglex::bindings
