// Host side of every stream_gemm: problem -> config -> launch, with or without PDL.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/error.h"
#include "cuda/stream/check.h"
#include "cuda/stream/gemm.cuh"
#include "cuda/stream/steps.h"

namespace eaglex::stream {

// At least one block of every kernel of the chain, and each that touches anything of the cycle's, executes
// griddepcontrol.wait, so all may be launched with the attribute. All ask for the
// largest share of shared memory, needed or not: an SM must drain before its split changes, and kernels of two splits
// never overlap. Blocks come in clusters of `cluster`.
template <class... Parameters, class... Args>
void launch_clusters(const StreamPlan& plan, int cluster, void (*kernel)(Parameters...), dim3 grid, int threads,
                     int shared_bytes, cudaStream_t stream, const Args&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "carveout");
  if (shared_bytes > 0)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "shared memory");
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (plan.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, args...), "launch");
}

template <class... Parameters, class... Args>
void launch_chained(const StreamPlan& plan, void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                    cudaStream_t stream, const Args&... args) {
  launch_clusters(plan, 1, kernel, grid, threads, shared_bytes, stream, args...);
}

template <class Step>
[[nodiscard]] GemmProblem problem_of(const Tiles& tiles, int rows, int k, int segments, int tokens) {
  return {rows,
          k,
          segments,
          tokens,
          Step::kNormed,
          bits_of(tiles.precision),
          static_cast<int>(sizeof(typename Step::RowInfo)),
          Step::kStateBytes};
}

// Blocks of `kernel` that an SM of the current device holds. Asked once per kernel, size and number of SMs: the driver
// takes a microsecond.
inline int blocks_per_sm(const void* kernel, int num_sms, int shared_bytes, std::atomic<std::int64_t>& known) {
  const std::int64_t before = known.load(std::memory_order_relaxed);
  const std::int64_t key = static_cast<std::int64_t>(num_sms) << 32 | shared_bytes;
  if (before >> 8 == key) return static_cast<int>(before & 0xFF);
  int blocks = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, static_cast<std::size_t>(shared_bytes)),
      "occupancy");
  known.store(key << 8 | blocks, std::memory_order_relaxed);
  return blocks;
}

template <class Weights, int kTokenTiles, class Step>
void launch_tiled(const StreamPlan& plan, const GemmProblem& problem, const GemmConfig& config, GemmShape shape,
                  const typename Step::Params& params, cudaStream_t stream) {
  static std::atomic<std::int64_t> known = 0;
  auto* const kernel = stream_gemm<Weights, kTokenTiles, Step>;
  const SharedLayout layout =
      shared_layout(problem, config.token_tiles, config.chunk_k, config.stages, config.kept_chunks);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes),
        "shared memory");
  const int resident = plan.device.num_sms * blocks_per_sm(reinterpret_cast<const void*>(kernel), plan.device.num_sms,
                                                           config.shared_bytes, known);
  if (resident < config.grid) shape.reduction = Reduction::kLastArriver;
  launch_chained(plan, kernel, dim3(static_cast<unsigned>(config.grid)), kThreads, config.shared_bytes, stream, shape,
                 layout, params);
}

template <class Weights, class Step>
void launch_as(const StreamPlan& plan, const GemmProblem& problem, const GemmConfig& config, const GemmShape& shape,
               const typename Step::Params& params, cudaStream_t stream) {
  if constexpr (Step::kAlwaysFull) return launch_tiled<Weights, 8, Step>(plan, problem, config, shape, params, stream);
  switch (config.token_tiles) {
    case 1:
      if constexpr (Weights::kBits == 4) {
        if (config.kept_chunks > 0)
          return launch_tiled<BesideKeptX<Weights>, 1, Step>(plan, problem, config, shape, params, stream);
      }
      return launch_tiled<Weights, 1, Step>(plan, problem, config, shape, params, stream);
    case 2:
      return launch_tiled<Weights, 2, Step>(plan, problem, config, shape, params, stream);
    case 4:
      return launch_tiled<Weights, 4, Step>(plan, problem, config, shape, params, stream);
    case 8:
      return launch_tiled<Weights, 8, Step>(plan, problem, config, shape, params, stream);
    default:
      if constexpr (Step::kWideRows && Weights::kBits == 16) {
        return launch_tiled<Weights, 16, Step>(plan, problem, config, shape, params, stream);
      }
      fail(ErrorCode::kConfig, "tokens: expected at most ", kMaxTokens, ", got ", problem.tokens);
  }
}

// What a launch covers of a matrix: from a row on, with the tiles around them computed whole, and of its segments some.
struct Cover {
  int first_row = 0;
  int first_segment = 0;
  int stored_segments = 0;  // 0: all are covered
};

// Fills in what follows from the plan and the problem; `shape` brings gammas and eps. Returns the grid.
template <class Step>
int launch_gemm(const StreamPlan& plan, const Tiles& tiles, const GemmProblem& problem, const Cover& cover,
                GemmShape shape, const typename Step::Params& params, cudaStream_t stream) {
  const int first_row = cover.first_row;
  GemmProblem covered = problem;
  covered.wgmma = has_wgmma(plan.device);
  const int tile_rows = tile_rows_for(problem.tokens <= 16 ? 1 : 8);
  covered.rows += first_row % tile_rows;
  const GemmConfig config = configure(covered, plan.device);
  expect(tiles.data != nullptr, ErrorCode::kShape, "Linear::prepared", "tiles", "null");
  expect(Step::kLowBit || tiles.precision == Precision::kBf16, ErrorCode::kShape, "Linear::prepared", "tiles of bf16",
         bits_of(tiles.precision));
  shape.stored_segments = cover.stored_segments > 0 ? cover.stored_segments : problem.segments;
  shape.tiles = tiles.data + cover.first_segment * k_block_bytes(bits_of(tiles.precision), problem.k / kKBlock);
  shape.row_scales = tiles.row_scales;
  shape.ones = static_cast<const bf16*>(plan.ones);
  expect_range("rows of a matrix", first_row + problem.rows, 1, plan.needs.max_rows);
  expect_range("k of a row", static_cast<long long>(problem.k), 1, plan.needs.max_k);
  expect_range("segments", problem.segments, 1, plan.needs.max_segments);
  shape.k = problem.k;
  shape.segments = problem.segments;
  shape.tokens = problem.tokens;
  shape.first_row_tile = first_row / tile_rows;
  shape.chunks_per_segment = config.chunks_per_segment;
  shape.stages = config.stages;
  shape.split = config.split;
  shape.reduction = plan.reduction;
  if (tiles.precision == Precision::kInt4) shape.fill_ns = kFillNsInt4;
  if (config.token_tiles > 8) shape.in_flight = kInFlightAlone;
  if (config.kept_chunks > 0) shape.in_flight = kInFlightBesideX;
  shape.scatter = plan.reduction == Reduction::kOwner && sums_in_slices(problem, config);
  shape.partials = reinterpret_cast<float4*>(plan.partials);
  shape.counters = plan.counters;
  shape.needed = plan.needed;
  shape.never_wait = plan.never_wait;
  shape.words = plan.words;
  shape.broken = plan.broken;
  shape.failed = plan.failed;
  shape.num_live = plan.first_row > 0 ? plan.live.count : nullptr;
  shape.first_live = plan.first_row;
  switch (tiles.precision) {
    case Precision::kBf16:
      launch_as<Bf16Weights, Step>(plan, covered, config, shape, params, stream);
      break;
    case Precision::kFp8:
      if constexpr (Step::kLowBit) launch_as<Fp8Weights, Step>(plan, covered, config, shape, params, stream);
      break;
    case Precision::kInt4:
      if constexpr (Step::kLowBit) launch_as<Int4Weights, Step>(plan, covered, config, shape, params, stream);
      break;
  }
  return config.grid;
}

[[nodiscard]] inline const Tiles& tiles_of(const Linear& linear) {
  static constexpr Tiles kNone;
  return linear.prepared == nullptr ? kNone : *static_cast<const Tiles*>(linear.prepared);
}

// Rows of the parts of a matrix together.
[[nodiscard]] inline int rows_of(const Linear& linear) {
  std::int64_t rows = 0;
  for (int i = 0; i < linear.num_parts; ++i) rows += linear.parts[i].shape[0];
  return static_cast<int>(rows);
}

[[nodiscard]] inline int columns_of(const Linear& linear) {
  return static_cast<int>(linear.parts[0].shape[1]);
}

inline void expect_bf16(const char* field, const TensorView& tensor) {
  expect(tensor.dtype == DType::kBF16, ErrorCode::kShape, field, "bfloat16", name_of(tensor.dtype));
}

// What a step without state, rows of its own or work beside the stream leaves out.
struct PlainStep {
  struct RowInfo {};
  __device__ static bool rehearses(const auto&) { return false; }
  static constexpr int kStateBytes = 0;
  static constexpr bool kSliced = false;      // blocks that share a tile may finish parts of it (scatter.cuh)
  static constexpr bool kWideRows = false;    // launches of more than 64 rows come
  static constexpr bool kLowBit = true;       // its matrix may be FP8 or INT4
  static constexpr bool kMayBeEarly = false;  // x may be there before the kernels that its blocks wait for are done
  static constexpr bool kAlwaysFull = false;  // no launch has fewer than 64 rows
  template <int kTokenTiles>
  __device__ static void begin(std::byte*) {}
  template <int kTokenTiles>
  __device__ static void end(const auto&, const WarpRole&, int, std::byte*) {}
  template <int kTokenTiles>
  __device__ static void touch_inputs(const auto&, const auto&) {}
  template <int kTokenTiles>
  __device__ static void beside(const auto&, const bf16* const*, int, int) {}
};

}  // namespace eaglex::stream
