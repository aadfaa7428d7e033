#include "bridge/ring.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace eaglex::bridge {
namespace {

using Counter = std::atomic<std::uint64_t>;
using Bell = std::atomic<std::uint32_t>;
static_assert(Counter::is_always_lock_free && Bell::is_always_lock_free, "shared between processes");

constexpr auto kSlice = std::chrono::milliseconds(20);

// linux/futex.h, without the private flag: the waiters are other processes.
constexpr int kFutexWait = 0;
constexpr int kFutexWake = 1;

void sleep_until_rung(Bell& bell, std::uint32_t seen, Clock::duration most) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(most).count();
  const timespec limit = {ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&bell), kFutexWait, seen, &limit, nullptr, 0);
}

std::size_t padded(std::size_t bytes) {
  return (bytes + Ring::kAlign - 1) / Ring::kAlign * Ring::kAlign;
}

}  // namespace

struct alignas(Ring::kAlign) Ring::Header {
  Counter published;
  Bell bell;
  Counter released[kMaxRanks];
};

struct alignas(Ring::kAlign) Ring::Slot {
  std::uint64_t size;
};

std::size_t Ring::bytes(const Shape& shape) {
  return sizeof(Header) + kDepth * (sizeof(Slot) + padded(shape.capacity));
}

Ring::Ring(std::byte* memory, const Shape& shape) : memory_(memory), shape_(shape) {}

Ring::Header& Ring::header() const {
  return *reinterpret_cast<Header*>(memory_);
}

Ring::Slot& Ring::slot(std::uint64_t sequence) const {
  const std::size_t stride = sizeof(Slot) + padded(shape_.capacity);
  return *reinterpret_cast<Slot*>(memory_ + sizeof(Header) + sequence % kDepth * stride);
}

bool Ring::wait(const std::function<bool()>& done, Time deadline, const Watch& watch) const {
  for (;;) {
    Bell& bell = header().bell;
    const std::uint32_t seen = bell.load(std::memory_order_acquire);
    if (done()) return true;
    if (watch) watch();
    const Time now = Clock::now();
    // What came while this process was not running came in time.
    if (now >= deadline) return done();
    // The slice also bounds what a writer costs that dies between publishing and ringing.
    sleep_until_rung(bell, seen, std::min<Clock::duration>(kSlice, deadline - now));
  }
}

void Ring::ring() const {
  Bell& bell = header().bell;
  bell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&bell), kFutexWake, INT32_MAX, nullptr, nullptr, 0);
}

std::span<std::byte> Ring::reserve(Time deadline, const Watch& watch) const {
  const std::uint64_t next = published();
  const auto free = [&] {
    for (int reader = 0; reader < shape_.num_readers; ++reader) {
      if (next - released(reader) >= kDepth) return false;
    }
    return true;
  };
  if (!wait(free, deadline, watch)) return {};
  return {reinterpret_cast<std::byte*>(&slot(next)) + sizeof(Slot), shape_.capacity};
}

void Ring::publish(std::size_t bytes) const {
  const std::uint64_t next = published();
  slot(next).size = std::min(bytes, shape_.capacity);
  header().published.store(next + 1, std::memory_order_release);
  ring();
}

std::span<const std::byte> Ring::next(int reader, Time deadline, const Watch& watch) const {
  const std::uint64_t wanted = released(reader);
  if (!wait([&] { return published() > wanted; }, deadline, watch)) return {};
  Slot& found = slot(wanted);
  return {reinterpret_cast<const std::byte*>(&found) + sizeof(Slot),
          static_cast<std::size_t>(std::min<std::uint64_t>(found.size, shape_.capacity))};
}

void Ring::release(int reader) const {
  header().released[reader].fetch_add(1, std::memory_order_release);
  ring();
}

void Ring::skip(int reader) const {
  header().released[reader].store(published(), std::memory_order_release);
  ring();
}

std::uint64_t Ring::published() const {
  return header().published.load(std::memory_order_acquire);
}

std::uint64_t Ring::released(int reader) const {
  return header().released[reader].load(std::memory_order_acquire);
}

}  // namespace eaglex::bridge
