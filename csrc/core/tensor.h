// A tensor that somebody else owns, as it crosses the boundary: pointer, type, device, shape, strides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace eaglex {

enum class DType : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kI32,
  kI64,
  kU8,
  kF8,  // e4m3: 4 bits of exponent, 3 of mantissa, no infinity
  kI4,  // -8..7, two per byte, each stored plus 8, the one with the even last index in the low half; rows of even length
};

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

// A stream of the backend's device: cudaStream_t for CUDA, nothing for the CPU. Only backends look inside.
using Stream = void*;

inline constexpr int kMaxRank = 4;
inline constexpr std::int64_t kAnySize = -1;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};  // in elements

  // Whether there is a tensor; an empty one has no memory to point to.
  [[nodiscard]] explicit operator bool() const noexcept { return data != nullptr || (rank > 0 && numel() == 0); }
  [[nodiscard]] std::int64_t numel() const noexcept;
  [[nodiscard]] bool contiguous() const noexcept;

  // Throws ErrorCode::kShape, naming `field`, unless the tensor lies on `where`, has one of `types` and exactly `sizes`
  // (kAnySize matches any) and is contiguous.
  void expect(const char* field, Device where, std::initializer_list<DType> types,
              std::initializer_list<std::int64_t> sizes) const;

  template <typename T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

// Bytes of an element; 0 for kI4, which has half a byte.
[[nodiscard]] std::size_t size_of(DType dtype) noexcept;
[[nodiscard]] const char* name_of(DType dtype) noexcept;
[[nodiscard]] std::string name_of(Device device);
[[nodiscard]] std::string describe(const TensorView& tensor);

}  // namespace eaglex
