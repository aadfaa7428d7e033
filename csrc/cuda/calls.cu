// An event per call, from a pool.
#include "cuda/calls.h"

#include "core/backend.h"
#include "cuda/common.cuh"

namespace eaglex::cuda {
Calls::~Calls() {
  for (cudaEvent_t event : running_) static_cast<void>(cudaEventDestroy(event));
  for (cudaEvent_t event : idle_) static_cast<void>(cudaEventDestroy(event));
}

std::uint64_t Calls::mark(cudaStream_t stream) {
  const RelaxedCapture relaxed;
  cudaStreamCaptureStatus capture{};
  EAGLEX_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return Backend::kNever;
  if (idle_.empty()) {
    cudaEvent_t event = nullptr;
    EAGLEX_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    idle_.push_back(event);
  }
  EAGLEX_CUDA_CHECK(cudaEventRecord(idle_.back(), stream));
  running_.push_back(idle_.back());
  idle_.pop_back();
  return reached_ + running_.size();
}

std::uint64_t Calls::reached() {
  if (running_.empty()) return reached_;
  const RelaxedCapture relaxed;
  while (!running_.empty()) {
    const cudaError_t status = cudaEventQuery(running_.front());
    if (status == cudaErrorNotReady) static_cast<void>(cudaGetLastError());  // nobody's error
    if (status != cudaSuccess) break;                                        // a real one surfaces at the next launch
    idle_.push_back(running_.front());
    running_.pop_front();
    ++reached_;
  }
  return reached_;
}

}  // namespace eaglex::cuda
