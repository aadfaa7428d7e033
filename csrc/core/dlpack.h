// The part of the DLPack ABI (0.8, and of 1.3 the table of C functions; https://dmlc.github.io/dlpack) that a consumer of
// tensors needs.
#pragma once

#include <cstdint>

extern "C" {

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: compact row-major
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

// What a producer's type offers as `__dlpack_c_exchange_api__`, a capsule of this name.
inline constexpr std::uint32_t kDLPackMajor = 1;
inline constexpr const char* kDLPackExchange = "dlpack_exchange_api";

struct DLPackExchangeHeader {
  DLPackVersion version;
  DLPackExchangeHeader* prev_api;
};

struct DLPackExchange {
  DLPackExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);  // borrowed, 0 on success; may be null
  void* current_work_stream;
};

}  // extern "C"

namespace eaglex {

enum DLDeviceType : std::int32_t { kDLCpu = 1, kDLCuda = 2, kDLCudaHost = 3 };
enum DLTypeCode : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

}  // namespace eaglex
