// attention: softmax(q kᵀ / √D) v over the prefix in the paged pool and the node's ancestors in the scratch.
// Formula: reference.py attention. Caller: Backend::attention. Bytes: K and V of each lane's prefix once per 16 packed
// query rows.
// Mapping: two blocks per SM work through items (lane, KV head, 16 packed query rows, part of the keys); query heads
// share the keys (GQA). Each of four warps takes every fourth group of 16 keys through its own ring; S and P stay in
// registers. Parts are combined in a fixed order by whoever is last.
#include <cmath>

#include "cuda/stream/attention.cuh"

namespace eaglex::stream {
namespace {

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

// Combines `count` (at most kMost) parts, `stride` floats apart, of the first `rows` rows; gives `put` four dims
// at a time: (row, dim, sums, maximum, total). `weights` [16][kMaxSplits + 2] in shared memory. Ends with all threads
// past their reads.
template <int kDim, Where kWhere, int kMost, class Put>
__device__ __forceinline__ void combine(float* first, std::size_t stride, int count, int rows,
                                        float (*weights)[kMaxSplits + 2], Put put) {
  // A thread per row and part: its weight, and by its lane 0 the row's maximum and total in the order of the parts.
  // Whole warps: rows that are not used cost as much as those that are.
  const int entries = kMost % 32 == 0 ? rows * kMost : kPackedRows * kMost;
  for (int i = threadIdx.x; i < entries; i += kThreadsOfBlock) {
    const int row = i / kMost;
    const int p = i % kMost;
    const bool there = row < rows && p < count;
    const Part<kDim> part{first + (there ? p : 0) * stride};
    const float maximum = there ? load<kWhere>(&part.maximum(row)) : -1e30F;
    const float total = there ? load<kWhere>(&part.total(row)) : 0.0F;
    float best = maximum;
#pragma unroll
    for (int offset = kMost / 2; offset > 0; offset /= 2) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFF, best, offset));
    const float weight = there ? weight_of(maximum, best) : 0.0F;
    float sum = weight * total;
#pragma unroll
    for (int offset = kMost / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
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
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y), sum.z = fmaf(weight, x.z, sum.z),
      sum.w = fmaf(weight, x.w, sum.w);
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
      *reinterpret_cast<float2*>(&part.sum(row, t * 8 + lane % 4 * 2)) =
          make_float2(running.sums[t][2 * r], running.sums[t][2 * r + 1]);
    }
  }
}

// Which nodes of the scratch each row of the lane sees.
__device__ __forceinline__ void mark_ancestors(const AttentionArgs& args, int first_row,
                                               std::uint32_t (*visible)[kMaskWords]) {
  for (int i = threadIdx.x; i < kMaxTopk * kMaskWords; i += kThreadsOfBlock)
    visible[i / kMaskWords][i % kMaskWords] = 0;
  __syncthreads();
  const std::int32_t* const nodes = args.context.lanes.ancestors[(args.rows.step - 1) % 2];
  const int steps = args.context.speculation.num_steps;
  for (int i = threadIdx.x; i < args.grid.width * args.rows.step; i += kThreadsOfBlock) {
    const int row = i / args.rows.step;
    const int seen = __ldcg(nodes + static_cast<std::int64_t>(first_row + row) * steps + i % args.rows.step);
    atomicOr(&visible[row][seen / 32], 1U << (seen % 32));
  }
  __syncthreads();
}

__device__ __forceinline__ Keys keys_of(const AttentionArgs& args, const DraftBatch& batch, int first_row) {
  const EngineContext& context = args.context;
  Keys keys;
  const bool step = args.rows.pass == Pass::kStep;
  const RowPlace place = step                                  ? place_of(context, batch, args.rows, first_row).place
                         : args.rows.pass == Pass::kExtendLast ? last_place(context, batch, first_row)
                                                               : locate(context, batch, args.rows, first_row);
  if (!place.live) return keys;
  const std::int64_t node =
      static_cast<std::int64_t>(place.lane) * context.speculation.num_scratch_nodes() * context.config.kv_size();
  keys.table = context.kv.req_to_token + load_past_l1(batch.req_pool_indices, place.lane) * context.kv.max_context;
  keys.pool_k = args.pool_k;
  keys.pool_v = args.pool_v;
  keys.scratch_k = args.scratch_k + node;
  keys.scratch_v = args.scratch_v + node;
  keys.slots = context.kv.num_kv_slots;
  const std::int64_t prefix = step ? place.position - args.rows.step + 1 : place.position + 1;
  keys.prefix = static_cast<int>(prefix < context.kv.max_context ? prefix : context.kv.max_context);
  keys.total = keys.prefix + (step ? args.rows.step * context.speculation.topk : 0);
  // The projections of this pass write the nodes of a step; the last rows' keys were written one launch earlier.
  keys.settled = step                                                      ? keys.total - context.speculation.topk
                 : args.rows.pass == Pass::kExtendLast && !args.last_fresh ? keys.total + kKeys
                 : args.rows.pass == Pass::kExtendLast ? keys.total - load_past_l1(batch.num_valid + place.lane)
                                                       : 0;
  return keys;
}

template <int kDim, int kRing>
__device__ __forceinline__ void work(const AttentionArgs& args, const DraftBatch& batch, int task, int split,
                                     int splits, std::byte* shared, std::uint32_t (*visible)[kMaskWords],
                                     float (*weights)[kMaxSplits + 2], bool* last, Producers producers) {
  const EngineContext& context = args.context;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int kv_heads = context.config.num_kv_heads;
  const int kv_head = task % kv_heads;
  const int pack_index = task / kv_heads % args.grid.packs;
  const int first_row = task / kv_heads / args.grid.packs * args.grid.width;
  const int group = context.config.num_heads / kv_heads;
  const Packing packing{first_row,       kv_head * group,    group,
                        args.grid.width, args.rows.max_rows, pack_index * kPackedRows};
  const Keys keys = keys_of(args, batch, first_row);
  if (args.rows.pass == Pass::kStep && keys.total > 0) mark_ancestors(args, first_row, visible);

  constexpr std::size_t kSlot = attention_slot_floats(kDim);
  float* const warps = reinterpret_cast<float*>(shared);  // the ring becomes room for the warps' sums
  {
    Running<kDim> running;
    const std::uint32_t ring = shared_address(shared) + warp * kRing * kStageBytes<kDim>;
    attend<kDim, kRing>(args, packing, keys, visible, kv_head, split, splits, ring, warp, lane, producers, running);
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
    *reinterpret_cast<uint2*>(args.out + (static_cast<std::int64_t>(row) * context.config.num_heads + head) * kDim +
                              dim) = packed;
  };
  if (splits == 1)
    return combine<kDim, Where::kShared, kAttentionWarps>(warps, kSlot, kAttentionWarps, used, weights, write);

  float* const first = args.partials + static_cast<std::size_t>(task) * splits * kSlot;
  const Part<kDim> part{first + split * kSlot};
  combine<kDim, Where::kShared, kAttentionWarps>(warps, kSlot, kAttentionWarps, used, weights,
                                                 [&](int row, int dim, const float4& sum, float maximum, float total) {
                                                   __stcg(reinterpret_cast<float4*>(&part.sum(row, dim)), sum);
                                                   if (dim == 0)
                                                     __stcg(&part.maximum(row), maximum),
                                                         __stcg(&part.total(row), total);
                                                 });
  if (threadIdx.x == 0) {
    const auto others = static_cast<std::uint32_t>(splits - 1);
    *last = increment_wrapping(args.counters + task, others) == others;
  }
  __syncthreads();
  if (*last) combine<kDim, Where::kGlobal, kMaxSplits>(first, kSlot, splits, used, weights, write);
  __syncthreads();  // `last` and the ring serve the next item
}

// Of how many parts the keys of each task are: by the longest context of the batch, so that all blocks find the same.
__device__ __forceinline__ int splits_of(const AttentionArgs& args, const DraftBatch& batch) {
  if (args.lanes == 0) return args.grid.splits[0];
  const int batch_size = __ldcg(&batch.batch);
  std::int64_t longest = 0;
  for (int i = threadIdx.x % 32; i < args.lanes; i += 32) {
    const std::int64_t length = load_past_l1(args.context.lanes.new_len + i);
    if (i < batch_size && length > longest) longest = length;
  }
  const std::int64_t most = args.context.kv.max_context;
  const auto length = static_cast<unsigned>(longest < most ? longest : most);
  return args.grid.splits[length_class(__reduce_max_sync(0xFFFFFFFF, length))];
}

// Lengths, tables and ancestors are read before the wait. Two conditions make that right: qkv, which stands before,
// releases this kernel only after its own wait, so all that select and admit wrote lies in L2; and what an earlier
// launch left in this SM's L1 is not looked at: all of it is read past L1. The places of several layers' extends
// (Pass::kExtendAll) are read through L1: admit, which writes them, begins when all before it is done, and nobody looks
// at them until fuse has waited for admit.
template <int kDim, int kRing>
__global__ void __launch_bounds__(kThreadsOfBlock) attention_kernel(const __grid_constant__ AttentionArgs args) {
#if EAGLEX_STREAM_KERNELS
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint32_t visible[kMaxTopk][kMaskWords];
  __shared__ float weights[kPackedRows][kMaxSplits + 2];
  __shared__ bool last;
  release_dependents();
  if (is_idle(args.needed)) {
    wait_for_producers();
    return;
  }
  touch_parameters(args);
  const DraftBatch& batch = *args.batch;
  const int splits = splits_of(args, batch);
  const int items = args.grid.tasks * splits;
  Producers producers = Producers::kRunning;
  // Blocks for which this context has no work leave without the wait, so that the next kernel gets their place. The
  // first block always has some: the kernel does not end before those that it waits for.
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    work<kDim, kRing>(args, batch, item / splits, item % splits, splits, shared, visible, weights, &last, producers);
    producers = Producers::kDone;
  }
#endif
}

template <int kDim, int kRing>
void launch_ring(const StreamPlan& plan, const AttentionArgs& args, cudaStream_t stream) {
  static_assert(ring_bytes(kDim, kRing) >= kAttentionWarps * kPackedRows * (kDim + 2) * 4,
                "the warps' sums reuse the ring");
  const int blocks = attention_blocks(plan.device, args.grid, args.context.kv.max_context);
  launch_chained(plan, attention_kernel<kDim, kRing>, dim3(static_cast<unsigned>(blocks)), kThreadsOfBlock,
                 ring_bytes(kDim, kRing), stream, args);
}

template <int kDim>
void launch(const StreamPlan& plan, const AttentionArgs& args, cudaStream_t stream) {
  switch (attention_ring(plan.device, kDim)) {
    case 3:
      if constexpr (kDim <= 128) return launch_ring<kDim, 3>(plan, args, stream);
      [[fallthrough]];
    case 2:
      return launch_ring<kDim, 2>(plan, args, stream);
    default:
      return launch_ring<kDim, 1>(plan, args, stream);
  }
}

}  // namespace

bool attends(const DeviceLimits& device, int head_dim) {
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) return false;
  return ring_bytes(head_dim, 1) + kAttentionStaticBytes <= device.shared_per_block;
}

void launch_attention(const StreamPlan& plan, const AttentionParams& params, const EngineContext& context,
                      const DraftBatch* batch, cudaStream_t stream) {
  const DraftConfig& config = context.config;
  expect(context.kv.dtype == DType::kBF16, ErrorCode::kConfig, "kv.dtype", "bfloat16", name_of(context.kv.dtype));
  expect(config.head_dim == plan.needs.head_dim, ErrorCode::kConfig, "head_dim", plan.needs.head_dim, config.head_dim);
  expect_range("rows", params.rows.max_rows, 1, kMaxTokens);
  const int width = params.rows.pass == Pass::kStep ? context.speculation.topk : 1;
  AttentionArgs args{};
  args.context = context;
  args.batch = batch;
  args.rows = params.rows;
  args.grid = attention_grid(slots_of(plan.device), params.rows.max_rows, width, config.num_heads / config.num_kv_heads,
                             config.num_kv_heads);
  if (!same_splits(args.grid, context.kv.max_context))
    args.lanes = params.rows.pass == Pass::kExtendAll ? context.limits.max_batch : params.rows.max_rows / width;
  args.needed = plan.needed;
  args.last_fresh = plan.last_queries;
  args.scale = 1.4426950408889634F / std::sqrt(static_cast<float>(config.head_dim));
  args.q = static_cast<const bf16*>(params.q);
  args.pool_k = static_cast<const bf16*>(plan.pool_k[params.layer]);
  args.pool_v = static_cast<const bf16*>(plan.pool_v[params.layer]);
  args.scratch_k = static_cast<const bf16*>(params.scratch_k);
  args.scratch_v = static_cast<const bf16*>(params.scratch_v);
  args.out = static_cast<bf16*>(params.out);
  args.counters = reinterpret_cast<std::uint32_t*>(plan.attention_partials);
  args.partials = reinterpret_cast<float*>(plan.attention_partials + attention_counter_bytes(plan.device));
  switch (config.head_dim) {
    case 64:
      return launch<64>(plan, args, stream);
    case 96:
      return launch<96>(plan, args, stream);
    case 128:
      return launch<128>(plan, args, stream);
    case 256:
      return launch<256>(plan, args, stream);
    default:
      fail(ErrorCode::kConfig, "head_dim: expected 64, 96, 128 or 256, got ", config.head_dim);
  }
}

}  // namespace eaglex::stream
