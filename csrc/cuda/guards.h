// What a call changes for its thread and gives back at its end.
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace eaglex::cuda {

// Makes `device` current for one call into the backend, and gives the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// While this thread captures any stream in global mode (torch's default), asking another stream or event how far it is,
// waiting for it, or loading a kernel would void that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the caller's
};

}  // namespace eaglex::cuda
