// The bridge for Python (eaglex/bridge.py): translation, no decisions. Tensors are borrowed; lists are copied.
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "bridge/lanes.h"
#include "bridge/nccl_library.h"
#include "bridge/relay_ends.h"
#include "bridge/transport.h"
#include "cpu/factory.h"
#ifdef EAGLEX_WITH_CUDA
#include "cuda/factory.h"
#endif
#include "draft/engine.h"
#include "draft/follower.h"

namespace py = pybind11;

namespace eaglex::bindings {
namespace {

using namespace eaglex::bridge;  // NOLINT(google-build-using-namespace): the names below are all of it
using Ids = std::vector<std::int64_t>;

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

LaneList lanes_of(const Ids& slots, const Ids& new_lens) {
  expect(slots.size() == new_lens.size(), ErrorCode::kShape, "new_lens", concat(slots.size(), " lengths"),
         new_lens.size());
  return {static_cast<std::int32_t>(slots.size()), slots.data(), new_lens.data()};
}

Device device_of(const std::string& kind, int index) {
  return {kind == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu, kind == "cuda" ? index : 0};
}

// `tree` alone, where the results are.
std::unique_ptr<Backend> follower_backend(Device device) {
#ifdef EAGLEX_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) return make_cuda_follower(device.index);
#endif
  expect(device.kind == DeviceKind::kCpu, ErrorCode::kDevice, "follower", "the CPU (this build has no CUDA)",
         name_of(device));
  return make_cpu_backend();
}

Verdict verdict_of(bool draft) {
  return draft ? Verdict::kDraft : Verdict::kNoDraft;
}

std::optional<bool> drafted(std::optional<Verdict> verdict) {
  return verdict ? std::optional(*verdict == Verdict::kDraft) : std::nullopt;
}

// The rows as the engine takes them, in memory of `device`.
BatchTensors batch_of(const RowsView& rows, Device device) {
  BatchTensors batch;
  batch.aux_hidden_states = rows.aux_hidden_states;
  batch.input_ids = rows.input_ids;
  batch.row_start = rows.row_start;
  batch.num_valid = rows.num_valid;
  batch.draft_from = rows.draft_from;
  batch.req_pool_indices = rows.req_pool_indices;
  batch.seq_lens = rows.seq_lens;
  batch.out_cache_loc = rows.out_cache_loc;
  for (TensorView* const view : {&batch.aux_hidden_states, &batch.input_ids, &batch.row_start, &batch.num_valid,
                                 &batch.draft_from, &batch.req_pool_indices, &batch.seq_lens, &batch.out_cache_loc})
    view->device = device;
  return batch;
}

std::map<std::string, std::int64_t> counters_of(const DrafterLink& link) {
  std::map<std::string, std::int64_t> found = {{"returns", link.returns()}};
  for (int i = 0; i < kNumFaults; ++i)
    found[name_of(static_cast<Fault>(i))] = link.faults()[static_cast<std::size_t>(i)];
  return found;
}

enum class Where : std::uint8_t { kHost, kDevice };

// A table of req_to_token as pooled terms have it, in host memory or where a relay's end has it.
TensorView borrowed_table(py::handle table, const Terms& terms, Where where = Where::kHost) {
  TensorView found = borrow(table, "req_to_token");
  found.expect("req_to_token", where == Where::kHost ? Device{} : found.device, {DType::kI32},
               {terms.num_slots, terms.table_width});
  return found;
}

std::int32_t* table_of(const py::object& table, const Terms& terms, Where where = Where::kHost) {
  return table.is_none() ? nullptr : borrowed_table(table, terms, where).as<std::int32_t>();
}

// Rank 0's client with what its batches are checked against.
template <class Link>
struct Checked {
  DraftConfig config;
  SpeculationConfig speculation;
  EngineLimits limits;
  std::unique_ptr<Link> client;

  [[nodiscard]] DraftBatch check(const BatchTensors& batch, Device device) const {
    return batch.check(config, speculation, limits, device);
  }
};
using Client = Checked<DrafterClient>;
using Relay = Checked<RelayClient>;

// What every client is asked besides drafts.
template <class Link>
void bind_link(py::class_<Checked<Link>>& bound) {
  bound.def("take_warning", [](Checked<Link>& self) { return self.client->link().take_warning(); })
      .def("counters", [](Checked<Link>& self) { return counters_of(self.client->link()); });
}

void bind_terms(py::module_& m) {
  // clang-format off: reads as a table
#define EAGLEX_FIELD(Struct, name) .def_readwrite(#name, &Struct::name)
  py::class_<Terms>(m, "BridgeTerms").def(py::init<>())
      EAGLEX_FIELD(Terms, version) EAGLEX_FIELD(Terms, num_ranks) EAGLEX_FIELD(Terms, max_lanes)
      EAGLEX_FIELD(Terms, num_draft_tokens) EAGLEX_FIELD(Terms, num_steps) EAGLEX_FIELD(Terms, num_slots)
      EAGLEX_FIELD(Terms, vocab_size) EAGLEX_FIELD(Terms, aux_width) EAGLEX_FIELD(Terms, max_rows)
      EAGLEX_FIELD(Terms, num_kv_slots) EAGLEX_FIELD(Terms, table_width);
#undef EAGLEX_FIELD
#define EAGLEX_TENSOR(name)                                                              \
  .def_property(                                                                         \
      #name, [](const FollowerTensors& self) { return show(self.name); },                \
      [](FollowerTensors& self, py::handle value) { self.name = borrow(value, #name); })
  py::class_<FollowerTensors>(m, "FollowerTensors").def(py::init<>())
      EAGLEX_TENSOR(draft_tokens) EAGLEX_TENSOR(parents) EAGLEX_TENSOR(num_nodes) EAGLEX_TENSOR(drafted_for)
      .def("check", [](const FollowerTensors& self, const SpeculationConfig& speculation, const EngineLimits& limits,
                       const std::string& device, int index) {
        self.check(speculation, limits, device_of(device, index));
      }, py::arg("speculation"), py::arg("limits"), py::arg("device"), py::arg("index"));
#undef EAGLEX_TENSOR
#define EAGLEX_TENSOR(name)                                                              \
  .def_property(                                                                         \
      #name, [](const LaneTensors& self) { return show(self.name); },                    \
      [](LaneTensors& self, py::handle value) { self.name = borrow(value, #name); })
  py::class_<LaneTensors>(m, "LaneTensors").def(py::init<>())
      EAGLEX_TENSOR(slots) EAGLEX_TENSOR(lens) EAGLEX_TENSOR(num_valid)
      .def("move", [](LaneTensors& self, py::handle slots, py::handle lens, py::handle num_valid) {
        return move({{&self.slots, slots}, {&self.lens, lens}, {&self.num_valid, num_valid}});
      }, kMove);
#undef EAGLEX_TENSOR
  // clang-format on
}

void bind_ranks(py::module_& m) {
  py::enum_<Suspect::Kind>(m, "SuspectKind")
      .value("GONE", Suspect::Kind::kGone)
      .value("STOPPED", Suspect::Kind::kStopped)
      .value("BEHIND", Suspect::Kind::kBehind);
  py::class_<Suspect>(m, "Suspect")
      .def_readonly("rank", &Suspect::rank)
      .def_readonly("kind", &Suspect::kind)
      .def_readonly("why", &Suspect::why);
  py::class_<Group>(m, "BridgeGroup")
      .def_static("create", &Group::create, py::arg("terms"), py::arg("id"))
      .def_static("join", &Group::join, py::arg("address"), py::arg("terms"), py::arg("id"), py::arg("rank"))
      .def_property_readonly("address", &Group::address)
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("generation", &Group::generation)
      .def("enter", &Group::enter)
      .def("check", &Group::check)
      .def(
          "end", [](Group& self, int culprit, const std::string& why) { self.end(culprit, why); }, py::arg("culprit"),
          py::arg("why"))
      .def("suspects", &Group::suspects)
      .def("gone", &Group::gone, py::arg("rank"));
  py::class_<Bridge>(m, "Bridge")
      .def_static(
          "open",
          [](Group& group, const std::string& transport, int device, double deadline) {
            return make_bridge(group, {transport_of(transport), device, seconds(deadline)});
          },
          py::arg("group"), py::kw_only(), py::arg("transport"), py::arg("device"), py::arg("deadline"),
          py::keep_alive<0, 1>())
      .def_property_readonly("transport", &Bridge::transport)
      .def("offer", &Bridge::offer)
      .def("connect", &Bridge::connect, py::arg("offers"), py::call_guard<py::gil_scoped_release>())
      .def("check", &Bridge::check)
      .def(
          "set_deadline", [](Bridge& self, double deadline) { self.set_deadline(seconds(deadline)); },
          py::arg("deadline"))
      .def(
          "push",
          [](Bridge& self, const FollowerTensors& results, const Ids& slots, const Ids& new_lens, bool draft) {
            self.push(lanes_of(slots, new_lens), results.results(), verdict_of(draft), nullptr);
          },
          py::arg("results"), py::kw_only(), py::arg("slots"), py::arg("new_lens"), py::arg("draft"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "receive",
          [](Bridge& self, const FollowerTensors& results, const Ids& slots, const Ids& new_lens) {
            return drafted(self.receive(lanes_of(slots, new_lens), results.results(), nullptr));
          },
          py::arg("results"), py::kw_only(), py::arg("slots"), py::arg("new_lens"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "enqueue_push",
          [](Bridge& self, const FollowerTensors& results, const LaneTensors& lanes, bool draft,
             std::uintptr_t stream) {
            self.push(lanes.check(results.num_nodes.device), results.results(), verdict_of(draft), as_stream(stream));
          },
          py::arg("results"), py::arg("lanes"), py::kw_only(), py::arg("draft"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "enqueue_receive",
          [](Bridge& self, const FollowerTensors& results, const LaneTensors& lanes, std::uintptr_t stream) {
            self.receive(lanes.check(results.num_nodes.device), results.results(), as_stream(stream));
          },
          py::arg("results"), py::arg("lanes"), py::kw_only(), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "push_from",
          [](Bridge& self, DraftEngine& engine, const FollowerTensors& results) {
            engine.end_with([&self, found = results.results()](const CycleEnd& end) {
              LaneList lanes;
              lanes.count = end.lanes;
              lanes.block = end.batch;
              self.push(lanes, found, Verdict::kDraft, end.stream);
            });
          },
          py::arg("engine"), py::arg("results"), py::keep_alive<2, 1>())
      .def("counters", [](const Bridge& self) {
        const Counters found = self.counters();
        return std::map<std::string, std::int64_t>{
            {"pushed", found.pushed}, {"received", found.received}, {"drafts", found.drafts}};
      });
  py::class_<DraftFollower>(m, "DraftFollower")
      .def(py::init([](const SpeculationConfig& speculation, const EngineLimits& limits, int vocab_size,
                       const FollowerTensors& tensors) {
             return std::make_unique<DraftFollower>(follower_backend(tensors.num_nodes.device), speculation, limits,
                                                    vocab_size, tensors);
           }),
           py::kw_only(), py::arg("speculation"), py::arg("limits"), py::arg("vocab_size"), py::arg("tensors"))
      .def(
          "tree",
          [](DraftFollower& self, const VerifyTensors& batch, std::uintptr_t stream) {
            self.tree(batch, as_stream(stream));
          },
          py::arg("batch"), py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("repeated_tree", repeated_tree<DraftFollower>, py::arg("batch"), kRepeated)
      .def(
          "mark", [](DraftFollower& self, std::uintptr_t stream) { return self.mark(as_stream(stream)); },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("reached", &DraftFollower::reached);
}

void bind_drafter(py::module_& m) {
  py::class_<Client> client(m, "DrafterClient");
  client
      .def(py::init([](Group& group, const DraftConfig& config, const SpeculationConfig& speculation,
                       const EngineLimits& limits, double deadline, double rejoin_after, const py::object& table) {
             return Client{config, speculation, limits,
                           std::make_unique<DrafterClient>(group, LinkTiming{seconds(deadline), seconds(rejoin_after)},
                                                           table_of(table, group.terms()))};
           }),
           py::arg("group"), py::kw_only(), py::arg("config"), py::arg("speculation"), py::arg("limits"),
           py::arg("deadline"), py::arg("rejoin_after"), py::arg("req_to_token") = py::none(), py::keep_alive<1, 2>())
      .def(
          "draft",
          [](Client& self, const BatchTensors& batch, const FollowerTensors& results,
             const std::vector<std::uint8_t>& begins, const std::vector<std::int32_t>& table_lens) {
            const PooledLanes pooled = {begins, table_lens};
            return self.client->draft(self.check(batch, {}), results.results(), pooled) == Verdict::kDraft;
          },
          py::arg("batch"), py::arg("results"), py::kw_only(), py::arg("begins") = std::vector<std::uint8_t>{},
          py::arg("table_lens") = std::vector<std::int32_t>{}, py::call_guard<py::gil_scoped_release>());
  bind_link(client);
  py::class_<DrafterServer>(m, "DrafterServer")
      .def(py::init<Group&>(), py::arg("group"), py::keep_alive<1, 2>())
      .def(
          "next",
          [](DrafterServer& self, double wait) -> std::optional<BatchTensors> {
            const std::optional<RowsView> rows = self.next(seconds(wait));
            return rows ? std::optional(batch_of(*rows, {})) : std::nullopt;
          },
          py::arg("wait"), py::call_guard<py::gil_scoped_release>())
      .def(
          "next_memory",
          [](DrafterServer& self, double wait) {
            std::optional<RowsView> rows;
            {
              const py::gil_scoped_release released;
              rows = self.next(seconds(wait));
            }
            std::map<std::string, std::tuple<std::uintptr_t, std::string, std::vector<std::int64_t>>> found;
            const auto put = [&](const char* name, const TensorView& view) {
              found[name] = {reinterpret_cast<std::uintptr_t>(view.data),
                             name_of(view.dtype),
                             {view.shape.begin(), view.shape.begin() + view.rank}};
            };
            if (!rows) return found;
            put("aux_hidden_states", rows->aux_hidden_states);
            put("input_ids", rows->input_ids);
            put("row_start", rows->row_start);
            put("num_valid", rows->num_valid);
            put("draft_from", rows->draft_from);
            put("req_pool_indices", rows->req_pool_indices);
            put("seq_lens", rows->seq_lens);
            if (rows->out_cache_loc) {
              put("out_cache_loc", rows->out_cache_loc);
              put("table_lens", rows->table_lens);
              put("table", rows->table);
            }
            return found;
          },
          py::arg("wait"),
          "As next, for an engine on another device: by name address, type and shape, in shared memory.")
      .def_property_readonly("anew", &DrafterServer::anew)
      .def(
          "write_table",
          [](const DrafterServer& self, py::handle table) {
            self.write_table(borrowed_table(table, self.terms()).as<std::int32_t>());
          },
          py::arg("table"))
      .def(
          "reply",
          [](DrafterServer& self, const FollowerTensors& results, bool draft) {
            self.reply(results.results(), draft ? Verdict::kDraft : Verdict::kNoDraft);
          },
          py::arg("results"), py::kw_only(), py::arg("draft"), py::call_guard<py::gil_scoped_release>());
}

void bind_relay(py::module_& m) {
  py::class_<Relay> client(m, "RelayClient");
  client
      .def(py::init([](Group& group, const DraftConfig& config, const SpeculationConfig& speculation,
                       const EngineLimits& limits, double deadline, double rejoin_after, double rows_deadline,
                       int device, const py::object& table) {
             const RelayHost host = {device, table_of(table, group.terms(), Where::kDevice)};
             const LinkTiming timing = {seconds(deadline), seconds(rejoin_after), seconds(rows_deadline)};
             return Relay{config, speculation, limits, make_relay_client(group, timing, host)};
           }),
           py::arg("group"), py::kw_only(), py::arg("config"), py::arg("speculation"), py::arg("limits"),
           py::arg("deadline"), py::arg("rejoin_after"), py::arg("rows_deadline"), py::arg("device"),
           py::arg("req_to_token") = py::none(), py::keep_alive<1, 2>())
      .def("joined", [](Relay& self) { return self.client->joined(); })
      .def("offer", [](const Relay& self) { return self.client->offer(); })
      .def(
          "draft",
          [](Relay& self, const BatchTensors& batch, const FollowerTensors& results, const Ids& slots,
             const Ids& seq_lens, const Ids& new_lens, const std::vector<std::uint8_t>& begins,
             const std::vector<std::uint8_t>& rewritten, std::uintptr_t stream) {
            const DraftBatch block = self.check(batch, results.num_nodes.device);
            const KnownLanes lanes = {slots, seq_lens, new_lens, begins, rewritten};
            return self.client->draft(block, lanes, results.results(), as_stream(stream)) == Verdict::kDraft;
          },
          py::arg("batch"), py::arg("results"), py::kw_only(), py::arg("slots"), py::arg("seq_lens"),
          py::arg("new_lens"), py::arg("begins") = std::vector<std::uint8_t>{},
          py::arg("rewritten") = std::vector<std::uint8_t>{}, py::arg("stream"),
          py::call_guard<py::gil_scoped_release>());
  client.def(
      "try_out",
      [](Relay& self, const BatchTensors& batch, const FollowerTensors& results, double patience,
         std::uintptr_t stream) {
        const DraftBatch block = self.check(batch, results.num_nodes.device);
        return self.client->try_out(block, results.results(), seconds(patience), as_stream(stream));
      },
      py::arg("batch"), py::arg("results"), py::kw_only(), py::arg("patience"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
  bind_link(client);
  py::class_<RelayServer>(m, "RelayServer")
      .def(py::init([](Group& group, int device, const std::string& offer, const py::object& table) {
             return make_relay_server(group, {device, table_of(table, group.terms(), Where::kDevice)}, offer);
           }),
           py::arg("group"), py::kw_only(), py::arg("device"), py::arg("offer"), py::arg("req_to_token") = py::none(),
           py::keep_alive<1, 2>())
      .def_property_readonly("anew", &RelayServer::anew)
      .def(
          "next",
          [](RelayServer& self, double wait, const FollowerTensors& results,
             std::uintptr_t stream) -> std::optional<BatchTensors> {
            const std::optional<RowsView> rows = self.next(seconds(wait), as_stream(stream));
            return rows ? std::optional(batch_of(*rows, results.num_nodes.device)) : std::nullopt;
          },
          py::arg("wait"), py::kw_only(), py::arg("results"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "reply",
          [](RelayServer& self, const FollowerTensors& results, bool draft, std::uintptr_t stream) {
            self.reply(results.results(), verdict_of(draft), as_stream(stream));
          },
          py::arg("results"), py::kw_only(), py::arg("draft"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "done", [](RelayServer& self, bool draft) { self.done(verdict_of(draft)); }, py::kw_only(), py::arg("draft"),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_bridge(py::module_& m) {
  bind_terms(m);
  bind_ranks(m);
  bind_drafter(m);
  bind_relay(m);
  m.def(
      "nccl_library",
      [](const std::string& name) {
        const NcclLibrary library = NcclLibrary::open(name);
        return std::pair(library.version, library.path);
      },
      py::arg("name") = "libnccl.so.2", "Version and file of the NCCL that the bridge would use; raises BridgeError.");
}

}  // namespace eaglex::bindings
