// Pieces of the GEMM kernels: asynchronous copies, fragments, which weight row a tile's row is.
#pragma once

#include "cuda/common.cuh"
#include "cuda/gemm.h"

namespace eaglex::cuda {

// 16 bytes from global to shared memory, or 16 zero bytes; from sm_80 on.
__device__ inline void copy_async(void* to, const void* from, bool valid) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8×8 matrices of 16-bit elements; lane i points at row i % 8 of matrix i / 8.
__device__ inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

template <typename T>
__device__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                   std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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
  return min(rows_of_pass(*p.batch, p.pass, p.topk) - p.first, p.max_rows);
}

}  // namespace eaglex::cuda
