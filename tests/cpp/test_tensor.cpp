#include <doctest/doctest.h>

#include "core/error.h"
#include "core/tensor.h"
#include "core/workspace.h"

using namespace eaglex;

namespace {

TensorView matrix(void* data, DType dtype, std::int64_t rows, std::int64_t columns) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = 2;
  view.shape = {rows, columns};
  view.stride = {columns, 1};
  return view;
}

}  // namespace

TEST_CASE("a tensor that fits its field passes, any size included") {
  float data[6] = {};
  const TensorView view = matrix(data, DType::kF32, 2, 3);
  CHECK_NOTHROW(view.expect("scores", {}, {DType::kF32}, {2, 3}));
  CHECK_NOTHROW(view.expect("scores", {}, {DType::kF16, DType::kF32}, {kAnySize, 3}));
  CHECK(view.numel() == 6);
}

TEST_CASE("a tensor that does not fit names field, expected and actual") {
  float data[6] = {};
  const TensorView view = matrix(data, DType::kF32, 2, 3);
  const auto message = [&](Device where, std::initializer_list<DType> types,
                           std::initializer_list<std::int64_t> sizes) {
    try {
      view.expect("scores", where, types, sizes);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kShape);
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message({}, {DType::kF32}, {2, 4}) ==
        "scores: expected contiguous [2, 4] float32 on cpu, got [2, 3] float32 on cpu");
  CHECK(message({}, {DType::kI32, DType::kI64}, {2, 3}) ==
        "scores: expected contiguous [2, 3] int32 or int64 on cpu, got [2, 3] float32 on cpu");
  CHECK(message({DeviceKind::kCuda, 1}, {DType::kF32}, {kAnySize, 3}) ==
        "scores: expected contiguous [*, 3] float32 on cuda:1, got [2, 3] float32 on cpu");
  CHECK(message({}, {DType::kF32}, {2}) == "scores: expected contiguous [2] float32 on cpu, got [2, 3] float32 on cpu");
}

TEST_CASE("strides count only where a dimension has more than one element") {
  float data[6] = {};
  TensorView view = matrix(data, DType::kF32, 1, 3);
  view.stride = {100, 1};
  CHECK(view.contiguous());
  view.shape = {2, 3};
  CHECK_FALSE(view.contiguous());
  CHECK_THROWS_AS(view.expect("x", {}, {DType::kF32}, {2, 3}), Error);
}

TEST_CASE("an empty view is named as nothing") {
  try {
    TensorView().expect("d2t", {}, {DType::kI64}, {4});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(std::string(error.what()) == "d2t: expected contiguous [4] int64 on cpu, got nothing");
  }
}

TEST_CASE("counting and handing out carve the same, aligned blocks") {
  const auto carve = [](Workspace& workspace) {
    const auto* const a = workspace.take<float>(3);
    const auto* const b = workspace.take<std::int64_t>(1);
    return std::pair{reinterpret_cast<std::uintptr_t>(a), reinterpret_cast<std::uintptr_t>(b)};
  };
  Workspace count;
  CHECK(carve(count) == std::pair<std::uintptr_t, std::uintptr_t>{0, 0});
  CHECK(count.used() == 512);
  alignas(256) std::byte memory[512];
  Workspace workspace(memory);
  const auto [a, b] = carve(workspace);
  CHECK(a == reinterpret_cast<std::uintptr_t>(memory));
  CHECK(b - a == 256);
}
