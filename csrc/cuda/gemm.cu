// gemm: out = epilogue(x Wᵀ), x [R, in], W [outputs, in] row-major; fp32 sums in a fixed order, so bitwise repeatable.
// Callers: fuse, qkv, o_proj, gate_up, down, head.
// Bytes: outputs · in weights once per block of BM rows (from L2 beyond the first), x once per block of BN outputs.
// Mapping: one CTA per BM rows × BN outputs over all of `in`; cp.async ring, mma m16n8k16; fp32 weights in plain FMA.
#include "cuda/gemm.cuh"

#ifdef EAGLEX_WITH_CUTLASS
#include "cuda/hopper/gemm.h"
#endif

namespace eaglex::cuda {
namespace {

template <int kBM, int kBN, int kWM, int kWN, int kStagesOf>
struct Tile {
  static constexpr int kRows = kBM, kOutputs = kBN, kWarpRows = kWM, kWarpOutputs = kWN, kStages = kStagesOf;
  static constexpr int kDepth =
      64;  // elements of `in` per stage: 128 bytes a row, so that 8 chunks of 16 bytes swizzle freely
  static constexpr int kThreads = (kBM / kWM) * (kBN / kWN) * kWarp;
  static constexpr int kStageElements = (kBM + kBN) * kDepth;
  static constexpr std::size_t kBytes = std::size_t{2} * kStages * kStageElements;
};
// Few rows: a narrow tile, so that all SMs read weights. Many: a square one. All within 99 KB, the least that our
// targets have.
using SkinnyTile = Tile<16, 64, 16, 16, 6>;
using MiddleTile = Tile<64, 64, 32, 32, 4>;
using SquareTile = Tile<128, 128, 64, 32, 3>;

constexpr int kChunk = 8;  // elements of 16 bytes

// Where chunk `chunk` of `row` lies: neighbouring rows use different banks.
template <typename T>
__device__ T* swizzled(T* tile, int row, int chunk) {
  return tile + row * 64 + ((chunk ^ (row & 7)) * kChunk);
}

// `some` is any valid address: a copy of no bytes still names one.
template <typename T, bool kAligned>
__device__ void load_chunk(T* to, const T* row, int k, int in, const void* some) {
  if constexpr (kAligned) {
    const bool valid = row != nullptr && k < in;
    copy_async(to, valid ? row + k : some, valid);
  } else {
    for (int i = 0; i < kChunk; ++i) to[i] = row != nullptr && k + i < in ? row[k + i] : from_float<T>(0.0F);
  }
}

template <typename T, typename Tiling, bool kAligned>
__global__ void __launch_bounds__(Tiling::kThreads) gemm_mma(const __grid_constant__ GemmParams p) {
  constexpr int kBM = Tiling::kRows, kBN = Tiling::kOutputs, kWM = Tiling::kWarpRows, kWN = Tiling::kWarpOutputs;
  constexpr int kDepth = Tiling::kDepth, kStages = Tiling::kStages;
  constexpr int kM = kWM / 16, kN = kWN / 8;
  EAGLEX_DYNAMIC_SHARED(unsigned char, dynamic, 128);
  T* const ring = reinterpret_cast<T*>(dynamic);
  __shared__ const T* weight_row[kBN];

  const int rows = rows_of_launch(p);
  const int row0 = static_cast<int>(blockIdx.y) * kBM;
  if (row0 >= rows) return;
  const int tile = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  for (int r = thread; r < kBN; r += Tiling::kThreads)
    weight_row[r] = TileRow<kBN, kWN>(p, tile, r).template weights<T>(p);
  __syncthreads();

  const auto load_stage = [&](int step) {
    T* const xs = ring + step % kStages * Tiling::kStageElements;
    T* const ws = xs + kBM * kDepth;
    const int k0 = step * kDepth;
    for (int c = thread; c < kBM * 8; c += Tiling::kThreads) {
      const int r = c / 8;
      const T* const row = row0 + r < rows ? static_cast<const T*>(p.x) + (row0 + r) * p.x_stride : nullptr;
      load_chunk<T, kAligned>(swizzled(xs, r, c % 8), row, k0 + c % 8 * kChunk, p.in, p.x);
    }
    for (int c = thread; c < kBN * 8; c += Tiling::kThreads) {
      load_chunk<T, kAligned>(swizzled(ws, c / 8, c % 8), weight_row[c / 8], k0 + c % 8 * kChunk, p.in, p.weight[0]);
    }
  };

  const int steps = (p.in + kDepth - 1) / kDepth;
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) load_stage(s);
    commit_copies();
  }

  const int warp = thread / kWarp, lane = thread % kWarp;
  const int warp_row = warp / (kBN / kWN) * kWM;
  const int warp_output = warp % (kBN / kWN) * kWN;
  float sums[kM][kN][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // the stage is there for all, and all are done with the one that is loaded next
    if (step + kStages - 1 < steps) load_stage(step + kStages - 1);
    commit_copies();
    T* const xs = ring + step % kStages * Tiling::kStageElements;
    T* const ws = xs + kBM * kDepth;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      std::uint32_t a[kM][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) load_matrices(a[i], swizzled(xs, warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        std::uint32_t b[4];  // two groups of 8 outputs, each with both halves of k
        load_matrices(b, swizzled(ws, warp_output + j * 8 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          multiply_add<T>(sums[i][j], a[i], b[0], b[1]);
          multiply_add<T>(sums[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  const bool swiglu = p.epilogue == Epilogue::kSwiglu;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (swiglu && j >= kN / 2) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + warp_row + i * 16 + lane / 4 + e / 2 * 8;
        const TileRow<kBN, kWN> at(p, tile, warp_output + j * 8 + lane % 4 * 2 + e % 2);
        if (row < rows) store_output<T>(p, row, at.column, sums[i][j][e], sums[i][(j + kN / 2) % kN][e]);
      }
    }
  }
}

// fp32 weights, for tests and small drafts: 64 × 64 outputs by 256 threads, 4 × 4 each, exact fp32 products.
constexpr int kSide = 64, kPer = 4, kSlice = 16;

__global__ void __launch_bounds__(256) gemm_fma(const __grid_constant__ GemmParams p) {
  __shared__ float xs[kSlice][kSide + 1];
  __shared__ float ws[kSlice][kSide + 1];
  const int rows = rows_of_launch(p);
  const int row0 = static_cast<int>(blockIdx.y) * kSide;
  if (row0 >= rows) return;
  const int tile = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int tx = thread % 16 * kPer, ty = thread / 16 * kPer;
  float sums[kPer][kPer] = {};
  for (int k0 = 0; k0 < p.in; k0 += kSlice) {
    for (int i = thread; i < kSide * kSlice; i += 256) {
      const int r = i / kSlice, k = k0 + i % kSlice;
      const float* const weights = TileRow<kSide, kPer>(p, tile, r).weights<float>(p);
      xs[i % kSlice][r] =
          row0 + r < rows && k < p.in ? static_cast<const float*>(p.x)[(row0 + r) * p.x_stride + k] : 0.0F;
      ws[i % kSlice][r] = weights != nullptr && k < p.in ? weights[k] : 0.0F;
    }
    __syncthreads();
    for (int k = 0; k < kSlice; ++k) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) sums[i][j] += xs[k][ty + i] * ws[k][tx + j];
      }
    }
    __syncthreads();
  }
  const bool swiglu = p.epilogue == Epilogue::kSwiglu;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      if ((swiglu && j >= kPer / 2) || row0 + ty + i >= rows) continue;
      const TileRow<kSide, kPer> at(p, tile, tx + j);
      store_output<float>(p, row0 + ty + i, at.column, sums[i][j], sums[i][(j + kPer / 2) % kPer]);
    }
  }
}

dim3 grid_of(const GemmParams& p, int tile_rows, int tile_outputs) {
  const bool swiglu = p.epilogue == Epilogue::kSwiglu;
  const int outputs = swiglu ? 2 * p.outputs[0] : p.outputs[0] + p.outputs[1] + p.outputs[2];
  return dim3(static_cast<unsigned>(ceil_div(outputs, tile_outputs)),
              static_cast<unsigned>(ceil_div(p.max_rows, tile_rows)));
}

template <typename T, typename Tiling, bool kAligned>
void launch_mma(const GemmParams& p, cudaStream_t stream) {
  // Per device and idempotent; cheap beside the launch, and allowed while capturing.
  EAGLEX_CUDA_CHECK(cudaFuncSetAttribute(gemm_mma<T, Tiling, kAligned>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(Tiling::kBytes)));
  launch("gemm", gemm_mma<T, Tiling, kAligned>,
         {grid_of(p, Tiling::kRows, Tiling::kOutputs), Tiling::kThreads, Tiling::kBytes, stream}, p);
}

bool aligned(const GemmParams& p) {
  bool ok = p.in % kChunk == 0 && p.x_stride % kChunk == 0 && reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0;
  for (const void* const weight : p.weight) ok = ok && reinterpret_cast<std::uintptr_t>(weight) % 16 == 0;
  return ok;
}

template <typename T>
void launch_typed(const GemmParams& p, cudaStream_t stream) {
  if (!aligned(p)) return launch_mma<T, MiddleTile, false>(p, stream);
  if (p.max_rows <= SkinnyTile::kRows) return launch_mma<T, SkinnyTile, true>(p, stream);
  if (p.max_rows <= MiddleTile::kRows) return launch_mma<T, MiddleTile, true>(p, stream);
  launch_mma<T, SquareTile, true>(p, stream);
}

}  // namespace

void gemm(DType type, const GemmParams& params, cudaStream_t stream) {
#ifdef EAGLEX_WITH_CUTLASS
  if (params.hopper_sms > 0 && params.pass == Pass::kExtendAll && hopper::gemm(type, params, stream)) return;
#endif
  if (type == DType::kBF16) return launch_typed<__nv_bfloat16>(params, stream);
  if (type == DType::kF16) return launch_typed<__half>(params, stream);
  launch("gemm", gemm_fma, {grid_of(params, kSide, kSide), 256, 0, stream}, params);
}

}  // namespace eaglex::cuda
