// attention: softmax(q kᵀ / √D) v over the prefix in the paged pool and the node's ancestors in the scratch.
// Formula: reference.py attention. Caller: Backend::attention. Bytes: K and V of each lane's prefix once per 16 packed query rows.
// Mapping: one block per SM works through items (lane, KV head, 16 packed query rows, part of the keys); query heads share the keys
// (GQA). Each of four warps takes every fourth group of 16 keys through its own ring; S and P stay in registers. Parts are combined
// in a fixed order by whoever is last.
#include <cmath>

#include "cuda/stream/attention.h"
#include "cuda/stream/launch.cuh"
#include "cuda/stream/place.cuh"

namespace eaglex::stream {
namespace {

constexpr int kKeys = 16;  // of one step of a warp
constexpr int kThreadsOfBlock = kAttentionWarps * 32;
constexpr int kMaskWords = kMaxSteps * kMaxTopk / 32;

struct AttentionArgs {
  EngineContext context;
  const DraftBatch* batch;
  Rows rows;
  AttentionGrid grid;
  int layer;
  float scale;  // log2(e) / √D
  const bf16* q;
  const bf16* scratch_k;
  const bf16* scratch_v;
  bf16* out;
  std::uint32_t* counters;
  float* partials;
};

// The keys of one lane: first the prefix in the pool, then the nodes that this cycle has written to the scratch.
struct Keys {
  const std::int32_t* table = nullptr;  // of the lane's request: position -> slot
  const bf16* pool_k = nullptr;
  const bf16* pool_v = nullptr;
  const bf16* scratch_k = nullptr;  // of the lane
  const bf16* scratch_v = nullptr;
  std::int64_t slots = 0;
  int prefix = 0;
  int total = 0;
};

constexpr std::int64_t kNowhere = -1;

// Row of key `i` in the pool, or in the scratch as -2 - row; kNowhere where there is no K and V.
__device__ __forceinline__ std::int64_t row_of(const Keys& keys, int i) {
  if (i >= keys.total) return kNowhere;
  if (i >= keys.prefix) return -2 - static_cast<std::int64_t>(i - keys.prefix);
  const std::int64_t slot = keys.table[i];
  return slot >= 0 && slot < keys.slots ? slot : kNowhere;
}

__device__ __forceinline__ void copy_or_zero(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

template <int kDim>
struct Layout {
  static constexpr int kStride = kDim * 2 + 16;  // bytes; an odd number of 16-byte units: ldmatrix without bank conflicts
  static constexpr int kStage = 2 * kKeys * kStride;
  static constexpr int kRing = kDim <= 128 ? 3 : 2;
  static constexpr int kShared = kAttentionWarps * kRing * kStage;
  static_assert(kShared >= kAttentionWarps * kPackedRows * (kDim + 2) * 4, "the warps' sums reuse the ring");
};

// K and V of 16 keys into a stage; lane i < 16 brings the row of key i.
template <int kDim>
__device__ __forceinline__ void fetch(const Keys& keys, std::int64_t row, int width, int head, std::uint32_t stage, int lane) {
  constexpr int kUnits = kDim / 8;
#pragma unroll
  for (int i = 0; i < kKeys * kUnits / 32; ++i) {
    const int key = (i * 32 + lane) / kUnits;
    const int unit = (i * 32 + lane) % kUnits;
    const std::int64_t from = __shfl_sync(0xFFFFFFFF, row, key);
    const bool scratch = from < kNowhere;
    const std::int64_t offset = (from == kNowhere ? 0 : scratch ? -2 - from : from) * width + head * kDim + unit * 8;
    const std::uint32_t to = stage + key * Layout<kDim>::kStride + unit * 16;
    copy_or_zero(to, (scratch ? keys.scratch_k : keys.pool_k) + offset, from != kNowhere);
    copy_or_zero(to + kKeys * Layout<kDim>::kStride, (scratch ? keys.scratch_v : keys.pool_v) + offset, from != kNowhere);
  }
}

__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

// A warp's running softmax over 16 packed query rows: lane (g, q) has rows g and g + 8.
template <int kDim>
struct Running {
  float sums[kDim / 8][4] = {};
  float maximum[2] = {-1e30F, -1e30F};  // finite, so that a row that has seen nothing yet scales by exp2(0)
  float total[2] = {};

  // Scores of 16 keys (two n8 tiles), -infinity where a row does not see a key.
  __device__ __forceinline__ void take(float (&scores)[2][4], std::uint32_t values, int lane) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float best = fmaxf(fmaxf(scores[0][2 * r], scores[0][2 * r + 1]), fmaxf(scores[1][2 * r], scores[1][2 * r + 1]));
      best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFF, best, 1));
      best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFF, best, 2));
      best = fmaxf(best, maximum[r]);
      factor[r] = exp2f(maximum[r] - best);
      maximum[r] = best;
      total[r] *= factor[r];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[t][2 * r + i];
          score = exp2f(score - best);
          total[r] += score;
        }
      }
    }
    const std::uint32_t p[4] = {pack(scores[0][0], scores[0][1]), pack(scores[0][2], scores[0][3]), pack(scores[1][0], scores[1][1]),
                                pack(scores[1][2], scores[1][3])};
    const std::uint32_t at = values + lane % 16 * Layout<kDim>::kStride + lane / 16 * 16;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      std::uint32_t v[4];
      load_matrices_transposed(v, at + d * 32);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float(&sum)[4] = sums[2 * d + t];
        sum[0] *= factor[0], sum[1] *= factor[0], sum[2] *= factor[1], sum[3] *= factor[1];
        mma_bf16(sum, p, v[2 * t], v[2 * t + 1]);
      }
    }
  }
};

// Packed query row `p` of the block: row of the launch and query head, or false beyond the last.
struct Packing {
  int first_row;  // of the lane
  int first_head;
  int group;
  int width;
  int rows;
  int offset;  // 16 · pack

  __device__ __forceinline__ bool find(int p, int& row, int& head) const {
    const int i = offset + p;
    row = first_row + i / group;
    head = first_head + i % group;
    return i < width * group && row < rows;
  }
};

// Weight of a part with maximum `maximum` among parts with `best`.
__device__ __forceinline__ float weight_of(float maximum, float best) { return exp2f(maximum - best); }

template <int kDim>
__device__ __forceinline__ void attend(const AttentionArgs& args, const Packing& packing, const Keys& keys, const std::uint32_t (*visible)[kMaskWords],
                                       int kv_head, int split, std::uint32_t ring, int warp, int lane, Running<kDim>& running) {
  const int width = args.context.config.kv_size();
  const int g = lane / 4;
  const int q = lane % 4;
  std::uint32_t query[kDim / 16][4];
  int tree_row[2];  // which row's ancestors the packed rows g and g + 8 see
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row;
    int head;
    const bool inside = packing.find(g + 8 * r, row, head);
    tree_row[r] = inside ? row - packing.first_row : 0;
    const bf16* const from = args.q + (static_cast<std::int64_t>(row) * args.context.config.num_heads + head) * kDim + q * 2;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      query[d][r] = inside ? *reinterpret_cast<const std::uint32_t*>(from + d * 16) : 0;
      query[d][r + 2] = inside ? *reinterpret_cast<const std::uint32_t*>(from + d * 16 + 8) : 0;
    }
  }

  const int steps = (keys.total + kKeys - 1) / kKeys;
  const int begin = static_cast<int>(static_cast<std::int64_t>(split) * steps / args.grid.splits) + warp;
  const int end = static_cast<int>(static_cast<std::int64_t>(split + 1) * steps / args.grid.splits);
  constexpr int kRing = Layout<kDim>::kRing;
  const auto look_up = [&](int step) { return row_of(keys, step < end ? step * kKeys + lane % kKeys : keys.total); };
  const auto fetch_step = [&](int step, std::int64_t row, int stage) {
    if (step < end) fetch<kDim>(keys, row, width, kv_head, ring + stage * Layout<kDim>::kStage, lane);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  // Rows are looked up one step before they are fetched: two dependent reads would else stand in the way of each step.
  std::int64_t rows[kRing];  // of the step at hand and those in flight
#pragma unroll
  for (int i = 0; i < kRing; ++i) rows[i] = look_up(begin + i * kAttentionWarps);
#pragma unroll
  for (int i = 0; i < kRing - 1; ++i) fetch_step(begin + i * kAttentionWarps, rows[i], i);
  int stage = 0;
  int free_stage = kRing - 1;
  for (int step = begin; step < end; step += kAttentionWarps) {
    const std::int64_t current = rows[0];
    fetch_step(step + (kRing - 1) * kAttentionWarps, rows[kRing - 1], free_stage);
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) rows[i] = rows[i + 1];
    rows[kRing - 1] = look_up(step + kRing * kAttentionWarps);
    asm volatile("cp.async.wait_group %0;" ::"n"(kRing - 1) : "memory");
    __syncwarp();

    const std::uint32_t k_at = ring + stage * Layout<kDim>::kStage;
    const std::uint32_t at = k_at + (lane % 8 + lane / 16 * 8) * Layout<kDim>::kStride + lane / 8 % 2 * 16;
    float scores[2][4] = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      std::uint32_t k[4];
      load_matrices(k, at + d * 32);
      mma_bf16(scores[0], query[d], k[0], k[1]);
      mma_bf16(scores[1], query[d], k[2], k[3]);
    }
    const std::uint32_t present = __ballot_sync(0xFFFFFFFF, current != kNowhere);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int in_step = t * 8 + q * 2 + i % 2;
        const int node = step * kKeys + in_step - keys.prefix;
        bool seen = present >> in_step & 1;
        if (seen && node >= 0) seen = visible[tree_row[i / 2]][node / 32] >> (node % 32) & 1;
        scores[t][i] = seen ? scores[t][i] * args.scale : __int_as_float(0xFF800000);
      }
    }
    running.take(scores, k_at + kKeys * Layout<kDim>::kStride, lane);
    __syncwarp();
    free_stage = stage;
    stage = stage + 1 == kRing ? 0 : stage + 1;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Where a block's or a warp's sums lie: [16][kDim] sums, then [16] maxima, then [16] totals.
template <int kDim>
struct Part {
  float* at;
  __device__ float& sum(int row, int dim) const { return at[row * kDim + dim]; }
  __device__ float& maximum(int row) const { return at[kPackedRows * kDim + row]; }
  __device__ float& total(int row) const { return at[kPackedRows * (kDim + 1) + row]; }
};

enum class Where : bool { kShared, kGlobal };

// Parts that other blocks wrote are read past L1.
template <Where kWhere, class T>
__device__ __forceinline__ T load(const T* from) {
  if constexpr (kWhere == Where::kGlobal) return __ldcg(from);
  return *from;
}

// Combines `count` (at most kMaxSplits) parts, `stride` floats apart, of the first `rows` rows; gives `put` four dims at a time:
// (row, dim, sums, maximum, total). `weights` [16][kMaxSplits + 2] in shared memory. Ends with all threads past their reads.
template <int kDim, Where kWhere, class Put>
__device__ __forceinline__ void combine(float* first, std::size_t stride, int count, int rows, float (*weights)[kMaxSplits + 2], Put put) {
  // A thread per row and part: its weight, and by its lane 0 the row's maximum and total in the order of the parts.
  for (int i = threadIdx.x; i < kPackedRows * kMaxSplits; i += kThreadsOfBlock) {
    const int row = i / kMaxSplits;
    const int p = i % kMaxSplits;
    const bool there = row < rows && p < count;
    const Part<kDim> part{first + (there ? p : 0) * stride};
    const float maximum = there ? load<kWhere>(&part.maximum(row)) : -1e30F;
    const float total = there ? load<kWhere>(&part.total(row)) : 0.0F;
    float best = maximum;
#pragma unroll
    for (int offset = kMaxSplits / 2; offset > 0; offset /= 2) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFF, best, offset));
    const float weight = there ? weight_of(maximum, best) : 0.0F;
    float sum = weight * total;
#pragma unroll
    for (int offset = kMaxSplits / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
    weights[row][p] = weight;
    if (p == 0) weights[row][kMaxSplits] = best, weights[row][kMaxSplits + 1] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * (kDim / 4); i += kThreadsOfBlock) {
    const int row = i / (kDim / 4);
    const int dim = i % (kDim / 4) * 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int p = 0; p < count; ++p) {
      const float weight = weights[row][p];
      const float4 x = load<kWhere>(reinterpret_cast<const float4*>(&Part<kDim>{first + p * stride}.sum(row, dim)));
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y), sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
    }
    put(row, dim, sum, weights[row][kMaxSplits], weights[row][kMaxSplits + 1]);
  }
  __syncthreads();
}

// Lane (g, q)'s sums into the warp's part, whole rows of it.
template <int kDim>
__device__ __forceinline__ void store(const Running<kDim>& running, const Part<kDim>& part, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float total = running.total[r];
    total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
    if (lane % 4 == 0) part.maximum(row) = running.maximum[r], part.total(row) = total;
#pragma unroll
    for (int t = 0; t < kDim / 8; ++t) {
      *reinterpret_cast<float2*>(&part.sum(row, t * 8 + lane % 4 * 2)) = make_float2(running.sums[t][2 * r], running.sums[t][2 * r + 1]);
    }
  }
}

// Which nodes of the scratch each row of the lane sees.
__device__ __forceinline__ void mark_ancestors(const AttentionArgs& args, int first_row, std::uint32_t (*visible)[kMaskWords]) {
  for (int i = threadIdx.x; i < kMaxTopk * kMaskWords; i += kThreadsOfBlock) visible[i / kMaskWords][i % kMaskWords] = 0;
  __syncthreads();
  const std::int32_t* const nodes = args.context.lanes.ancestors[(args.rows.step - 1) % 2];
  const int steps = args.context.speculation.num_steps;
  for (int i = threadIdx.x; i < args.grid.width * args.rows.step; i += kThreadsOfBlock) {
    const int row = i / args.rows.step;
    const int seen = nodes[static_cast<std::int64_t>(first_row + row) * steps + i % args.rows.step];
    atomicOr(&visible[row][seen / 32], 1U << (seen % 32));
  }
  __syncthreads();
}

__device__ __forceinline__ Keys keys_of(const AttentionArgs& args, const DraftBatch& batch, int first_row) {
  const EngineContext& context = args.context;
  touch_place(context, args.batch, args.rows, first_row);
  touch(context.kv.k + args.layer);
  touch(context.kv.v + args.layer);
  const RowPlace place = locate(context, batch, args.rows, first_row);
  Keys keys;
  if (!place.live) return keys;
  const bool step = args.rows.pass == Pass::kStep;
  const std::int64_t node = static_cast<std::int64_t>(place.lane) * context.speculation.num_scratch_nodes() * context.config.kv_size();
  keys.table = context.kv.req_to_token + batch.req_pool_indices[place.lane] * context.kv.max_context;
  keys.pool_k = static_cast<const bf16*>(context.kv.k[args.layer]);
  keys.pool_v = static_cast<const bf16*>(context.kv.v[args.layer]);
  keys.scratch_k = args.scratch_k + node;
  keys.scratch_v = args.scratch_v + node;
  keys.slots = context.kv.num_kv_slots;
  const std::int64_t prefix = step ? context.lanes.new_len[place.lane] : place.position + 1;
  keys.prefix = static_cast<int>(prefix < context.kv.max_context ? prefix : context.kv.max_context);
  keys.total = keys.prefix + (step ? args.rows.step * context.speculation.topk : 0);
  return keys;
}

template <int kDim>
__device__ __forceinline__ void work(const AttentionArgs& args, const DraftBatch& batch, int task, int split, std::byte* shared,
                                     std::uint32_t (*visible)[kMaskWords], float (*weights)[kMaxSplits + 2], bool* last) {
  const EngineContext& context = args.context;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int kv_heads = context.config.num_kv_heads;
  const int kv_head = task % kv_heads;
  const int pack_index = task / kv_heads % args.grid.packs;
  const int first_row = task / kv_heads / args.grid.packs * args.grid.width;
  const int group = context.config.num_heads / kv_heads;
  const Packing packing{first_row, kv_head * group, group, args.grid.width, args.rows.max_rows, pack_index * kPackedRows};
  const Keys keys = keys_of(args, batch, first_row);
  if (args.rows.pass == Pass::kStep && keys.total > 0) mark_ancestors(args, first_row, visible);

  constexpr std::size_t kSlot = attention_slot_floats(kDim);
  float* const warps = reinterpret_cast<float*>(shared);  // the ring becomes room for the warps' sums
  {
    Running<kDim> running;
    const std::uint32_t ring = shared_address(shared) + warp * Layout<kDim>::kRing * Layout<kDim>::kStage;
    attend<kDim>(args, packing, keys, visible, kv_head, split, ring, warp, lane, running);
    __syncthreads();
    store(running, Part<kDim>{warps + warp * kSlot}, lane);
    __syncthreads();
  }

  const int used = min(kPackedRows, packing.width * packing.group - packing.offset);
  const auto write = [&](int p, int dim, const float4& sum, float, float total) {
    int row;
    int head;
    if (!packing.find(p, row, head)) return;
    const float norm = total == 0 ? 0.0F : 1 / total;  // a row that is not live has seen nothing: zeros
    const uint2 packed = make_uint2(pack(sum.x * norm, sum.y * norm), pack(sum.z * norm, sum.w * norm));
    *reinterpret_cast<uint2*>(args.out + (static_cast<std::int64_t>(row) * context.config.num_heads + head) * kDim + dim) = packed;
  };
  if (args.grid.splits == 1) return combine<kDim, Where::kShared>(warps, kSlot, kAttentionWarps, used, weights, write);

  float* const first = args.partials + static_cast<std::size_t>(task) * args.grid.splits * kSlot;
  const Part<kDim> part{first + split * kSlot};
  combine<kDim, Where::kShared>(warps, kSlot, kAttentionWarps, used, weights, [&](int row, int dim, const float4& sum, float maximum, float total) {
    __stcg(reinterpret_cast<float4*>(&part.sum(row, dim)), sum);
    if (dim == 0) __stcg(&part.maximum(row), maximum), __stcg(&part.total(row), total);
  });
  if (threadIdx.x == 0) {
    const auto others = static_cast<std::uint32_t>(args.grid.splits - 1);
    *last = increment_wrapping(args.counters + task, others) == others;
  }
  __syncthreads();
  if (*last) combine<kDim, Where::kGlobal>(first, kSlot, args.grid.splits, used, weights, write);
  __syncthreads();  // `last` and the ring serve the next item
}

template <int kDim>
__global__ void __launch_bounds__(kThreadsOfBlock) attention_kernel(const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint32_t visible[kMaxTopk][kMaskWords];
  __shared__ float weights[kPackedRows][kMaxSplits + 2];
  __shared__ bool last;
  release_dependents();
  wait_for_producers();
  const DraftBatch& batch = *args.batch;
  for (int item = blockIdx.x; item < args.grid.tasks * args.grid.splits; item += gridDim.x) {
    work<kDim>(args, batch, item / args.grid.splits, item % args.grid.splits, shared, visible, weights, &last);
  }
}

template <int kDim>
void launch(const StreamPlan& plan, const AttentionArgs& args, cudaStream_t stream) {
  constexpr int kStatic = 2048;  // masks and weights
  const int shared = std::min(std::max(Layout<kDim>::kShared, slot_bytes(plan.device, Slot::kWide) - kStatic), plan.device.shared_per_block - kStatic);
  expect(shared >= Layout<kDim>::kShared, ErrorCode::kConfig, "shared_per_block", Layout<kDim>::kShared + kStatic, plan.device.shared_per_block);
  launch_chained(plan, attention_kernel<kDim>, dim3(static_cast<unsigned>(plan.device.num_sms)), kThreadsOfBlock, shared, stream, args);
}

}  // namespace

void launch_attention(const StreamPlan& plan, const AttentionParams& params, const EngineContext& context, const DraftBatch* batch,
                      cudaStream_t stream) {
  const DraftConfig& config = context.config;
  expect(context.kv.dtype == DType::kBF16, ErrorCode::kConfig, "kv.dtype", "bfloat16", name_of(context.kv.dtype));
  expect(config.head_dim == plan.needs.head_dim, ErrorCode::kConfig, "head_dim", plan.needs.head_dim, config.head_dim);
  expect_range("rows", params.rows.max_rows, 1, kMaxTokens);
  const int width = params.rows.pass == Pass::kStep ? context.speculation.topk : 1;
  AttentionArgs args{};
  args.context = context;
  args.batch = batch;
  args.rows = params.rows;
  args.grid = attention_grid(plan.device.num_sms, params.rows.max_rows, width, config.num_heads / config.num_kv_heads, config.num_kv_heads);
  args.layer = params.layer;
  args.scale = 1.4426950408889634F / std::sqrt(static_cast<float>(config.head_dim));
  args.q = static_cast<const bf16*>(params.q);
  args.scratch_k = static_cast<const bf16*>(params.scratch_k);
  args.scratch_v = static_cast<const bf16*>(params.scratch_v);
  args.out = static_cast<bf16*>(params.out);
  args.counters = reinterpret_cast<std::uint32_t*>(plan.attention_partials);
  args.partials = reinterpret_cast<float*>(plan.attention_partials + attention_counter_bytes(plan.device));
  switch (config.head_dim) {
    case 64: return launch<64>(plan, args, stream);
    case 96: return launch<96>(plan, args, stream);
    case 128: return launch<128>(plan, args, stream);
    case 256: return launch<256>(plan, args, stream);
    default: fail(ErrorCode::kConfig, "head_dim: expected 64, 96, 128 or 256, got ", config.head_dim);
  }
}

}  // namespace eaglex::stream
