// Two threads that nccl needs beside the one that watches. Any call of CUDA can wait behind a launch of another thread,
// which waits in turn because the device takes no more work; and that may be for the very message that does not come.
// So the watching thread makes no such call: one thread asks the device, another one is there to abort.
#pragma once

#include <future>
#include <mutex>
#include <new>
#include <thread>

#include "bridge/device.h"
#include "bridge/nccl_library.h"

namespace eaglex::bridge {

// A copy of the device's counters every 20 ms, with the time when it was asked for: an old one means that the device, or
// CUDA, has not answered since.
class DeviceLook {
 public:
  struct Found {
    PushState state{};
    Time at{};
  };

  DeviceLook(int device, const PushState* state) : device_(device), state_(state) {
    const OnDevice here(device);
    void* copy = nullptr;
    check_cuda(cudaHostAlloc(&copy, sizeof(PushState), cudaHostAllocPortable), "nccl: memory");
    copy_.reset(new (copy) PushState{});
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    stream_.reset(stream);
    found_.at = asked_at_ = Clock::now();
    thread_.start([this] {
      ask();
      return true;
    });
  }

  ~DeviceLook() {
    thread_.stop();
    const OnDevice here(device_);
    stream_.reset();
    copy_.reset();
  }
  DeviceLook(const DeviceLook&) = delete;
  DeviceLook& operator=(const DeviceLook&) = delete;

  // The newest; no wait.
  [[nodiscard]] Found found() const {
    const std::lock_guard lock(mutex_);
    return found_;
  }

 private:
  struct FreePinned {
    void operator()(PushState* block) const { static_cast<void>(cudaFreeHost(block)); }
  };

  void ask() {
    static_cast<void>(cudaSetDevice(device_));  // for good: going back to device 0 would make a context there
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the host may be capturing
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    if (cudaStreamQuery(stream_.get()) == cudaSuccess) {
      {
        const std::lock_guard lock(mutex_);
        found_ = {*copy_, asked_at_};
      }
      asked_at_ = Clock::now();
      static_cast<void>(cudaMemcpyAsync(copy_.get(), state_, sizeof(PushState), cudaMemcpyDeviceToHost, stream_.get()));
    }
    static_cast<void>(cudaGetLastError());  // a real one surfaces at the next launch
  }

  int device_;
  const PushState* state_;
  std::unique_ptr<PushState, FreePinned> copy_;
  OwnStream stream_;
  Time asked_at_;  // of what is in copy_, or on its way there
  mutable std::mutex mutex_;
  Found found_;
  Watcher thread_;
};

// ncclCommAbort waits for captured graphs that hold the communicator, so it runs aside. Its first deed is to tell the
// kernels; the thread has its device before that, since making one current is a call of CUDA too.
class Aborter {
 public:
  using Comm = NcclLibrary::Comm;

  Aborter(const NcclLibrary& library, int device) {
    std::promise<void> end;
    ended_ = end.get_future();
    std::thread([call = library.comm_abort, device, order = order_.get_future(), end = std::move(end)]() mutable {
      static_cast<void>(cudaSetDevice(device));
      try {
        static_cast<void>(call(order.get()));
      } catch (const std::future_error&) {  // there was nothing to abort
      }
      end.set_value();
    }).detach();
  }

  // Once.
  void abort(Comm comm) { order_.set_value(comm); }
  // After `abort`.
  void wait(Clock::duration longest) const { static_cast<void>(ended_.wait_for(longest)); }

 private:
  std::promise<Comm> order_;
  std::future<void> ended_;
};

}  // namespace eaglex::bridge
