// With its part bindings_bridge.cpp the only file that includes pybind11: translation between Python and the C++
// engine, no decisions.
//
// Python fills:   DraftConfig, SpeculationConfig, EngineLimits, LayerWeights, DraftWeights, EngineTensors,
//                 BatchTensors, VerifyTensors (every field is writable; a tensor field takes None, a torch tensor or
//                 any object with __dlpack__ whose memory outlives the capsule).
// Python calls:   DraftEngine(device, …).warm_up / enqueue / run / tree, then mark / reached; build_info().
// Tensors are borrowed: the Python side keeps them alive (eaglex/engine.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/dlpack.h"
#include "core/error.h"
#include "cpu/factory.h"
#include "draft/engine.h"
#ifdef EAGLEX_WITH_CUDA
#include "cuda/factory.h"
#endif

namespace py = pybind11;

namespace {

using eaglex::DType;
using eaglex::ErrorCode;
using eaglex::TensorView;

// torch tensors, read through their methods: about 1 µs each, where torch's __dlpack__ takes 10 and a cycle has a dozen
// tensors. Names are interned once: a string made for each look-up would cost as much as the look-up.
struct Names {
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
};
const Names& names() {
  static const Names made;  // lives as long as the process, as the strings do
  return made;
}

py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}
py::object get(py::handle object, PyObject* name) {
  return owned(PyObject_GetAttr(object.ptr(), name));
}
py::object call(py::handle object, PyObject* name) {
  return owned(PyObject_CallMethodNoArgs(object.ptr(), name));
}

// Whether borrow_torch can read it. The type of the last that it can is kept alive, and told by its address.
bool is_torch(py::handle object) {
  static PyObject* known = nullptr;  // guarded by the GIL
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  if (type == known) return true;
  if (PyObject_HasAttr(object.ptr(), names().data_ptr) == 0 ||
      PyObject_HasAttr(object.ptr(), names().get_device) == 0) {
    return false;
  }
  Py_INCREF(type);
  Py_XDECREF(known);
  known = type;
  return true;
}

std::unordered_map<PyObject*, DType>& torch_dtypes() {
  static std::unordered_map<PyObject*, DType> known;  // dtypes live as long as torch; guarded by the GIL
  return known;
}

DType torch_dtype(py::handle dtype) {
  std::unordered_map<PyObject*, DType>& known = torch_dtypes();
  const auto found = known.find(dtype.ptr());
  if (found != known.end()) return found->second;
  const std::string name = py::str(dtype);
  for (const auto& [text, type] : {std::pair{"torch.float32", DType::kF32}, std::pair{"torch.float16", DType::kF16},
                                   std::pair{"torch.bfloat16", DType::kBF16}, std::pair{"torch.int32", DType::kI32},
                                   std::pair{"torch.int64", DType::kI64}, std::pair{"torch.uint8", DType::kU8},
                                   std::pair{"torch.bool", DType::kU8}, std::pair{"torch.float8_e4m3fn", DType::kF8}}) {
    if (name == text) return known[dtype.ptr()] = type;
  }
  eaglex::fail(ErrorCode::kShape,
               "expected float32, float16, bfloat16, float8_e4m3fn, int32, int64, uint8 or bool, got ", name);
}

TensorView borrow_torch(py::handle object) {
  const py::tuple shape = get(object, names().shape);
  const py::tuple stride = call(object, names().stride);
  if (shape.size() > eaglex::kMaxRank) {
    eaglex::fail(ErrorCode::kShape, "expected at most ", eaglex::kMaxRank, " dimensions, got ", shape.size());
  }
  TensorView view;
  view.data = reinterpret_cast<void*>(call(object, names().data_ptr).cast<std::uintptr_t>());  // NOLINT
  view.dtype = torch_dtype(get(object, names().dtype));
  const int index = call(object, names().get_device).cast<int>();  // -1 on the CPU
  if (index >= 0) {
    if (!get(object, names().is_cuda).cast<bool>()) {
      eaglex::fail(ErrorCode::kShape, "expected memory of the CPU or of CUDA, got ",
                   std::string(py::str(object.attr("device"))));
    }
    view.device = {eaglex::DeviceKind::kCuda, index};
  }
  view.rank = static_cast<int>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    view.shape[i] = shape[i].cast<std::int64_t>();
    view.stride[i] = stride[i].cast<std::int64_t>();
  }
  if (view.data == nullptr && view.numel() > 0) {
    eaglex::fail(ErrorCode::kShape, "expected a tensor with memory, got one on ",
                 std::string(py::str(object.attr("device"))));
  }
  return view;
}

// The capsule is dropped unconsumed, so it frees itself; the memory is the caller's tensor's.
TensorView borrow_dlpack(py::handle object) {
  const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
  // -1 asks the producer not to synchronise streams: the engine's caller orders them. CPU producers want None.
  const py::object stream = device.first == eaglex::kDLCuda ? py::object(py::int_(-1)) : py::object(py::none());
  const py::capsule capsule = object.attr("__dlpack__")(py::arg("stream") = stream);
  return eaglex::bindings::view_of(capsule.get_pointer<DLManagedTensor>()->dl_tensor);
}

// What `field` was given, or an error that names it.
void assign(TensorView& to, py::handle value, const std::string& field) {
  const bool torch = is_torch(value);
  if (!value.is_none() && !torch && !py::hasattr(value, "__dlpack__")) {
    eaglex::fail(ErrorCode::kShape, field, ": expected a tensor or None, got ",
                 std::string(py::str(py::type::of(value).attr("__name__"))));
  }
  try {
    to = value.is_none() ? TensorView() : torch ? borrow_torch(value) : borrow_dlpack(value);
  } catch (const eaglex::Error& error) {
    eaglex::fail(error.code(), field, ": ", error.what());
  } catch (const py::error_already_set& error) {  // it is sparse, requires a gradient, …
    eaglex::fail(ErrorCode::kShape, field, ": expected a tensor that can be borrowed, got ", error.what());
  }
}

void assign(std::vector<TensorView>& to, py::handle value, const std::string& field) {
  if (!py::isinstance<py::sequence>(value)) {
    eaglex::fail(ErrorCode::kShape, field, ": expected a list of tensors, got ",
                 std::string(py::str(py::type::of(value).attr("__name__"))));
  }
  std::vector<TensorView> views;
  for (const py::object item : py::reinterpret_borrow<py::sequence>(value)) {
    const std::string name = eaglex::concat(field, '[', views.size(), ']');
    assign(views.emplace_back(), item, name);
  }
  to = std::move(views);
}

// A tensor or None, or an object with `values` and `scales` (eaglex.packed.PackedWeight); values in bytes are int4.
void assign(eaglex::Matrix& to, py::handle value, const std::string& field) {
  eaglex::Matrix matrix;
  if (!py::hasattr(value, "scales")) {
    assign(static_cast<TensorView&>(matrix), value, field);
  } else {
    assign(static_cast<TensorView&>(matrix), value.attr("values"), field + ".values");
    assign(matrix.scales, value.attr("scales"), field + ".scales");
    if (matrix.dtype == DType::kU8 && matrix.rank == 2) {
      matrix.dtype = DType::kI4;
      matrix.shape[1] *= 2;
      matrix.stride = {matrix.stride[0] * 2, matrix.stride[1]};
    }
  }
  to = matrix;
}

std::string show(const eaglex::Matrix& matrix) {
  return matrix.packed() ? eaglex::describe(matrix) + " with scales " + eaglex::describe(matrix.scales)
         : matrix        ? eaglex::describe(matrix)
                         : "None";
}

std::string show(const TensorView& view) {
  return view ? eaglex::describe(view) : "None";
}

std::vector<std::string> show(const std::vector<TensorView>& views) {
  std::vector<std::string> shown;
  shown.reserve(views.size());
  for (const TensorView& view : views) shown.push_back(show(view));
  return shown;
}

void translate(const eaglex::Error& error) {
  const char* name = nullptr;
  switch (error.code()) {
    case ErrorCode::kConfig:
      name = "ConfigError";
      break;
    case ErrorCode::kShape:
      name = "ShapeError";
      break;
    case ErrorCode::kDevice:
      name = "DeviceError";
      break;
    case ErrorCode::kBridge:
      name = "BridgeError";
      break;
  }
  PyErr_SetString(py::module_::import("eaglex.errors").attr(name).ptr(), error.what());
}

std::unique_ptr<eaglex::Backend> make_backend(const std::string& kind, int index) {
  if (kind == "cpu") return eaglex::make_cpu_backend();
#ifdef EAGLEX_WITH_CUDA
  if (kind == "cuda") return eaglex::make_cuda_backend(index);
#endif
#ifdef EAGLEX_WITH_CUDA
  constexpr const char* kBuilt = "cpu or cuda";
#else
  constexpr const char* kBuilt = "cpu (this build has no CUDA)";
#endif
  eaglex::fail(ErrorCode::kDevice, "device: expected ", kBuilt, ", got ", kind, ':', index);
}

// A cycle's tensors at other addresses, as kMove says.
bool move_batch(eaglex::BatchTensors& batch, py::handle aux_hidden_states, py::handle input_ids, py::handle num_valid,
                py::handle req_pool_indices, py::handle seq_lens, py::handle out_cache_loc) {
  return eaglex::bindings::move({{&batch.aux_hidden_states, aux_hidden_states},
                                 {&batch.input_ids, input_ids},
                                 {&batch.num_valid, num_valid},
                                 {&batch.req_pool_indices, req_pool_indices},
                                 {&batch.seq_lens, seq_lens},
                                 {&batch.out_cache_loc, out_cache_loc}});
}

class RepeatedRun final : public eaglex::bindings::Repeated {
 public:
  RepeatedRun(eaglex::DraftEngine& engine, eaglex::BatchTensors& batch)
      : Repeated(6), engine_(engine), batch_(batch), block_(engine.admit(batch)) {}

  bool operator()(PyObject* const* tensors, eaglex::Stream stream) override {
    if (!move_batch(batch_, tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5])) return false;
    batch_.readdress(block_);
    const py::gil_scoped_release released;
    engine_.run(block_, stream);
    return true;
  }

 private:
  eaglex::DraftEngine& engine_;
  eaglex::BatchTensors& batch_;
  eaglex::DraftBatch block_;
};

// clang-format off: the tables of fields below read as tables
void bind_configs(py::module_& m) {
  using namespace eaglex;  // NOLINT(google-build-using-namespace): the names below are all of it
  py::enum_<AuxNorm>(m, "AuxNorm").value("NONE", AuxNorm::kNone).value("WHOLE", AuxNorm::kWhole).value("EACH", AuxNorm::kEach);
  py::enum_<Residual>(m, "Residual").value("PRE_NORM", Residual::kPreNorm).value("NORMED", Residual::kNormed);
  py::enum_<NextHidden>(m, "NextHidden").value("PRE_NORM", NextHidden::kPreNorm).value("NORMED", NextHidden::kNormed);
  py::enum_<EmbeddingNorm>(m, "EmbeddingNorm").value("NORMED", EmbeddingNorm::kNormed).value("NONE", EmbeddingNorm::kNone);
  py::enum_<Sampling>(m, "Sampling").value("GREEDY", Sampling::kGreedy).value("REJECTION", Sampling::kRejection);
  py::enum_<MaskMode>(m, "MaskMode")
      .value("FULL", MaskMode::kFull)
      .value("QLEN_ONLY", MaskMode::kQlenOnly)
      .value("QLEN_ONLY_BITPACK", MaskMode::kQlenOnlyBitpack);

#define EAGLEX_FIELD(Struct, name) .def_readwrite(#name, &Struct::name)
  py::class_<DraftConfig>(m, "DraftConfig").def(py::init<>())
      EAGLEX_FIELD(DraftConfig, hidden_size) EAGLEX_FIELD(DraftConfig, target_hidden_size)
      EAGLEX_FIELD(DraftConfig, intermediate_size) EAGLEX_FIELD(DraftConfig, num_heads) EAGLEX_FIELD(DraftConfig, num_kv_heads)
      EAGLEX_FIELD(DraftConfig, head_dim) EAGLEX_FIELD(DraftConfig, vocab_size) EAGLEX_FIELD(DraftConfig, draft_vocab_size)
      EAGLEX_FIELD(DraftConfig, max_positions) EAGLEX_FIELD(DraftConfig, num_layers) EAGLEX_FIELD(DraftConfig, num_aux)
      EAGLEX_FIELD(DraftConfig, rotary_dim) EAGLEX_FIELD(DraftConfig, rms_norm_eps) EAGLEX_FIELD(DraftConfig, rope_factor)
      EAGLEX_FIELD(DraftConfig, aux_norm) EAGLEX_FIELD(DraftConfig, residual) EAGLEX_FIELD(DraftConfig, next_hidden)
      EAGLEX_FIELD(DraftConfig, embedding_norm);
  py::class_<SpeculationConfig>(m, "SpeculationConfig").def(py::init<>())
      EAGLEX_FIELD(SpeculationConfig, num_steps) EAGLEX_FIELD(SpeculationConfig, topk)
      EAGLEX_FIELD(SpeculationConfig, num_draft_tokens) EAGLEX_FIELD(SpeculationConfig, sampling)
      EAGLEX_FIELD(SpeculationConfig, stop_score);
  py::class_<EngineLimits>(m, "EngineLimits").def(py::init<>())
      EAGLEX_FIELD(EngineLimits, max_batch) EAGLEX_FIELD(EngineLimits, max_rows) EAGLEX_FIELD(EngineLimits, num_slots)
          EAGLEX_FIELD(EngineLimits, token_table_bytes);
}

void bind_tensors(py::module_& m) {
  using namespace eaglex;  // NOLINT(google-build-using-namespace)
// Reads as a description; takes None or whatever has __dlpack__.
#define EAGLEX_TENSOR(Struct, name)                                            \
  .def_property(                                                               \
      #name, [](const Struct& self) { return show(self.name); },               \
      [](Struct& self, py::handle value) { assign(self.name, value, #name); })
  py::class_<LayerWeights>(m, "LayerWeights").def(py::init<>())
      EAGLEX_TENSOR(LayerWeights, input_layernorm) EAGLEX_TENSOR(LayerWeights, hidden_norm) EAGLEX_TENSOR(LayerWeights, q_proj)
      EAGLEX_TENSOR(LayerWeights, k_proj) EAGLEX_TENSOR(LayerWeights, v_proj) EAGLEX_TENSOR(LayerWeights, o_proj)
      EAGLEX_TENSOR(LayerWeights, post_attention_layernorm) EAGLEX_TENSOR(LayerWeights, gate_proj)
      EAGLEX_TENSOR(LayerWeights, up_proj) EAGLEX_TENSOR(LayerWeights, down_proj);
  py::class_<DraftWeights>(m, "DraftWeights").def(py::init<>())
      EAGLEX_TENSOR(DraftWeights, embed_tokens) EAGLEX_TENSOR(DraftWeights, fc) EAGLEX_TENSOR(DraftWeights, aux_norms)
      EAGLEX_FIELD(DraftWeights, layers) EAGLEX_TENSOR(DraftWeights, norm) EAGLEX_TENSOR(DraftWeights, lm_head)
      EAGLEX_TENSOR(DraftWeights, lm_head_rows) EAGLEX_TENSOR(DraftWeights, d2t) EAGLEX_TENSOR(DraftWeights, inv_freq);
  py::class_<EngineTensors>(m, "EngineTensors").def(py::init<>())
      EAGLEX_TENSOR(EngineTensors, req_to_token) EAGLEX_TENSOR(EngineTensors, draft_k) EAGLEX_TENSOR(EngineTensors, draft_v)
      EAGLEX_TENSOR(EngineTensors, draft_tokens) EAGLEX_TENSOR(EngineTensors, parents) EAGLEX_TENSOR(EngineTensors, scores)
      EAGLEX_TENSOR(EngineTensors, num_nodes) EAGLEX_TENSOR(EngineTensors, drafted_for) EAGLEX_TENSOR(EngineTensors, draft_probs)
      EAGLEX_TENSOR(EngineTensors, counters);
  py::class_<BatchTensors>(m, "BatchTensors").def(py::init<>())
      EAGLEX_TENSOR(BatchTensors, aux_hidden_states) EAGLEX_TENSOR(BatchTensors, input_ids) EAGLEX_TENSOR(BatchTensors, row_start)
      EAGLEX_TENSOR(BatchTensors, num_valid) EAGLEX_TENSOR(BatchTensors, draft_from)
      EAGLEX_TENSOR(BatchTensors, req_pool_indices) EAGLEX_TENSOR(BatchTensors, seq_lens)
      EAGLEX_TENSOR(BatchTensors, out_cache_loc)
      EAGLEX_TENSOR(BatchTensors, temperatures) EAGLEX_TENSOR(BatchTensors, uniforms)
      .def("move", move_batch, eaglex::bindings::kMove);
  py::class_<VerifyTensors>(m, "VerifyTensors").def(py::init<>())
      EAGLEX_FIELD(VerifyTensors, mask_mode) EAGLEX_TENSOR(VerifyTensors, req_pool_indices)
      EAGLEX_TENSOR(VerifyTensors, seq_lens) EAGLEX_TENSOR(VerifyTensors, bonus_tokens)
      EAGLEX_TENSOR(VerifyTensors, draft_tokens) EAGLEX_TENSOR(VerifyTensors, positions)
      EAGLEX_TENSOR(VerifyTensors, retrieve_index) EAGLEX_TENSOR(VerifyTensors, retrieve_next_token)
      EAGLEX_TENSOR(VerifyTensors, retrieve_next_sibling) EAGLEX_TENSOR(VerifyTensors, mask);
#undef EAGLEX_TENSOR
#undef EAGLEX_FIELD
}
// clang-format on

void bind_engine(py::module_& m) {
  using eaglex::DraftEngine;
  using eaglex::bindings::as_stream;
  py::class_<DraftEngine>(m, "DraftEngine")
      .def(py::init([](const std::string& device, int index, const eaglex::DraftConfig& config,
                       const eaglex::SpeculationConfig& speculation, const eaglex::EngineLimits& limits,
                       const eaglex::DraftWeights& weights, const eaglex::EngineTensors& tensors) {
             return std::make_unique<DraftEngine>(make_backend(device, index), config, speculation, limits, weights,
                                                  tensors);
           }),
           py::kw_only(), py::arg("device"), py::arg("index"), py::arg("config"), py::arg("speculation"),
           py::arg("limits"), py::arg("weights"), py::arg("tensors"))
      .def_static(
          "check_inputs",
          [](const std::string& device, int index, const eaglex::DraftConfig& config,
             const eaglex::SpeculationConfig& speculation, const eaglex::EngineLimits& limits,
             const eaglex::DraftWeights& weights, const eaglex::EngineTensors& tensors) {
            const auto kind = device == "cuda" ? eaglex::DeviceKind::kCuda : eaglex::DeviceKind::kCpu;
            eaglex::check_inputs(config, speculation, limits, weights, tensors, {kind, index});
          },
          py::kw_only(), py::arg("device"), py::arg("index"), py::arg("config"), py::arg("speculation"),
          py::arg("limits"), py::arg("weights"), py::arg("tensors"))
      .def("warm_up", &DraftEngine::warm_up, py::call_guard<py::gil_scoped_release>())
      .def("embeddings_changed", &DraftEngine::embeddings_changed, py::call_guard<py::gil_scoped_release>())
      .def(
          "enqueue",
          [](DraftEngine& self, const eaglex::BatchTensors& batch, std::uintptr_t stream) {
            self.enqueue(batch, as_stream(stream));
          },
          py::arg("batch"), py::arg("stream") = 0, py::call_guard<py::gil_scoped_release>())
      .def(
          "run",
          [](DraftEngine& self, const eaglex::BatchTensors& batch, std::uintptr_t stream) {
            self.run(batch, as_stream(stream));
          },
          py::arg("batch"), py::arg("stream") = 0, py::call_guard<py::gil_scoped_release>())
      .def(
          "tree",
          [](DraftEngine& self, const eaglex::VerifyTensors& batch, std::uintptr_t stream) {
            self.tree(batch, as_stream(stream));
          },
          py::arg("batch"), py::arg("stream") = 0, py::call_guard<py::gil_scoped_release>())
      .def(
          "repeated_run",
          [](DraftEngine& self, eaglex::BatchTensors& batch) {
            return eaglex::bindings::function_of(std::make_unique<RepeatedRun>(self, batch),
                                                 py::make_tuple(py::cast(&self), py::cast(&batch)));
          },
          py::arg("batch"), eaglex::bindings::kRepeated)
      .def("repeated_tree", eaglex::bindings::repeated_tree<DraftEngine>, py::arg("batch"), eaglex::bindings::kRepeated)
      .def(
          "reads_original",
          [](const DraftEngine& self, std::uintptr_t matrix) {
            return self.reads_original(reinterpret_cast<const void*>(matrix));  // NOLINT
          },
          py::arg("matrix"))
      .def(
          "mark", [](DraftEngine& self, std::uintptr_t stream) { return self.mark(as_stream(stream)); },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("reached", &DraftEngine::reached)
      .def_property_readonly("backend_name", &DraftEngine::backend_name)
      .def_property_readonly("workspace_bytes", &DraftEngine::workspace_bytes)
      .def_property_readonly("prepared_bytes", &DraftEngine::prepared_bytes);
}

}  // namespace

namespace eaglex::bindings {

TensorView borrow(py::handle value, const std::string& field) {
  TensorView view;
  assign(view, value, field);
  return view;
}

std::string show(const TensorView& view) {
  return ::show(view);
}

}  // namespace eaglex::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ side of eaglex; use eaglex.engine.DraftEngine.";
  py::register_exception_translator([](std::exception_ptr pointer) {  // NOLINT(performance-unnecessary-value-param)
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const eaglex::Error& error) {
      translate(error);
    }
  });
  bind_configs(m);
  bind_tensors(m);
  bind_engine(m);
  eaglex::bindings::bind_bridge(m);
  m.attr("NEVER") = eaglex::Backend::kNever;
  m.attr("MAX_STEPS") = eaglex::kMaxSteps;
  m.attr("MAX_TOPK") = eaglex::kMaxTopk;
  m.attr("MAX_DRAFT_TOKENS") = eaglex::kMaxDraftTokens;
  m.attr("LANE_STATUS_COUNT") = eaglex::kNumLaneStatus;
#ifdef EAGLEX_WITH_CUDA
  static constexpr bool kCuda = true;
#else
  static constexpr bool kCuda = false;
#endif
#ifdef EAGLEX_WITH_CUTLASS
  static constexpr bool kCutlass = true;
#else
  static constexpr bool kCutlass = false;
#endif
  m.def(
      "build_info",
      [] {
        py::typing::Dict<py::str, py::object> info;
        info["cuda"] = py::bool_(kCuda);
        info["cutlass"] = py::bool_(kCutlass);
        info["compiler"] = py::str(__VERSION__);
        info["version"] = py::str(EAGLEX_VERSION);
        return info;
      },
      "What this extension was built with: cuda and cutlass (bool), compiler and eaglex's version (str).");
}
