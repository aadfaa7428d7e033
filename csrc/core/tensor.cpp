#include "core/tensor.h"

#include <algorithm>

#include "core/error.h"

namespace eaglex {
namespace {

template <typename Sizes>
std::string join_sizes(const Sizes& sizes, std::size_t count) {
  std::ostringstream out;
  out << '[';
  std::size_t i = 0;
  for (const std::int64_t size : sizes) {
    if (i == count) break;
    if (i++ != 0) out << ", ";
    if (size == kAnySize) {
      out << '*';
    } else {
      out << size;
    }
  }
  out << ']';
  return out.str();
}

}  // namespace

std::int64_t TensorView::numel() const noexcept {
  std::int64_t count = 1;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rank); ++i) count *= shape[i];
  return count;
}

bool TensorView::contiguous() const noexcept {
  if (numel() == 0) return true;
  std::int64_t expected = 1;
  for (auto i = static_cast<std::size_t>(rank); i-- > 0;) {
    if (shape[i] != 1 && stride[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

void TensorView::expect(const char* field, Device where, std::initializer_list<DType> types,
                        std::initializer_list<std::int64_t> sizes) const {
  const bool present = static_cast<bool>(*this);
  const bool typed = std::find(types.begin(), types.end(), dtype) != types.end();
  bool sized = static_cast<std::size_t>(rank) == sizes.size();
  for (std::size_t i = 0; sized && i < sizes.size(); ++i) {
    const std::int64_t wanted = sizes.begin()[i];
    sized = wanted == kAnySize || wanted == shape[i];
  }
  if (present && typed && sized && device == where && contiguous()) return;
  std::string names;
  for (const DType type : types) names += concat(names.empty() ? "" : " or ", name_of(type));
  fail(ErrorCode::kShape, field, ": expected contiguous ", join_sizes(sizes, sizes.size()), ' ', names, " on ",
       name_of(where), ", got ", present ? describe(*this) : "nothing");
}

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
    case DType::kF8:
      return 1;
    case DType::kI4:
      return 0;
  }
  return 0;
}

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8/bool";
    case DType::kF8:
      return "float8_e4m3fn";
    case DType::kI4:
      return "int4";
  }
  return "?";
}

std::string name_of(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : concat("cuda:", device.index);
}

std::string describe(const TensorView& tensor) {
  std::string text = concat(join_sizes(tensor.shape, static_cast<std::size_t>(tensor.rank)), ' ', name_of(tensor.dtype),
                            " on ", name_of(tensor.device));
  if (!tensor.contiguous())
    text += concat(" with strides ", join_sizes(tensor.stride, static_cast<std::size_t>(tensor.rank)));
  return text;
}

}  // namespace eaglex
