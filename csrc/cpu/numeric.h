// Number types on the CPU: 16-bit floats widened to float, and loops over them.
#pragma once

#include <bit>
#include <cstdint>
#include <exception>
#include <limits>

#include "core/weights.h"

namespace eaglex::cpu {

inline float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Round to nearest even; NaN stays NaN.
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

inline float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFU;
  if (magnitude >= 0x7C00U) return std::bit_cast<float>(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals on the way.
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112F));
}

inline std::uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // rounds to 2^16 or beyond
  if (magnitude < 0x38800000U) {  // subnormal: adding 2^-1 leaves the rounded value in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13));
}

inline float load(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kBF16:
      return from_bf16(static_cast<const std::uint16_t*>(data)[i]);
    case DType::kF16:
      return from_f16(static_cast<const std::uint16_t*>(data)[i]);
    default:
      return std::numeric_limits<float>::quiet_NaN();
  }
}

inline void store(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[i] = value;
      break;
    case DType::kBF16:
      static_cast<std::uint16_t*>(data)[i] = to_bf16(value);
      break;
    case DType::kF16:
      static_cast<std::uint16_t*>(data)[i] = to_f16(value);
      break;
    default:
      break;
  }
}

// task(i) for every i < count, on all threads. An exception leaves the region and is thrown again behind it; one that
// escaped inside would end the process.
template <typename Task>
void parallel_for(std::int64_t count, const Task& task) {
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t i = 0; i < count; ++i) {
    try {
      task(i);
    } catch (...) {
#pragma omp critical(eaglex_parallel_for)
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

float from_e4m3(std::uint8_t bits);

// data[first .. first + count) as floats; the source itself where it already is. With kI4 both are even.
const float* widen(const void* data, DType dtype, std::int64_t first, std::int64_t count, float* buffer);

float dot(const float* a, const float* b, std::int64_t count);

// out = x · rsqrt(mean(x²) + eps) · gamma
void rms_norm(const float* x, const TensorView& gamma, float eps, float* out);

// out[rows[i] · out_stride + o] = Σ x[i]·w[o]; x [count, in]. Packed: Σ_g s_og · (Σ_{k in g} x_k q_ok), in that order.
struct LinearRows {
  const std::int64_t* rows = nullptr;
  std::int64_t count = 0;
  const float* x = nullptr;
  std::int64_t in = 0;
};
void linear(const LinearRows& rows, const Matrix& weight, float* out, std::int64_t out_stride);

}  // namespace eaglex::cpu
