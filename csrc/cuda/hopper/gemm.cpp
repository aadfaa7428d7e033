#include "cuda/hopper/gemm.h"

#include "cuda/hopper/product.h"

namespace eaglex::cuda::hopper {
namespace {

bool aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

}  // namespace

bool gemm(DType type, const GemmParams& p, cudaStream_t stream) {
  constexpr int kWide = 8;  // elements of 16 bytes, which TMA moves at least
  if (type == DType::kF32 || p.epilogue == Epilogue::kSwiglu || p.max_rows < kLeastRows) return false;
  bool ok = p.in % kWide == 0 && p.x_stride % kWide == 0 && aligned(p.x) && aligned(p.out) && aligned(p.residual);
  int total = 0;
  for (int part = 0; part < 3; ++part) {
    ok = ok && p.outputs[part] % kWide == 0 && aligned(p.weight[part]);
    total += p.outputs[part];
  }
  if (!ok) return false;
  const std::size_t size = p.epilogue == Epilogue::kFloat ? sizeof(float) : size_of(type);
  int column = 0;
  for (int part = 0; part < 3; ++part) {
    if (p.outputs[part] == 0) continue;
    const auto at = static_cast<std::size_t>(column) * size;
    Product product;
    product.x = p.x;
    product.x_stride = p.x_stride;
    product.weight = p.weight[part];
    product.residual = p.residual == nullptr ? nullptr : static_cast<const std::byte*>(p.residual) + at;
    product.out = static_cast<std::byte*>(p.out) + at;
    product.out_stride = total;
    product.rows = p.max_rows;
    product.outputs = p.outputs[part];
    product.in = p.in;
    product.num_sms = p.hopper_sms;
    (type == DType::kBF16 ? multiply_bf16 : multiply_f16)(product, p.epilogue, stream);
    column += p.outputs[part];
  }
  return true;
}

}  // namespace eaglex::cuda::hopper
