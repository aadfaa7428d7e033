// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
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
inline constexpr const char* kRepeated =
    "A call that was checked once, as a function of its tensors at other addresses and the stream: false, with nothing "
    "done, where these are not dense or not of the first ones' types and sizes. Keeps its owner and the structure.";

// A call that is made again and again, with other tensors. What Python calls is a plain C function of the interpreter's:
// a method of pybind11 finds its overload and puts its arguments into vectors, which takes 17 us where the CPU's caches
// are cold, and a cycle has two of these calls.
class Repeated {
 public:
  explicit Repeated(std::size_t num_tensors) : num_tensors_(num_tensors) {}
  virtual ~Repeated() = default;
  Repeated(const Repeated&) = delete;
  Repeated& operator=(const Repeated&) = delete;

  // False where the tensors do not fit. Called with the GIL held.
  virtual bool operator()(PyObject* const* tensors, Stream stream) = 0;
  [[nodiscard]] std::size_t num_tensors() const noexcept { return num_tensors_; }

 private:
  std::size_t num_tensors_;
};

// The function; it keeps `owners` alive.
[[nodiscard]] pybind11::object function_of(std::unique_ptr<Repeated> repeated, pybind11::tuple owners);

// `tree` of an engine or a follower.
template <typename Trees>
class RepeatedTree final : public Repeated {
 public:
  RepeatedTree(Trees& trees, VerifyTensors& batch)
      : Repeated(3), trees_(trees), batch_(batch), block_(trees.admit(batch)) {}

  bool operator()(PyObject* const* tensors, Stream stream) override {
    const bool moved = move(
        {{&batch_.req_pool_indices, tensors[0]}, {&batch_.seq_lens, tensors[1]}, {&batch_.bonus_tokens, tensors[2]}});
    if (!moved) return false;
    batch_.readdress(block_);
    const pybind11::gil_scoped_release released;
    trees_.tree(block_, stream);
    return true;
  }

 private:
  Trees& trees_;
  VerifyTensors& batch_;
  VerifyBatch block_;
};

template <typename Trees>
pybind11::object repeated_tree(Trees& self, VerifyTensors& batch) {
  return function_of(std::make_unique<RepeatedTree<Trees>>(self, batch),
                     pybind11::make_tuple(pybind11::cast(&self), pybind11::cast(&batch)));
}

void bind_bridge(pybind11::module_& m);

}  // namespace eaglex::bindings
