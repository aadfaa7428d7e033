// Memory that the processes of one group on one host share. It has no name in any file system, so nothing is left
// behind however they end; it is reached through the creator's descriptor, as long as the creator lives.
#pragma once

#include <cstddef>
#include <string>

namespace eaglex::bridge {

class Segment {
 public:
  // Zeroed memory. `label` shows in /proc/<pid>/maps.
  static Segment create(std::size_t bytes, const std::string& label);
  // By the creator's address(). Throws ErrorCode::kBridge where it cannot be reached.
  static Segment open(const std::string& address);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  Segment(const Segment&) = delete;
  ~Segment();

  [[nodiscard]] std::string address() const;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  // Takes the place of a member until this object or its process ends, however that happens: the kernel holds a lock on
  // one byte for it, which a process that it forked without exec holds too. False where another living process, or
  // another Segment of this one, has it.
  [[nodiscard]] bool claim(int member);
  // Whether anyone has that place. A process that is stopped still has it.
  [[nodiscard]] bool taken(int member) const;

 private:
  Segment(int descriptor, std::size_t bytes);

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int own_ = -1;
};

}  // namespace eaglex::bridge
