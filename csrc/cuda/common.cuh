// What every file of this room shares: error checks, launches, number types, reductions over a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "core/error.h"
#include "core/lane.h"
#include "cuda/check.h"
#include "cuda/guards.h"

namespace eaglex::cuda {

#define EAGLEX_CUDA_CHECK(call) ::eaglex::cuda::check((call), #call)

// kDependent: as soon as the kernel before it allows (griddepcontrol.launch_dependents). Needs sm_90, and a kernel that
// waits (griddepcontrol.wait) before it reads or writes anything.
enum class Begin : bool { kAfterTheOneBefore, kDependent };

struct Launch {
  dim3 grid;
  unsigned block = 1;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  Begin begin = Begin::kAfterTheOneBefore;
};

template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), const Launch& shape, Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.block);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cudaLaunchAttribute attribute{};
  if (shape.begin == Begin::kDependent) {
    // An SM must drain before its split between L1 and shared memory changes: all of a chain ask for the same.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          name);
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), name);
}

// What every kernel of the chain needs: the bound context by value, and the parameter block, which lies at a fixed
// device address. drafting[s] says whether any lane still drafts in step s (0: the extend's last rows): cleared with
// the block, raised by admit and select. Where it is 0 the kernels of that step return at once.
struct Chain {
  EngineContext context;
  const DraftBatch* batch = nullptr;
  std::int32_t* drafting = nullptr;  // [kMaxSteps + 1]
};

// A launch may cover part of a pass: rows [first, first + count) of `rows`.
struct RowRange {
  Rows rows;
  int first = 0;
  int count = 0;
};

// The flag of a pass, null where the pass always runs.
__host__ __device__ inline const std::int32_t* drafting_flag(const std::int32_t* drafting, const Rows& rows) {
  if (rows.pass == Pass::kExtendAll) return nullptr;
  return drafting + (rows.pass == Pass::kExtendLast ? 0 : rows.step);
}

// Rows of the pass that the batch has, dead ones included; the launch is sized for more. None where nobody drafts.
__device__ inline int rows_of_pass(const DraftBatch& batch, Pass pass, int topk, const std::int32_t* drafting) {
  if (pass == Pass::kExtendAll) return batch.num_rows;
  if (*drafting == 0) return 0;
  return pass == Pass::kExtendLast ? batch.batch : batch.batch * topk;
}
__device__ inline int rows_of_pass(const Chain& chain, const Rows& rows) {
  return rows_of_pass(*chain.batch, rows.pass, chain.context.speculation.topk, drafting_flag(chain.drafting, rows));
}

constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// ----------------------------------------------------------------------------------------------------- number types

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ inline float load_float(const void* data, DType type, std::int64_t i) {
  switch (type) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF16:
      return to_float(static_cast<const __half*>(data)[i]);
    default:
      return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
}

__device__ inline void store_float(void* data, DType type, std::int64_t i, float x) {
  switch (type) {
    case DType::kF32:
      static_cast<float*>(data)[i] = x;
      break;
    case DType::kF16:
      static_cast<__half*>(data)[i] = from_float<__half>(x);
      break;
    default:
      static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(x);
      break;
  }
}

// x as it comes back after having been stored as `type`.
__device__ inline float rounded(DType type, float x) {
  if (type == DType::kF16) return to_float(from_float<__half>(x));
  if (type == DType::kBF16) return to_float(from_float<__nv_bfloat16>(x));
  return x;
}

// Calls f with a null pointer of the C++ type that `type` names.
template <typename F>
void dispatch(DType type, F&& f) {
  switch (type) {
    case DType::kF32:
      return f(static_cast<float*>(nullptr));
    case DType::kF16:
      return f(static_cast<__half*>(nullptr));
    case DType::kBF16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    default:
      fail(ErrorCode::kConfig, "dtype: expected float32, float16 or bfloat16, got ", name_of(type));
  }
}

// ------------------------------------------------------------------------------------------------------- reductions

inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;
inline constexpr int kWarp = 32;

// Sum over the block in a fixed order, the same in every thread. `shared` has a value per warp; at most 1024 threads.
template <typename V>
__device__ V block_sum(V value, V* shared) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  __syncthreads();  // `shared` may still be read from the last time
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  V sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += shared[warp];
  return sum;
}

// A score and the index that it belongs to.
struct Ranked {
  float value = -INFINITY;
  int index = INT32_MAX;
};

// Order of selection: larger value first, ties by the lower index. A NaN comes before nothing.
__device__ inline bool comes_before(const Ranked& a, const Ranked& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The first of the block in that order, in every thread.
__device__ inline Ranked block_first(Ranked best, Ranked* shared) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Ranked other{__shfl_xor_sync(kFullWarp, best.value, offset), __shfl_xor_sync(kFullWarp, best.index, offset)};
    if (comes_before(other, best)) best = other;
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = best;
  __syncthreads();
  best = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) {
    if (comes_before(shared[warp], best)) best = shared[warp];
  }
  return best;
}

}  // namespace eaglex::cuda
