// RMSNorm of one row by one CTA: x / sqrt(mean(x²) + eps) · gamma, in fp32, rounded once (reference.rms_norm).
#pragma once

#include "cuda/common.cuh"

namespace eaglex::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kRowWarps = kRowThreads / kWarp;

// Writes `width` elements; without gamma it copies. `load(i)` gives element i as float, twice.
template <typename T, typename Load>
__device__ void norm_row(int width, const T* gamma, float eps, Load load, T* out, float* shared) {
  float scale = 1.0F;
  if (gamma != nullptr) {
    float squares = 0;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kRowThreads) {
      const float x = load(i);
      squares += x * x;
    }
    scale = rsqrtf(block_sum(squares, shared) / static_cast<float>(width) + eps);
  }
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kRowThreads) {
    const float x = load(i);
    out[i] = from_float<T>(gamma == nullptr ? x : x * scale * to_float(gamma[i]));
  }
}

template <typename T>
__device__ void zero_row(T* out, int width) {
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kRowThreads) out[i] = from_float<T>(0.0F);
}

}  // namespace eaglex::cuda
