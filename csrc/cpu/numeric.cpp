#include "cpu/numeric.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

// One binary for old and new x86 processors: the loader picks the widest version that runs. Elsewhere the compiler's
// default.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define EAGLEX_CPU_VERSIONS __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define EAGLEX_CPU_VERSIONS
#endif

namespace eaglex::cpu {
namespace {

// x · row o of the matrix, whose values are already floats: w [in].
float product(const Matrix& weight, std::int64_t o, const float* w, const float* x) {
  const std::int64_t in = weight.shape[1];
  if (!weight.packed()) return dot(x, w, in);
  const std::int64_t groups = weight.scales.shape[1];
  const std::int64_t size = weight.group();
  float sum = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t first = g * size;
    const float scale = load(weight.scales.data, weight.scales.dtype, o * groups + g);
    sum += scale * dot(x + first, w + first, std::min(size, in - first));
  }
  return sum;
}

}  // namespace

float from_e4m3(std::uint8_t bits) {
  const float sign = (bits & 0x80U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-9F;
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

const float* widen(const void* data, DType dtype, std::int64_t first, std::int64_t count, float* buffer) {
  if (dtype == DType::kF32) return static_cast<const float*>(data) + first;
  if (dtype == DType::kF8) {
    static const auto table = [] {
      std::array<float, 256> values{};
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = from_e4m3(static_cast<std::uint8_t>(i));
      return values;
    }();
    const auto* const bytes = static_cast<const std::uint8_t*>(data) + first;
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = table[bytes[i]];
    return buffer;
  }
  if (dtype == DType::kI4) {
    const auto* const bytes = static_cast<const std::uint8_t*>(data) + first / 2;
    for (std::int64_t i = 0; i < count / 2; ++i) {
      buffer[2 * i] = static_cast<float>(bytes[i] & 15) - 8.0F;
      buffer[2 * i + 1] = static_cast<float>(bytes[i] >> 4) - 8.0F;
    }
    return buffer;
  }
  const auto* const source = static_cast<const std::uint16_t*>(data) + first;
  if (dtype == DType::kBF16) {
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(source[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = from_f16(source[i]);
  }
  return buffer;
}

EAGLEX_CPU_VERSIONS
float dot(const float* a, const float* b, std::int64_t count) {
  // Independent partial sums: what lets the compiler use vectors without reordering a sum behind our back.
  constexpr int kLanes = 32;
  float partial[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) partial[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (const float value : partial) sum += value;
  return sum;
}

void rms_norm(const float* x, const TensorView& gamma, float eps, float* out) {
  const std::int64_t size = gamma.shape[0];
  const float scale = 1.0F / std::sqrt(dot(x, x, size) / static_cast<float>(size) + eps);
  for (std::int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * load(gamma.data, gamma.dtype, i);
}

void linear(const LinearRows& rows, const Matrix& weight, float* out, std::int64_t out_stride) {
  constexpr std::int64_t kBlock = 32;  // outputs per task, which share a buffer
  const std::int64_t outputs = weight.shape[0];
  parallel_for((outputs + kBlock - 1) / kBlock, [&](std::int64_t block) {
    std::vector<float> buffer(weight.dtype == DType::kF32 ? 0 : static_cast<std::size_t>(rows.in));
    const std::int64_t end = std::min(outputs, (block + 1) * kBlock);
    for (std::int64_t o = block * kBlock; o < end; ++o) {
      const float* const w = widen(weight.data, weight.dtype, o * rows.in, rows.in, buffer.data());
      for (std::int64_t i = 0; i < rows.count; ++i) {
        const std::int64_t row = rows.rows == nullptr ? i : rows.rows[i];
        out[row * out_stride + o] = product(weight, o, w, rows.x + i * rows.in);
      }
    }
  });
}

}  // namespace eaglex::cpu
