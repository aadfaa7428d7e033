#include "bridge/terms.h"

#include "core/config.h"

namespace eaglex::bridge {
namespace {

struct Field {
  const char* name;
  std::int32_t Terms::* value;
};

constexpr Field kFields[] = {{"protocol version", &Terms::version}, {"num_ranks", &Terms::num_ranks},
                             {"max_lanes", &Terms::max_lanes},      {"num_draft_tokens", &Terms::num_draft_tokens},
                             {"num_steps", &Terms::num_steps},      {"num_slots", &Terms::num_slots},
                             {"vocab_size", &Terms::vocab_size},    {"aux_width", &Terms::aux_width},
                             {"max_rows", &Terms::max_rows},        {"num_kv_slots", &Terms::num_kv_slots},
                             {"table_width", &Terms::table_width}};

}  // namespace

void Terms::check() const {
  expect_range("num_ranks", num_ranks, 1, kMaxRanks);
  expect_range("max_lanes", max_lanes, 1, 1 << 16);
  expect_range("num_draft_tokens", num_draft_tokens, 1, kMaxDraftTokens);
  expect_range("num_steps", num_steps, 0, kMaxSteps);
  expect_range("num_slots", num_slots, 2, 1 << 24);
  expect_range("vocab_size", vocab_size, 1, 1 << 30);
  expect_range("aux_width", aux_width, 0, 1 << 20);
  expect_range("max_rows", max_rows, 0, 1 << 20);
  expect_range("num_kv_slots", num_kv_slots, 0, dedicated() ? 1 << 30 : 0);
  expect_range("table_width", table_width, pooled() ? 1 : 0, pooled() ? 1 << 24 : 0);
  expect_range("max_lanes * table_width", static_cast<long long>(max_lanes) * table_width, 0, INT32_MAX);
}

std::string difference(const Terms& group, const Terms& member) {
  for (const Field& field : kFields) {
    if (group.*field.value != member.*field.value) {
      return concat(field.name, ": expected ", group.*field.value, " as in the group, got ", member.*field.value);
    }
  }
  return {};
}

}  // namespace eaglex::bridge
