// Low-bit weights as their owner holds them, read one by one: eaglex/reference_low_bit.py.
#pragma once

#include <bit>
#include <cmath>

#include "cuda/common.cuh"

namespace eaglex::cuda {

// A Matrix on the device.
struct WeightSource {
  const void* values = nullptr;
  const void* scales = nullptr;  // packed only, [out, groups]
  DType type = DType::kF32;
  DType scale_type = DType::kF32;
  std::int64_t in = 0;
  std::int64_t groups = 0;
  std::int64_t group = 0;  // inputs that share a scale
};

inline WeightSource source_of(const Matrix& matrix) {
  WeightSource source{matrix.data, nullptr, matrix.dtype, DType::kF32, matrix.shape[1], 0, 0};
  if (matrix.packed()) {
    source.scales = matrix.scales.data;
    source.scale_type = matrix.scales.dtype;
    source.groups = matrix.scales.shape[1];
    source.group = matrix.group();
  }
  return source;
}

__device__ inline float from_e4m3(std::uint32_t byte) {
  if ((byte & 0x7FU) == 0x7FU) return NAN;
  const float magnitude = std::bit_cast<float>((byte & 0x7FU) << 20) * 0x1p120F;  // the exponent's bias from 7 to 127
  return (byte & 0x80U) != 0 ? -magnitude : magnitude;
}

// The number that is stored, without its scale.
__device__ inline float value_at(const WeightSource& w, std::int64_t row, std::int64_t k) {
  const std::int64_t at = row * w.in + k;
  if (w.type == DType::kF8) return from_e4m3(static_cast<const std::uint8_t*>(w.values)[at]);
  if (w.type == DType::kI4) {
    const int pair = static_cast<const std::uint8_t*>(w.values)[at / 2];
    return static_cast<float>((at % 2 == 0 ? pair & 15 : pair >> 4) - 8);
  }
  return load_float(w.values, w.type, at);
}

__device__ inline float weight_at(const WeightSource& w, std::int64_t row, std::int64_t k) {
  const float value = value_at(w, row, k);
  return w.scales == nullptr ? value : load_float(w.scales, w.scale_type, row * w.groups + k / w.group) * value;
}

}  // namespace eaglex::cuda
