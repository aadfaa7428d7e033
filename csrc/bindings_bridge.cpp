// The bridge for Python (eaglex/bridge.py): translation, no decisions. Tensors are borrowed; lists are copied.
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "bridge/bridge.h"
#include "cpu/factory.h"
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

// Rank 0's client with what its batches are checked against.
struct Client {
  DraftConfig config;
  SpeculationConfig speculation;
  EngineLimits limits;
  DrafterClient client;
};

void bind_terms(py::module_& m) {
  // clang-format off: reads as a table
#define EAGLEX_FIELD(Struct, name) .def_readwrite(#name, &Struct::name)
  py::class_<Terms>(m, "BridgeTerms").def(py::init<>())
      EAGLEX_FIELD(Terms, version) EAGLEX_FIELD(Terms, num_ranks) EAGLEX_FIELD(Terms, max_lanes)
      EAGLEX_FIELD(Terms, num_draft_tokens) EAGLEX_FIELD(Terms, num_steps) EAGLEX_FIELD(Terms, num_slots)
      EAGLEX_FIELD(Terms, vocab_size) EAGLEX_FIELD(Terms, aux_width) EAGLEX_FIELD(Terms, max_rows);
#undef EAGLEX_FIELD
#define EAGLEX_TENSOR(name)                                                              \
  .def_property(                                                                         \
      #name, [](const FollowerTensors& self) { return show(self.name); },                \
      [](FollowerTensors& self, py::handle value) { self.name = borrow(value, #name); })
  py::class_<FollowerTensors>(m, "FollowerTensors").def(py::init<>())
      EAGLEX_TENSOR(draft_tokens) EAGLEX_TENSOR(parents) EAGLEX_TENSOR(num_nodes) EAGLEX_TENSOR(drafted_for)
      .def("check", [](const FollowerTensors& self, const SpeculationConfig& speculation, const EngineLimits& limits) {
        self.check(speculation, limits, Device{});
      }, py::arg("speculation"), py::arg("limits"));
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
          "shm", [](Group& group, double deadline) { return make_shm_bridge(group, seconds(deadline)); },
          py::arg("group"), py::kw_only(), py::arg("deadline"), py::keep_alive<0, 1>())
      .def_property_readonly("transport", &Bridge::transport)
      .def(
          "push",
          [](Bridge& self, const FollowerTensors& results, const Ids& slots, const Ids& new_lens, bool draft) {
            self.push(lanes_of(slots, new_lens), results.results(), draft ? Verdict::kDraft : Verdict::kNoDraft,
                      nullptr);
          },
          py::arg("results"), py::kw_only(), py::arg("slots"), py::arg("new_lens"), py::arg("draft"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "receive",
          [](Bridge& self, const FollowerTensors& results, const Ids& slots, const Ids& new_lens) {
            return self.receive(lanes_of(slots, new_lens), results.results(), nullptr) == Verdict::kDraft;
          },
          py::arg("results"), py::kw_only(), py::arg("slots"), py::arg("new_lens"),
          py::call_guard<py::gil_scoped_release>())
      .def("counters", [](const Bridge& self) {
        const Counters found = self.counters();
        return std::map<std::string, std::int64_t>{
            {"pushed", found.pushed}, {"received", found.received}, {"drafts", found.drafts}};
      });
  py::class_<DraftFollower>(m, "DraftFollower")
      .def(py::init([](const SpeculationConfig& speculation, const EngineLimits& limits, int vocab_size,
                       const FollowerTensors& tensors) {
             return std::make_unique<DraftFollower>(make_cpu_backend(), speculation, limits, vocab_size, tensors);
           }),
           py::kw_only(), py::arg("speculation"), py::arg("limits"), py::arg("vocab_size"), py::arg("tensors"))
      .def(
          "tree", [](DraftFollower& self, const VerifyTensors& batch) { self.tree(batch, nullptr); }, py::arg("batch"),
          py::call_guard<py::gil_scoped_release>());
}

void bind_drafter(py::module_& m) {
  py::class_<Client>(m, "DrafterClient")
      .def(py::init([](Group& group, const DraftConfig& config, const SpeculationConfig& speculation,
                       const EngineLimits& limits, double deadline, double rejoin_after) {
             return std::unique_ptr<Client>(new Client{
                 config, speculation, limits, DrafterClient(group, {seconds(deadline), seconds(rejoin_after)})});
           }),
           py::arg("group"), py::kw_only(), py::arg("config"), py::arg("speculation"), py::arg("limits"),
           py::arg("deadline"), py::arg("rejoin_after"), py::keep_alive<1, 2>())
      .def(
          "draft",
          [](Client& self, const BatchTensors& batch, const FollowerTensors& results) {
            const DraftBatch block = batch.check(self.config, self.speculation, self.limits, Device{});
            return self.client.draft(block, results.results()) == Verdict::kDraft;
          },
          py::arg("batch"), py::arg("results"), py::call_guard<py::gil_scoped_release>())
      .def("take_warning", [](Client& self) { return self.client.link().take_warning(); })
      .def("counters", [](Client& self) {
        std::map<std::string, std::int64_t> found = {{"returns", self.client.link().returns()}};
        for (int i = 0; i < kNumFaults; ++i) {
          found[name_of(static_cast<Fault>(i))] = self.client.link().faults()[static_cast<std::size_t>(i)];
        }
        return found;
      });
  py::class_<DrafterServer>(m, "DrafterServer")
      .def(py::init<Group&>(), py::arg("group"), py::keep_alive<1, 2>())
      .def(
          "next",
          [](DrafterServer& self, double wait) -> std::optional<BatchTensors> {
            const std::optional<RowsView> rows = self.next(seconds(wait));
            if (!rows) return std::nullopt;
            BatchTensors batch;
            batch.aux_hidden_states = rows->aux_hidden_states;
            batch.input_ids = rows->input_ids;
            batch.row_start = rows->row_start;
            batch.num_valid = rows->num_valid;
            batch.draft_from = rows->draft_from;
            batch.req_pool_indices = rows->req_pool_indices;
            batch.seq_lens = rows->seq_lens;
            return batch;
          },
          py::arg("wait"), py::call_guard<py::gil_scoped_release>())
      .def(
          "reply",
          [](DrafterServer& self, const FollowerTensors& results, bool draft) {
            self.reply(results.results(), draft ? Verdict::kDraft : Verdict::kNoDraft);
          },
          py::arg("results"), py::kw_only(), py::arg("draft"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_bridge(py::module_& m) {
  bind_terms(m);
  bind_ranks(m);
  bind_drafter(m);
}

}  // namespace eaglex::bindings
