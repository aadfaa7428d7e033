// The one place where device memory is carved. Planned twice by the same code: once without memory to count, once to
// hand out.
#pragma once

#include <cstddef>

namespace eaglex {

class Workspace {
 public:
  // Counts only: take() returns null.
  Workspace() = default;
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}

  // `count` elements, aligned for vector loads and bulk copies; uninitialised.
  template <typename T>
  T* take(std::size_t count) {
    return reinterpret_cast<T*>(take_bytes(count * sizeof(T)));
  }
  std::byte* take_bytes(std::size_t bytes) {
    std::byte* const block = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return block;
  }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace eaglex
