// Memory, streams, graphs and launch limits of the emulated runtime, and the switches for tests.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>

namespace emulator {
namespace {

constexpr std::size_t kDefaultShared = 48 << 10;
constexpr unsigned kMaxGrid = 65535;  // of y and z

bool held = false;
std::deque<Work> pending;  // of all streams, in order
std::size_t begun = 0;     // launches that are no longer pending
cudaError_t last_error = cudaSuccess;
// Held by a thread that cannot launch because the device takes no more: nobody else gets into the driver then.
std::recursive_mutex driver;
void pass() {
  const std::lock_guard lock(driver);
}

cudaError_t keep(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

// Large blocks lie in files of their own, so that another process can map them.
constexpr std::size_t kExportable = std::size_t{2} << 20;
struct Exported {
  int descriptor;
  std::size_t bytes;
};
std::unordered_map<void*, Exported> exported, opened;

void* allocate_exportable(std::size_t bytes) {
  const int descriptor = memfd_create("emulated", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) return nullptr;
  void* const block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  exported[block] = {descriptor, bytes};
  return block;
}

void run_first() {
  const Work work = std::move(pending.front());
  pending.pop_front();
  ++begun;
  keep(work());
}

cudaError_t run_all() {
  while (!pending.empty()) run_first();
  return last_error;
}

}  // namespace

cudaError_t submit(Stream* stream, Work work) {
  pass();
  if (stream != nullptr && stream->capture != nullptr) {
    stream->capture->push_back(std::move(work));
    return cudaSuccess;
  }
  if (!held) {
    ++begun;
    return keep(work());
  }
  pending.push_back(std::move(work));
  return cudaSuccess;
}

std::size_t& shared_limit(const void* kernel) {
  static std::unordered_map<const void*, std::size_t> limits;
  return limits.try_emplace(kernel, kDefaultShared).first->second;
}

bool valid(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3& grid = config.gridDim;
  return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.y <= kMaxGrid && grid.z <= kMaxGrid && config.blockDim.x > 0 &&
         config.blockDim.x <= kMaxThreads && config.dynamicSmemBytes <= shared_limit(kernel);
}

}  // namespace emulator

using emulator::run_all;

// For tests, through ctypes. Between enter and leave a thread has the driver to itself. While the device is held, work
// piles up: every cudaStreamQuery does one piece, waiting does all.
#define EAGLEX_EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
EAGLEX_EMULATOR_EXPORT void eaglex_emulator_enter() {
  emulator::driver.lock();
}
EAGLEX_EMULATOR_EXPORT void eaglex_emulator_leave() {
  emulator::driver.unlock();
}
EAGLEX_EMULATOR_EXPORT void eaglex_emulator_hold() {
  emulator::held = true;
}
EAGLEX_EMULATOR_EXPORT void eaglex_emulator_release() {
  emulator::held = false;
  static_cast<void>(run_all());
}
EAGLEX_EMULATOR_EXPORT std::size_t eaglex_emulator_pending() {
  return emulator::pending.size();
}

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    default:
      return "cudaSuccess";
  }
}
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorLaunchFailure ? "emulator: threads wait at a barrier that others never reach" : "emulator";
}
cudaError_t cudaGetLastError() {
  return std::exchange(emulator::last_error, cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  emulator::pass();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
// Few SMs, so that blocks have more than one share of the work.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : 9;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return run_all();
}

cudaError_t cudaMalloc(void** block, std::size_t bytes) {
  *block = bytes >= emulator::kExportable ? emulator::allocate_exportable(bytes)
                                          : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* block) {
  const cudaError_t status = run_all();
  if (const auto found = emulator::exported.find(block); found != emulator::exported.end()) {
    munmap(block, found->second.bytes);
    close(found->second.descriptor);
    emulator::exported.erase(found);
    return status;
  }
  std::free(block);
  return status;
}
cudaError_t cudaMemset(void* block, int value, std::size_t bytes) {
  return emulator::submit(nullptr, [=] {
    std::memset(block, value, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaHostAlloc(void** block, std::size_t bytes, unsigned) {
  return cudaMalloc(block, bytes);
}
cudaError_t cudaFreeHost(void* block) {
  return cudaFree(block);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return emulator::submit(stream, [=] {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  return run_all();
}
cudaError_t cudaHostGetDevicePointer(void** device, void* block, unsigned) {
  *device = block;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* block) {
  const auto found = emulator::exported.find(block);
  if (found == emulator::exported.end()) return emulator::keep(cudaErrorInvalidValue);
  *handle = {};
  std::snprintf(handle->reserved, sizeof handle->reserved, "%zu /proc/%d/fd/%d", found->second.bytes, getpid(),
                found->second.descriptor);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** block, cudaIpcMemHandle_t handle, unsigned) {
  char path[64] = {};
  std::size_t bytes = 0;
  if (std::sscanf(handle.reserved, "%zu %63s", &bytes, path) != 2) return emulator::keep(cudaErrorInvalidValue);
  const int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return emulator::keep(cudaErrorInvalidValue);
  *block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  emulator::opened[*block] = {descriptor, bytes};
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* block) {
  const cudaError_t status = run_all();
  const emulator::Exported found = emulator::opened.at(block);
  munmap(block, found.bytes);
  close(found.descriptor);
  emulator::opened.erase(block);
  return status;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new emulator::Stream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  emulator::pass();
  if (emulator::pending.empty()) return cudaSuccess;
  emulator::run_first();
  return cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return run_all();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new emulator::Event;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->after = emulator::begun + emulator::pending.size();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return emulator::begun >= event->after ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->capture = new emulator::Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = std::exchange(stream->capture, nullptr);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool active = stream != nullptr && stream->capture != nullptr;
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new emulator::Graph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return emulator::submit(stream, [exec] {
    for (const emulator::Work& work : *exec) {
      if (const cudaError_t status = work(); status != cudaSuccess) return status;
    }
    return cudaSuccess;
  });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  const cudaError_t status = run_all();
  delete exec;
  return status;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
