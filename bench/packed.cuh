// Random low-bit matrices on the device, in the layout of eaglex/reference_low_bit.py. Scales are max / 448 per row and
// max / 7 per group: plainer than its own, which does not matter here.
#pragma once

#include <cuda_fp8.h>

#include <memory>

#include "core/weights.h"
#include "cuda/packed.cuh"
#include "random.cuh"

namespace eaglex::bench {

// One block per row and group.
static __global__ void quantise_kernel(const bf16* in, std::int64_t columns, std::int64_t group, bool int4,
                                       std::uint8_t* values, void* scales) {
  __shared__ float shared[32];
  const std::int64_t groups = (columns + group - 1) / group;
  const std::int64_t row = blockIdx.x / groups;
  const std::int64_t first = blockIdx.x % groups * group;
  const std::int64_t last = min(first + group, columns);
  float largest = 0;
  for (std::int64_t k = first + threadIdx.x; k < last; k += blockDim.x)
    largest = fmaxf(largest, fabsf(__bfloat162float(in[row * columns + k])));
  for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) largest = fmaxf(largest, shared[warp]);
  float scale = fmaxf(largest, 1e-30F) / (int4 ? 7 : 448);
  if (int4) scale = __bfloat162float(__float2bfloat16(scale));
  if (threadIdx.x == 0 && int4) static_cast<bf16*>(scales)[blockIdx.x] = __float2bfloat16(scale);
  if (threadIdx.x == 0 && !int4) static_cast<float*>(scales)[blockIdx.x] = scale;
  for (std::int64_t k = first + threadIdx.x * 2; k < last; k += blockDim.x * 2) {
    const float pair[2] = {__bfloat162float(in[row * columns + k]) / scale,
                           __bfloat162float(in[row * columns + k + 1]) / scale};
    if (int4) {
      const auto number = [&](int i) { return static_cast<int>(fminf(fmaxf(rintf(pair[i]), -8), 7)) + 8; };
      values[(row * columns + k) / 2] = static_cast<std::uint8_t>(number(0) | number(1) << 4);
    } else {
      for (int i = 0; i < 2; ++i)
        values[row * columns + k + i] = __nv_cvt_float_to_fp8(pair[i], __NV_SATFINITE, __NV_E4M3);
    }
  }
}

// Every 32nd row keeps only numbers below the least normal one of e4m3, with a scale that makes them count.
static __global__ void make_subnormal_kernel(std::uint8_t* values, float* scales, std::int64_t rows,
                                             std::int64_t columns) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < rows * columns;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    if (i / columns % 32 != 5) continue;
    values[i] = static_cast<std::uint8_t>(mix(99, static_cast<std::uint64_t>(i)) & 0x87U);
    if (i % columns == 0) scales[i / columns] *= 16384;
  }
}

inline TensorView view_at(void* data, DType type, std::int64_t rows, std::int64_t columns) {
  TensorView view;
  view.data = data;
  view.dtype = type;
  view.device = {DeviceKind::kCuda, 0};
  view.rank = 2;
  view.shape = {rows, columns};
  view.stride = {columns, 1};
  return view;
}

struct Packed {
  std::unique_ptr<Buffer<std::uint8_t>> values, scales;
  eaglex::Matrix matrix;
};

// `type`: kF8 or kI4.
inline Packed quantised(const bf16* plain, std::int64_t rows, std::int64_t columns, DType type) {
  const bool int4 = type == DType::kI4;
  const std::int64_t group = int4 ? kScaleGroup : columns;
  const std::int64_t groups = (columns + group - 1) / group;
  const auto n = [](std::int64_t x) { return static_cast<std::size_t>(x); };
  Packed packed;
  packed.values = std::make_unique<Buffer<std::uint8_t>>(n(int4 ? rows * columns / 2 : rows * columns));
  packed.scales = std::make_unique<Buffer<std::uint8_t>>(n(rows * groups * (int4 ? 2 : 4)));
  quantise_kernel<<<static_cast<unsigned>(rows * groups), int4 ? 32 : 256>>>(
      plain, columns, group, int4, packed.values->get(), packed.scales->get());
  if (!int4) {
    make_subnormal_kernel<<<1024, 256>>>(packed.values->get(), reinterpret_cast<float*>(packed.scales->get()), rows,
                                         columns);
  }
  stream::check(cudaGetLastError(), "quantise");
  packed.matrix = eaglex::Matrix(view_at(packed.values->get(), type, rows, columns));
  packed.matrix.scales = view_at(packed.scales->get(), int4 ? DType::kBF16 : DType::kF32, rows, groups);
  return packed;
}

}  // namespace eaglex::bench
