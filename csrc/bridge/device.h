// What the transports between GPUs share: kernels that send and receive, a status that the host reads without a sync, and
// a thread that watches, since a host may sit in a synchronize when something goes wrong.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

#include "bridge/push.h"
#include "bridge/transport.h"
#include "bridge/watcher.h"

namespace eaglex::bridge {

// Throws ErrorCode::kDevice with the call and CUDA's own words.
void check_cuda(cudaError_t status, const char* what);

// Makes `device` the calling thread's for as long as this lives. What fails here fails again in the call that follows.
class OnDevice {
 public:
  explicit OnDevice(int device) noexcept {
    static_cast<void>(cudaGetDevice(&before_));
    static_cast<void>(cudaSetDevice(device));
  }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

struct FreeDevice {
  void operator()(void* block) const { static_cast<void>(cudaFree(block)); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const { static_cast<void>(cudaStreamDestroy(stream)); }
};
using OwnStream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using DeviceMemory = std::unique_ptr<void, FreeDevice>;
// Zeroed when this returns.
[[nodiscard]] DeviceMemory device_memory(std::size_t bytes);

// Memory of this process for another one, over CUDA IPC; it was allocated by itself, since all of its block goes along.
[[nodiscard]] std::string exported(void* memory);
struct CloseHandle {
  void operator()(void* memory) const { static_cast<void>(cudaIpcCloseMemHandle(memory)); }
};
using OpenedMemory = std::unique_ptr<void, CloseHandle>;
[[nodiscard]] OpenedMemory opened(const std::string& handle, const std::string& whose);

// Whether kernels on this device may be launched by programmatic dependence; EAGLEX_PDL=0 says no.
[[nodiscard]] bool may_overlap(int device);

class DeviceBridge : public Bridge {
 public:
  DeviceBridge(Group& group, const BridgeSetup& setup);
  ~DeviceBridge() override;

  [[nodiscard]] const char* transport() const noexcept override { return name_of(setup_.transport); }
  void connect(const std::vector<std::string>& offers) final;
  void push(const LaneList& lanes, const DraftResults& results, Verdict verdict, Stream stream) final;
  std::optional<Verdict> receive(const LaneList& lanes, const DraftResults& results, Stream stream) final;
  void check() final;
  void set_deadline(Clock::duration deadline) final;
  // Of messages that the device has finished; waits for a copy, not for other streams.
  [[nodiscard]] Counters counters() const final;

 protected:
  // Of the transport: reaching the others, its own work around the kernels, and its end.
  virtual void open(const std::vector<std::string>& offers) = 0;
  virtual void before_receive(int /*lanes*/, Stream /*stream*/) {}
  virtual void after_push(int /*lanes*/, Stream /*stream*/) {}
  // Called by the watching thread: throws through group().end() where the transport has failed, and leaves all waits
  // when the group has ended.
  virtual void look() {}
  virtual void abandon() {}
  // To be called first by every destructor below this class.
  void stop_watching() { watcher_.stop(); }

  [[nodiscard]] Group& group() { return group_; }
  [[nodiscard]] bool sends() const { return group_.rank() == 0; }
  [[nodiscard]] int device() const { return setup_.device; }
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(deadline_.load()).count(); }
  [[nodiscard]] PushChannel& channel() { return channel_; }
  // What the device counts, as of now: waits for a copy, not for other streams.
  [[nodiscard]] PushState state() const;

 private:
  bool watch();
  void look_around();
  [[noreturn]] void end_by(PushCode code);
  void admit(const LaneList& lanes, const char* what);

  Group& group_;
  BridgeSetup setup_;
  std::atomic<Clock::duration> deadline_;
  PushStatus* status_ = nullptr;
  DeviceMemory state_, staging_;
  OwnStream stream_;
  PushChannel channel_;
  bool connected_ = false;
  Watcher watcher_;
};

[[nodiscard]] std::unique_ptr<Bridge> make_inbox_bridge(Group& group, const BridgeSetup& setup);
[[nodiscard]] std::unique_ptr<Bridge> make_nccl_bridge(Group& group, const BridgeSetup& setup);

}  // namespace eaglex::bridge
