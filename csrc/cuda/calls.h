// Which calls have run on the device: an event behind each, so that the host knows how long their inputs are read.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <vector>

namespace eaglex::cuda {

// Numbers and meaning are those of Backend::mark and Backend::reached.
class Calls {
 public:
  Calls() = default;
  ~Calls();
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  std::uint64_t mark(cudaStream_t stream);
  [[nodiscard]] std::uint64_t reached();

 private:
  std::deque<cudaEvent_t> running_;  // of the calls reached_ + 1, reached_ + 2, …
  std::vector<cudaEvent_t> idle_;    // for reuse: as many as calls were ever under way at once
  std::uint64_t reached_ = 0;
};

}  // namespace eaglex::cuda
