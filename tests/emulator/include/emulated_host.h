// The host side of the emulated runtime: the device is this process's memory; a stream runs what it gets at once or,
// while the device is held, when somebody waits for it or asks.
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaSharedmemCarveoutMaxShared = 100 };
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
inline constexpr unsigned cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2, cudaIpcMemLazyEnablePeerAccess = 1;
struct cudaIpcMemHandle_t {
  char reserved[64];
};
inline constexpr unsigned cudaEventDisableTiming = 2;

namespace emulator {

using Work = std::function<cudaError_t()>;
using Graph = std::vector<Work>;
struct Stream {
  Graph* capture = nullptr;
};
struct Event {
  std::size_t after = 0;  // launches that must have run
};

// Runs `thread` once per thread of the grid, block after block.
cudaError_t run_grid(dim3 grid, unsigned block, std::size_t shared_bytes, const std::function<void()>& thread);
// To the stream's capture, the held device's queue, or at once.
cudaError_t submit(Stream* stream, Work work);

}  // namespace emulator

using cudaStream_t = emulator::Stream*;
using cudaEvent_t = emulator::Event*;
using cudaGraph_t = emulator::Graph*;
using cudaGraphExec_t = emulator::Graph*;

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
// Launches of one stream never overlap here, whatever the attributes allow.
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

const char* cudaGetErrorName(cudaError_t status);
const char* cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError();

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMalloc(void** block, std::size_t bytes);
cudaError_t cudaFree(void* block);
cudaError_t cudaMemset(void* block, int value, std::size_t bytes);
cudaError_t cudaHostAlloc(void** block, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* block);
// Memory of the host is the device's as it is; memory of 2 MiB and more can be opened by other processes.
cudaError_t cudaHostRegister(void* block, std::size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* block);
cudaError_t cudaHostGetDevicePointer(void** device, void* block, unsigned flags);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* block);
cudaError_t cudaIpcOpenMemHandle(void** block, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* block);

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

namespace emulator {

// Dynamic shared memory that a kernel may ask for; raised by cudaFuncSetAttribute.
std::size_t& shared_limit(const void* kernel);
bool valid(const cudaLaunchConfig_t& config, const void* kernel);

}  // namespace emulator

template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
    emulator::shared_limit(reinterpret_cast<const void*>(kernel)) = static_cast<std::size_t>(value);
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int ptxVersion;
};

template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Params...)) {
  attributes->ptxVersion = 80;
  return cudaSuccess;
}

// Parameters are taken by value now, as a launch does, whenever the kernel runs.
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  if (!emulator::valid(*config, reinterpret_cast<const void*>(kernel))) return cudaErrorInvalidConfiguration;
  return emulator::submit(config->stream, [=, shape = *config, values = std::tuple<std::decay_t<Params>...>(args...)] {
    return emulator::run_grid(shape.gridDim, shape.blockDim.x, shape.dynamicSmemBytes,
                              [&] { std::apply(kernel, values); });
  });
}
