// The part of the DLPack ABI (version 0.8, https://dmlc.github.io/dlpack) that a consumer of tensors needs.
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

}  // extern "C"

namespace eaglex {

enum DLDeviceType : std::int32_t { kDLCpu = 1, kDLCuda = 2, kDLCudaHost = 3 };
enum DLTypeCode : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

}  // namespace eaglex
