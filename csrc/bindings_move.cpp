// Tensors of calls that repeat: looked at through torch's table of C functions, since a cycle has nine of them and a look
// at one through its methods takes 1 µs, on a machine at work three times that.
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"
#include "core/dlpack.h"
#include "core/error.h"

namespace py = pybind11;

namespace eaglex::bindings {
namespace {

DType dtype_of(DLDataType type) {
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 32) return DType::kF32;
    if (type.code == kDLFloat && type.bits == 16) return DType::kF16;
    if (type.code == kDLBfloat && type.bits == 16) return DType::kBF16;
    if (type.code == kDLInt && type.bits == 32) return DType::kI32;
    if (type.code == kDLInt && type.bits == 64) return DType::kI64;
    if ((type.code == kDLUInt || type.code == kDLBool) && type.bits == 8) return DType::kU8;
  }
  fail(ErrorCode::kShape, "expected float32, float16, bfloat16, int32, int64, uint8 or bool, got DLPack code ",
       int{type.code}, " with ", int{type.bits}, " bits");
}

using Exchange = decltype(DLPackExchange::dltensor_from_py_object_no_sync);

// The type's function, null where it has none: torch has one since 2.11. Must be called with the GIL held.
Exchange exchange_of(PyTypeObject* type) {
  static PyTypeObject* seen = nullptr;  // the last type, kept alive so that no other has its address
  static Exchange known = nullptr;
  if (type == seen) return known;
  Exchange found = nullptr;
  PyObject* const capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr && PyCapsule_IsValid(capsule, kDLPackExchange) != 0) {
    const auto* table = static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule, kDLPackExchange));
    if (table->header.version.major == kDLPackMajor) found = table->dltensor_from_py_object_no_sync;
  }
  PyErr_Clear();
  Py_XDECREF(capsule);
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(seen));
  seen = type;
  return known = found;
}

// Nothing for what cannot be borrowed.
std::optional<TensorView> seen(py::handle tensor) {
  try {
    const Exchange exchange = exchange_of(Py_TYPE(tensor.ptr()));
    if (exchange == nullptr) return borrow(tensor, "tensor");
    DLTensor found{};
    if (exchange(tensor.ptr(), &found) == 0) return view_of(found);
    PyErr_Clear();
  } catch (const Error&) {  // of a type or a device that no view has
  }
  return std::nullopt;
}

constexpr const char* kRepeatedName = "eaglex repeated call";

struct Kept {
  std::unique_ptr<Repeated> repeated;
  py::tuple owners;
};

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  auto* const kept = static_cast<Kept*>(PyCapsule_GetPointer(self, kRepeatedName));
  if (kept == nullptr) return nullptr;
  const std::size_t tensors = kept->repeated->num_tensors();
  if (static_cast<std::size_t>(count) != tensors + 1) {
    return PyErr_Format(PyExc_TypeError, "expected %zu tensors and a stream, got %zd arguments", tensors, count);
  }
  const std::size_t stream = PyLong_AsSize_t(arguments[tensors]);
  if (stream == static_cast<std::size_t>(-1) && PyErr_Occurred() != nullptr) return nullptr;
  try {
    return PyBool_FromLong((*kept->repeated)(arguments, as_stream(stream)) ? 1 : 0);
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }
}

PyMethodDef repeated_method = {"again", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                               METH_FASTCALL, kRepeated};

}  // namespace

py::object function_of(std::unique_ptr<Repeated> repeated, py::tuple owners) {
  auto kept = std::make_unique<Kept>(Kept{std::move(repeated), std::move(owners)});
  const auto destroy = [](PyObject* capsule) {
    delete static_cast<Kept*>(PyCapsule_GetPointer(capsule, kRepeatedName));  // NOLINT: the capsule owns it
  };
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(kept.get(), kRepeatedName, destroy));
  if (!capsule) throw py::error_already_set();
  static_cast<void>(kept.release());
  const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&repeated_method, capsule.ptr()));
  if (!function) throw py::error_already_set();
  return function;
}

TensorView view_of(const DLTensor& tensor) {
  TensorView view;
  if (tensor.ndim > kMaxRank) {
    fail(ErrorCode::kShape, "expected at most ", kMaxRank, " dimensions, got ", tensor.ndim);
  }
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.dtype = dtype_of(tensor.dtype);
  const std::int32_t kind = tensor.device.device_type;
  if (kind != kDLCpu && kind != kDLCuda && kind != kDLCudaHost) {
    fail(ErrorCode::kShape, "expected memory of the CPU or of CUDA, got DLPack device ", kind);
  }
  if (kind == kDLCuda) view.device = {DeviceKind::kCuda, tensor.device.device_id};
  view.rank = tensor.ndim;
  std::int64_t compact = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    const auto at = static_cast<std::size_t>(i);
    view.shape[at] = tensor.shape[i];
    view.stride[at] = tensor.strides == nullptr ? compact : tensor.strides[i];
    compact *= tensor.shape[i];
  }
  return view;
}

bool move(std::initializer_list<std::pair<TensorView*, py::handle>> tensors) {
  std::array<void*, kMaxMoved> addresses{};
  std::size_t count = 0;
  for (const auto& [view, tensor] : tensors) {
    const std::optional<TensorView> now = seen(tensor);
    if (!now || now->dtype != view->dtype || now->device != view->device || now->numel() != view->numel() ||
        !now->contiguous() || !view->contiguous()) {
      return false;
    }
    addresses.at(count++) = now->data;
  }
  count = 0;
  for (const auto& [view, tensor] : tensors) view->data = addresses.at(count++);
  return true;
}

}  // namespace eaglex::bindings
