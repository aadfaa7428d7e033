// bfloat16 of the emulated runtime; the conversions are the CPU backend's, which tests/cpp/test_numeric.cpp covers.
#pragma once

#include <cuda_runtime.h>

#include "cpu/numeric.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  return eaglex::cpu::from_bf16(x.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return {eaglex::cpu::to_bf16(x)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
