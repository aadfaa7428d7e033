// How candidates of the vocabulary are ordered, and reductions over a warp.
#pragma once

#include <cstdint>

namespace eaglex::stream {

// The upper half of a key, and an id.
__device__ __forceinline__ std::uint64_t key_at(std::uint32_t ordered, int id) {
  return static_cast<std::uint64_t>(ordered) << 32 | (0xFFFFFFFFU - static_cast<std::uint32_t>(id));
}

// Value and id in one number that orders as the candidates do: by value, then by lowest id. NaN ranks last; 0 is
// "none".
__device__ __forceinline__ std::uint64_t key_of(float value, int id) {
  const std::uint32_t bits = __float_as_uint(isnan(value) ? __int_as_float(0xFF800000) : value);
  const std::uint32_t ordered = bits & 0x80000000U ? ~bits : bits | 0x80000000U;
  return key_at(ordered, id);
}
__device__ __forceinline__ int id_of(std::uint64_t key) {
  return static_cast<int>(0xFFFFFFFFU - static_cast<std::uint32_t>(key));
}
__device__ __forceinline__ float value_of(std::uint64_t key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float(ordered & 0x80000000U ? ordered & 0x7FFFFFFFU : ~ordered);
}

template <class T>
__device__ __forceinline__ T warp_max(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(0xFFFFFFFF, x, offset);
    x = other > x ? other : x;
  }
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, offset);
  return x;
}

}  // namespace eaglex::stream
