// Pieces of the GEMM kernels: which weight row a tile's row is, and where a sum goes.
#pragma once

#include "cuda/common.cuh"
#include "cuda/gemm.h"
#include "cuda/ptx.cuh"

namespace eaglex::cuda {

// Output column and weight part of row `r` of a tile of kTile weight rows. With kSwiglu every group of kGroup rows
// (what one warp or thread owns) is half gate, half up of the same columns, so that the product needs no exchange.
template <int kTile, int kGroup>
struct TileRow {
  int column = 0;
  int part = 0;
  int row = -1;  // within the part; -1 beyond the matrix

  __device__ TileRow(const GemmParams& p, int tile, int r) {
    if (p.epilogue == Epilogue::kSwiglu) {
      constexpr int kHalf = kGroup / 2;
      part = r % kGroup / kHalf;
      column = tile * (kTile / 2) + r / kGroup * kHalf + r % kHalf;
      row = column < p.outputs[0] ? column : -1;
      return;
    }
    column = tile * kTile + r;
    row = column;
    while (part < 3 && row >= p.outputs[part]) row -= p.outputs[part++];
    if (part == 3) row = -1;
  }

  template <typename T>
  __device__ const T* weights(const GemmParams& p) const {
    return row < 0 ? nullptr : static_cast<const T*>(p.weight[part]) + static_cast<std::int64_t>(row) * p.in;
  }
};

// Writes one element of x Wᵀ; with kSwiglu `up` is the other half's.
template <typename T>
__device__ void store_output(const GemmParams& p, int row, int column, float value, float up) {
  const bool swiglu = p.epilogue == Epilogue::kSwiglu;
  const int width = swiglu ? p.outputs[0] : p.outputs[0] + p.outputs[1] + p.outputs[2];
  if (column >= width) return;
  const std::int64_t at = static_cast<std::int64_t>(row) * width + column;
  if (p.epilogue == Epilogue::kFloat) {
    static_cast<float*>(p.out)[at] = value;
    return;
  }
  if (swiglu) value = value / (1.0F + expf(-value)) * up;
  if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[at]);
  static_cast<T*>(p.out)[at] = from_float<T>(value);
}

__device__ inline int rows_of_launch(const GemmParams& p) {
  return min(rows_of_pass(*p.batch, p.pass, p.topk, p.drafting) - p.first, p.max_rows);
}

}  // namespace eaglex::cuda
