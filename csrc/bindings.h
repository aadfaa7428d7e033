// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/dlpack.h"
#include "core/tensor.h"
#include "draft/door.h"

namespace eaglex::bindings {

// A cudaStream_t as Python has it.
inline Stream as_stream(std::uintptr_t stream) {
  return reinterpret_cast<Stream>(stream);  // NOLINT(performance-no-int-to-ptr)
}

// What `field` was given as a borrowed tensor, or an error that names it.
[[nodiscard]] TensorView borrow(pybind11::handle value, const std::string& field);
[[nodiscard]] std::string show(const TensorView& view);
[[nodiscard]] TensorView view_of(const DLTensor& tensor);

// Points these at the tensors' memory: false, with none of them changed, unless each tensor is dense and has its view's
// type, device and number of elements. For calls of one shape, of which the first has been checked in full.
[[nodiscard]] bool move(std::initializer_list<std::pair<TensorView*, pybind11::handle>> tensors);
inline constexpr std::size_t kMaxMoved = 6;
inline constexpr const char* kMove =
    "The same at other addresses: false, with nothing changed, where these are not dense or not of the first ones' "
    "types and sizes.";
inline constexpr const char* kAgain =
    "A call that was checked once, with its tensors at other addresses: false, with nothing done, where these "
    "are not dense or not of the first ones' types and sizes.";

// `tree` of an engine or a follower, as kAgain says.
template <typename Trees>
bool tree_again(Trees& self, VerifyTensors& batch, pybind11::handle req_pool_indices, pybind11::handle seq_lens,
                pybind11::handle bonus_tokens, std::uintptr_t stream) {
  const bool moved = move(
      {{&batch.req_pool_indices, req_pool_indices}, {&batch.seq_lens, seq_lens}, {&batch.bonus_tokens, bonus_tokens}});
  if (!moved) return false;
  const pybind11::gil_scoped_release released;
  self.tree(batch, as_stream(stream));
  return true;
}

void bind_bridge(pybind11::module_& m);

}  // namespace eaglex::bindings
