// Messages from one writer to several readers in order, in shared memory. Nothing is overwritten before every reader has
// let go of it, so no reader sees half a message; a writer that dies within one has not published it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bridge/terms.h"

namespace eaglex::bridge {

// Called about every 20 ms of a wait; throws where waiting on makes no sense.
using Watch = std::function<void()>;

class Ring {
 public:
  static constexpr std::size_t kAlign = 64;
  static constexpr std::uint64_t kDepth = 4;

  struct Shape {
    int num_readers = 0;
    std::size_t capacity = 0;  // bytes of the longest message
  };
  [[nodiscard]] static std::size_t bytes(const Shape& shape);

  Ring() = default;
  // Over zeroed memory, aligned to kAlign, that outlives the ring.
  Ring(std::byte* memory, const Shape& shape);

  // The space for the next message, once all readers have let go of what lies there; empty if they have not by the
  // deadline.
  [[nodiscard]] std::span<std::byte> reserve(Time deadline, const Watch& watch) const;
  // Publishes the first `bytes` bytes of it.
  void publish(std::size_t bytes) const;

  // The oldest message that this reader has not released; empty if there is none by the deadline.
  [[nodiscard]] std::span<const std::byte> next(int reader, Time deadline, const Watch& watch) const;
  void release(int reader) const;
  // Releases all that was published: a reader that begins in the middle.
  void skip(int reader) const;

  [[nodiscard]] std::uint64_t published() const;
  [[nodiscard]] std::uint64_t released(int reader) const;

 private:
  struct Header;
  struct Slot;
  [[nodiscard]] Header& header() const;
  [[nodiscard]] Slot& slot(std::uint64_t sequence) const;
  [[nodiscard]] bool wait(const std::function<bool()>& done, Time deadline, const Watch& watch) const;
  void ring() const;

  std::byte* memory_ = nullptr;
  Shape shape_;
};

}  // namespace eaglex::bridge
