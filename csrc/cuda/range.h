// A step's name on a profiler's timeline, in NVTX's domain "eaglex": the host's time in that step's launches.
//
// `enqueue` shows every step. `run` replays a graph, which is one range, "cycle"; steps show while graphs are captured.
// Without a profiler a range is two tests of a null pointer.
#pragma once

#if __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>

namespace eaglex::cuda {

struct Timeline {
  static constexpr const char* name = "eaglex";
};
using StepRange = nvtx3::scoped_range_in<Timeline>;

}  // namespace eaglex::cuda

#else  // not a CUDA toolkit's compiler: tests/emulator

namespace eaglex::cuda {

struct StepRange {
  explicit StepRange(const char* /*name*/) {}
  ~StepRange() {}  // so that a range is used
};

}  // namespace eaglex::cuda

#endif
