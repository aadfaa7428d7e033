// A block whose x was there before the kernels that it waits for are done (GemmShape::x_is_there): it multiplies, hands
// over and sums up first, and waits for them only in front of its first epilogue.
//
// Caller: run_block (gemm.cuh).    Bytes: as there.
// Mapping: as there; words are this launch's own. The warp of the weights never waits for the kernels
// before: that would hold it up with the rest.
#pragma once

#include "cuda/stream/pipeline.cuh"

namespace eaglex::stream {

// Where the kernels before are done.
struct ProducersDone {
  static constexpr bool kRunning = false;
};

// All but the warp of the weights are at the wait for the kernels before, which would hold that up as well. Warps come
// from several places in the code, for which bar.sync (the aligned form) is not meant.
__device__ __forceinline__ void early_barrier() {
  __syncwarp();
  asm volatile("barrier.sync 3, %0;" ::"n"(kThreads - 32) : "memory");
}

// The warp of the weights has made the block's barriers, which nobody may touch before; it does not stop here.
__device__ __forceinline__ void say_barriers_are_there() {
  __syncwarp();
  asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");
}
__device__ __forceinline__ void wait_for_barriers() {
  asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
}

struct ProducersRunning {
  static constexpr bool kRunning = true;
  const GemmShape& shape;
  // Waits; false where nobody wants the result.
  __device__ __forceinline__ bool operator()() const {
    early_barrier();
    wait_for_producers();
    return !is_idle(shape.needed_late);
  }
};

// GemmShape::x_is_there, a single token, x kept: the block waits only when it has a tile's sums, or has handed over all
// that it has for others.
template <class Weights, class Step>
__device__ __forceinline__ void run_early(const GemmShape& shape, const SharedLayout& at,
                                          const typename Step::Params& params, const Ring& ring, std::byte* shared,
                                          int issued, auto& kept, auto& consumer) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (warp == kConsumerWarps) {
    const int first = shape.split.first(blockIdx.x);
    const int last = shape.split.first(blockIdx.x + 1);
    if (lane == 0) produce_weights<Weights, 1, false>(shape, ring, issued, first, last);
    return;
  }
  wait_for_barriers();
  if (warp < kConsumerWarps) {
    const bf16* row = Step::early_source(params);
    kept.keep(at, shared, &row);
    std::int32_t broken;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(broken) : "l"(shape.broken) : "memory");
    return consumer.run_kept(broken, ProducersRunning{shape});
  }
  auto* const row_info = reinterpret_cast<typename Step::RowInfo*>(shared + at.row_info);
  const bf16** const source = reinterpret_cast<const bf16**>(shared + at.sources);
  const auto locate = [&] {
    if (lane == 0) Step::locate(params, 0, source, 8, row_info);
    __syncwarp();
  };
  locate();  // brings code and pages into the caches
  early_barrier();
  wait_for_producers();
  if (shape.release == Release::kAfterWait) release_dependents();
  if (is_idle(shape.needed_late)) return;
  locate();
  if (lane == 0) mbar_arrive(ring.empty + 8 * ring.stages);
  Step::template beside<1>(params, source, shape.tokens, lane);
}

}  // namespace eaglex::stream
