// The steps again, plainly: matrices by one warp per output, the rest in loops on the host. Each twice: exact (float32
// throughout) and rounded to bfloat16 where plain PyTorch rounds. A kernel passes if its error against exact is at most
// twice the rounded one's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>

#include "model.cuh"

namespace eaglex::bench {

using Floats = std::vector<float>;

inline float rounded(float x) {
  return __bfloat162float(__float2bfloat16(x));
}
inline float maybe_rounded(float x, bool round) {
  return round ? rounded(x) : x;
}

inline Floats floats_of(const Buffer<bf16>& buffer, std::size_t count) {
  std::vector<bf16> raw(count);
  stream::check(cudaMemcpy(raw.data(), buffer.get(), count * sizeof(bf16), cudaMemcpyDeviceToHost), "cudaMemcpy");
  Floats out(count);
  std::transform(raw.begin(), raw.end(), out.begin(), [](bf16 x) { return __bfloat162float(x); });
  return out;
}

static __global__ void plain_linear_kernel(const float* x, const __grid_constant__ cuda::WeightSource w, float* y,
                                           int tokens, int n, int k, int column, int stride) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= n) return;
  for (int t0 = 0; t0 < tokens; t0 += 8) {
    float sum[8] = {};
    for (int i = lane; i < k; i += 32) {
      const float weight = cuda::weight_at(w, row, i);
      for (int t = 0; t < 8 && t0 + t < tokens; ++t) sum[t] += weight * x[static_cast<std::int64_t>(t0 + t) * k + i];
    }
    for (int t = 0; t < 8 && t0 + t < tokens; ++t) {
      for (int offset = 16; offset > 0; offset /= 2) sum[t] += __shfl_xor_sync(0xFFFFFFFF, sum[t], offset);
      if (lane == 0) y[static_cast<std::int64_t>(t0 + t) * stride + column + row] = sum[t];
    }
  }
}

// x [tokens, k] times the parts of a matrix, side by side: [tokens, Σ n].
inline Floats plain_linear(const Floats& x, int tokens, const Matrix& matrix, bool round) {
  const int k = static_cast<int>(matrix.linear.parts[0].shape[1]);
  int total = 0;
  for (int i = 0; i < matrix.linear.num_parts; ++i) total += static_cast<int>(matrix.linear.parts[i].shape[0]);
  const std::size_t count = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(total);
  const Buffer<float>& in = reused<float, 0>(x.size());
  const Buffer<float>& out = reused<float, 1>(count);
  in.set(x);
  int column = 0;
  for (int i = 0; i < matrix.linear.num_parts; ++i) {
    const int n = static_cast<int>(matrix.linear.parts[i].shape[0]);
    plain_linear_kernel<<<(n * 32 + 255) / 256, 256>>>(in.get(), cuda::source_of(matrix.linear.parts[i]), out.get(),
                                                       tokens, n, k, column, total);
    column += n;
  }
  stream::check(cudaGetLastError(), "plain_linear");
  Floats y = out.host(count);
  for (float& value : y) value = maybe_rounded(value, round);
  return y;
}

inline Floats plain_norm(const Floats& x, int tokens, const Floats& gamma, bool round) {
  const std::size_t k = gamma.size();
  Floats y(x.size());
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    double sum = 0;
    for (std::size_t i = 0; i < k; ++i) sum += static_cast<double>(x[t * k + i]) * x[t * k + i];
    const double norm = 1 / std::sqrt(sum / static_cast<double>(k) + 1e-5);
    for (std::size_t i = 0; i < k; ++i)
      y[t * k + i] = maybe_rounded(static_cast<float>(x[t * k + i] * norm * gamma[i]), round);
  }
  return y;
}

inline double distance(const Floats& a, const Floats& b) {
  double difference = 0;
  double size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    size += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / size);
}

struct Verdict {
  int checks = 0;
  int wrong = 0;
  double worst = 0;  // largest error of a kernel over that of PyTorch's rounding

  void take(const char* what, const Floats& ours, const std::function<Floats(bool)>& plain) {
    const Floats exact = plain(false);
    const double error = distance(ours, exact);
    const double allowed = distance(plain(true), exact);
    ++checks;
    worst = std::max(worst, error / allowed);
    if (error <= 2 * allowed && ours.size() == exact.size()) return;  // NaN fails
    ++wrong;
    std::printf("  WRONG %s: error %.2e, PyTorch's rounding %.2e\n", what, error, allowed);
  }
  void require(bool condition, const char* what) {
    ++checks;
    if (condition) return;
    ++wrong;
    std::printf("  WRONG %s\n", what);
  }
};

}  // namespace eaglex::bench
