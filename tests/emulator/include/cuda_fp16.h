// float16 of the emulated runtime; the conversions are the CPU backend's, which tests/cpp/test_numeric.cpp covers.
#pragma once

#include <cuda_runtime.h>

#include "cpu/numeric.h"

struct __half {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half x) {
  return eaglex::cpu::from_f16(x.bits);
}
inline __half __float2half_rn(float x) {
  return {eaglex::cpu::to_f16(x)};
}
inline float2 __half22float2(__half2 pair) {
  return {__half2float(pair.x), __half2float(pair.y)};
}
