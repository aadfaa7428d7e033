// gemm (Hopper): out = x Wᵀ (+ residual), x [R, in], W [outputs, in] row-major; fp32 sums, one order, no split.
// Callers: gemm() for prompts of hopper::kLeastRows rows and more: fuse, qkv, o_proj, down.
// Bytes: bound by arithmetic, 2 · R · outputs · in.
// Mapping: persistent CTAs of 128 × 256 (activations out) or 128 × 128 (fp32 out), TMA producer, two wgmma consumers.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/common.cuh"
#include "cuda/hopper/product.h"

namespace eaglex::cuda::hopper {

template <class T, class Out, class Addend, class Tile, class Cluster>
struct Kernel {
  static constexpr int kAlign = 16 / sizeof(T);
  static constexpr int kAlignOut = 16 / sizeof(Out);
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Addend, RowMajor, kAlignOut, Out, RowMajor,
      kAlignOut, cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, RowMajor, kAlign, T, ColumnMajor, kAlign, float, Tile,
      Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>>;
};

inline void expect_success(cutlass::Status status, const char* what) {
  if (status == cutlass::Status::kSuccess) return;
  static_cast<void>(cudaGetLastError());
  fail(ErrorCode::kDevice, what, ": ", cutlassGetStatusString(status));
}

template <class Kernel, class T, class Out>
void run(const Product& p, cudaStream_t stream) {
  using Gemm = typename Kernel::Gemm;
  const auto stride = [](std::int64_t elements) {
    return cute::make_stride(elements, cute::Int<1>{}, std::int64_t{0});
  };
  typename Gemm::Arguments arguments;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {p.rows, p.outputs, p.in, 1};
  arguments.mainloop.ptr_A = static_cast<const T*>(p.x);
  arguments.mainloop.dA = stride(p.x_stride);
  arguments.mainloop.ptr_B = static_cast<const T*>(p.weight);
  arguments.mainloop.dB = stride(p.in);
  arguments.epilogue.thread.alpha = 1.0F;
  arguments.epilogue.thread.beta = p.residual == nullptr ? 0.0F : 1.0F;
  using Addend = typename Gemm::ElementC;
  if constexpr (!cute::is_void_v<Addend>) {
    arguments.epilogue.ptr_C = static_cast<const Addend*>(p.residual == nullptr ? p.out : p.residual);
    arguments.epilogue.dC = stride(p.out_stride);
  }
  arguments.epilogue.ptr_D = static_cast<Out*>(p.out);
  arguments.epilogue.dD = stride(p.out_stride);
  arguments.hw_info.sm_count = p.num_sms;
  // None for a persistent kernel that does not split `in`; nothing may be allocated here.
  const std::size_t workspace = Gemm::get_workspace_size(arguments);
  expect(workspace == 0, ErrorCode::kDevice, "gemm workspace", 0, workspace);
  Gemm gemm;
  expect_success(gemm.can_implement(arguments), "gemm");
  expect_success(gemm.initialize(arguments, nullptr, stream), "gemm");
  expect_success(gemm.run(stream), "gemm");
}

// Both epilogues for one type of weights.
template <class T>
void multiply(const Product& p, Epilogue epilogue, cudaStream_t stream) {
  using cute::_1, cute::_2, cute::_64, cute::_128, cute::_256, cute::Shape;
  if (epilogue == Epilogue::kFloat)
    return run<Kernel<T, float, void, Shape<_128, _128, _64>, Shape<_2, _1, _1>>, T, float>(p, stream);
  run<Kernel<T, T, T, Shape<_128, _256, _64>, Shape<_2, _1, _1>>, T, T>(p, stream);
}

}  // namespace eaglex::cuda::hopper
