// attention: softmax(q kᵀ / √D) v over the prefix in the paged pool and the node's ancestors in the scratch.
// Caller: per layer, after qkv.
// Bytes: K and V of prefix and scratch once per kv head and block of 16 queries; queries of a kv head share them (GQA).
// Mapping: grid (workers over shares of the keys, kv heads × blocks of queries, lanes or rows); then one CTA per row and
// head combines the shares in fixed order. They depend on the number of keys alone, so a result does not on the batch.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/ptx.cuh"

namespace eaglex::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kKeys = kWarp;  // keys per tile: one per lane of a warp
// Query vectors per CTA: few are a chain's under GQA of up to 4, all others go in blocks of many.
constexpr int kFewQueries = 4;
constexpr int kManyQueries = 16;
constexpr int kMaxDim = 256;
constexpr int kMaxShares = 32;
constexpr int kColumns = kMaxDim / kThreads;  // output columns per thread
constexpr int kMaskWords = (kMaxSteps * kMaxTopk + 31) / 32;

// K or V of one tile in fp32, one float of padding per key against bank conflicts; then the queries.
std::size_t shared_bytes(int dim, int queries) {
  return sizeof(float) * static_cast<std::size_t>(kKeys * (dim + 1) + queries * dim);
}

// The queries of one CTA: rows of one lane (the frontier of a step) or one row, times the heads that share a kv head.
struct Group {
  std::int64_t row = 0;  // first row
  int first = 0;         // first query of the CTA, row-major over [rows, heads of the group]
  int count = 0;
  int heads = 0;
};

// The keys of a row in equal shares of whole tiles, few enough for the buffer of partial results.
struct Shares {
  std::int64_t keys = 0;  // per share
  int count = 0;

  __device__ explicit Shares(std::int64_t total) {
    constexpr std::int64_t kLeast = 2 * kKeys;
    keys = ((total + kMaxShares - 1) / kMaxShares + kKeys - 1) / kKeys * kKeys;
    if (keys < kLeast) keys = kLeast;
    count = static_cast<int>((total + keys - 1) / keys);
  }
};

// Keys that the rows of a lane see at most: the prefix, and in a step the scratch nodes so far.
struct Keys {
  std::int64_t prefix = 0;
  std::int64_t total = 0;

  __device__ Keys(const EngineContext& context, const Rows& rows, const RowPlace& place) {
    if (!place.live) return;
    const bool step = rows.pass == Pass::kStep;
    prefix = step ? context.lanes.new_len[place.lane] : place.position + 1;
    total = prefix + (step ? rows.step * context.speculation.topk : 0);
  }
};

struct Key {
  std::int64_t at = -1;  // row in pool or scratch, -1: nothing there
  bool scratch = false;
};

__device__ Key find_key(const Chain& chain, const RowPlace& place, std::int64_t request, std::int64_t prefix,
                        std::int64_t total, std::int64_t i) {
  if (i >= total) return {};
  if (i < prefix) return {kv_slot(chain.context.kv, request, i), false};
  return {static_cast<std::int64_t>(place.lane) * chain.context.speculation.num_scratch_nodes() + (i - prefix), true};
}

// Loads rows of one kv head into shared memory; rows without a key become zero.
__device__ void load_tile(const Chain& chain, const Key* keys, const void* pool, const void* scratch, int head,
                          float* tile) {
  const DraftConfig& config = chain.context.config;
  const int dim = config.head_dim;
  const DType type = chain.context.kv.dtype;
  constexpr int kPack = 8;
  const int packs = dim % kPack == 0 ? dim / kPack : dim;
  const int width = dim % kPack == 0 ? kPack : 1;
  for (int task = static_cast<int>(threadIdx.x); task < kKeys * packs; task += kThreads) {
    const int j = task / packs, d = task % packs * width;
    float* const to = tile + j * (dim + 1) + d;
    const Key key = keys[j];
    const void* const source = key.scratch ? scratch : pool;
    const std::int64_t at = (key.at * config.num_kv_heads + head) * dim + d;
    if (key.at < 0) {
      for (int e = 0; e < width; ++e) to[e] = 0.0F;
    } else if (width == 1 || type == DType::kF32) {
      for (int e = 0; e < width; ++e) to[e] = load_float(source, type, at + e);
    } else {
      const uint4 packed = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(source) + at);
      const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
      for (int e = 0; e < 4; ++e) {
        const float2 pair = type == DType::kF16
                                ? __half22float2(*reinterpret_cast<const __half2*>(&words[e]))
                                : __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[e]));
        to[2 * e] = pair.x;
        to[2 * e + 1] = pair.y;
      }
    }
  }
}

// Row and head of query i of the CTA.
struct Query {
  std::int64_t row = 0;
  int head = 0;
  __device__ Query(const Group& group, int kv_head, int i)
      : row(group.row + (group.first + i) / group.heads),
        head(kv_head * group.heads + (group.first + i) % group.heads) {}
};

// [rows, heads, shares, D + 2]: Σ w·v, max, Σ w
__device__ float* partial_of(const Chain& chain, const AttentionLaunch& p, std::int64_t row, int head, int share) {
  const DraftConfig& config = chain.context.config;
  return p.partial + (((row - p.range.first) * config.num_heads + head) * kMaxShares + share) * (config.head_dim + 2);
}

template <int kQueries>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const __grid_constant__ Chain chain, DType type, const __grid_constant__ AttentionLaunch p) {
  constexpr int kPerWarp = kQueries / kWarps;
  EAGLEX_DYNAMIC_SHARED(float, dynamic, alignof(float));
  __shared__ Key keys[kKeys];
  __shared__ float weights[kQueries][kKeys];
  __shared__ float rescale[kQueries], tops[kQueries], totals[kQueries];
  __shared__ std::uint32_t ancestors[kQueries][kMaskWords];

  const EngineContext& context = chain.context;
  const DraftConfig& config = context.config;
  const DraftBatch& batch = *chain.batch;
  const Rows& rows = p.range.rows;
  const bool step = rows.pass == Pass::kStep;
  const int dim = config.head_dim;
  const int topk = context.speculation.topk;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int kv_head = static_cast<int>(blockIdx.y) % config.num_kv_heads;

  Group group;
  group.heads = config.num_heads / config.num_kv_heads;
  group.row = p.range.first + static_cast<std::int64_t>(blockIdx.z) * (step ? topk : 1);
  group.first = static_cast<int>(blockIdx.y) / config.num_kv_heads * kQueries;
  group.count = min((step ? topk : 1) * group.heads - group.first, kQueries);
  if (group.row >= rows_of_pass(chain, rows)) return;
  const RowPlace place = locate(context, batch, rows, group.row);  // rows of one lane live and die together
  const Keys all(context, rows, place);
  const Shares shares(all.total);
  if (static_cast<int>(blockIdx.x) >= shares.count) return;
  const std::int64_t request = batch.req_pool_indices[place.lane];

  float* const tile = dynamic;
  float* const queries = dynamic + kKeys * (dim + 1);
  const float scale = rsqrtf(static_cast<float>(dim));
  for (int i = thread; i < group.count * dim; i += kThreads) {
    const Query query(group, kv_head, i / dim);
    queries[i] = scale * load_float(p.q, type, (query.row * config.num_heads + query.head) * dim + i % dim);
  }
  for (int i = thread; i < kQueries * kMaskWords; i += kThreads) ancestors[i / kMaskWords][i % kMaskWords] = 0;
  __syncthreads();
  if (step && thread < group.count) {
    const std::int64_t row = Query(group, kv_head, thread).row;
    const std::int32_t* const nodes =
        context.lanes.ancestors[(rows.step - 1) % 2] + row * context.speculation.num_steps;
    for (int depth = 0; depth < rows.step; ++depth) ancestors[thread][nodes[depth] / 32] |= 1U << (nodes[depth] % 32);
  }

  for (int share = static_cast<int>(blockIdx.x); share < shares.count; share += static_cast<int>(gridDim.x)) {
    const std::int64_t begin = share * shares.keys;
    const std::int64_t end = begin + shares.keys < all.total ? begin + shares.keys : all.total;
    if (thread < kQueries) {
      tops[thread] = -INFINITY;
      totals[thread] = 0;
    }
    float sums[kQueries][kColumns] = {};
    for (std::int64_t first = begin; first < end; first += kKeys) {
      if (thread < kKeys) keys[thread] = find_key(chain, place, request, all.prefix, end, first + thread);
      __syncthreads();
      load_tile(chain, keys, p.pool_k, p.scratch_k, kv_head, tile);
      __syncthreads();

      // One key per lane, queries warp, warp + 4, …: scores, running maximum, weights.
      float scores[kPerWarp] = {};
      for (int d = 0; d < dim; ++d) {
        const float k = tile[lane * (dim + 1) + d];
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i) {
          if (warp + i * kWarps < group.count) scores[i] += k * queries[(warp + i * kWarps) * dim + d];
        }
      }
      for (int i = 0; i < kPerWarp; ++i) {
        const int query = warp + i * kWarps;
        if (query >= group.count) break;
        bool seen = keys[lane].at >= 0;
        if (seen && keys[lane].scratch) {
          const auto node = static_cast<int>(first + lane - all.prefix);
          seen = (ancestors[query][node / 32] >> (node % 32) & 1U) != 0;
        }
        const float score = seen ? scores[i] : -INFINITY;
        float top = score;
        for (int offset = kWarp / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
        const float before = tops[query];
        top = fmaxf(top, before);
        const float weight = seen ? expf(score - top) : 0.0F;  // a score of NaN or +infinity makes NaN, as it should
        float sum = weight;
        for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        weights[query][lane] = weight;
        __syncwarp();
        if (lane == 0) {
          const float factor = before == -INFINITY ? 0.0F : expf(before - top);
          rescale[query] = factor;
          tops[query] = top;
          totals[query] = totals[query] * factor + sum;
        }
      }
      __syncthreads();
      load_tile(chain, keys, p.pool_v, p.scratch_v, kv_head, tile);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int d = thread + c * kThreads;
        if (d >= dim) break;
#pragma unroll
        for (int i = 0; i < kQueries; ++i) {
          if (i < group.count) sums[i][c] *= rescale[i];
        }
        for (int j = 0; j < kKeys; ++j) {
          const float v = tile[j * (dim + 1) + d];
#pragma unroll
          for (int i = 0; i < kQueries; ++i) {
            if (i < group.count) sums[i][c] += weights[i][j] * v;
          }
        }
      }
      __syncthreads();  // the tile and the keys are overwritten next
    }

#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (i >= group.count) break;
      const Query query(group, kv_head, i);
      float* const partial = partial_of(chain, p, query.row, query.head, share);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (thread + c * kThreads < dim) partial[thread + c * kThreads] = sums[i][c];
      }
      if (thread == 0) {
        partial[dim] = tops[i];
        partial[dim + 1] = totals[i];
      }
    }
    __syncthreads();  // tops and totals start anew
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Chain chain, DType type, const __grid_constant__ AttentionLaunch p) {
  const DraftConfig& config = chain.context.config;
  const int dim = config.head_dim;
  const int head = static_cast<int>(blockIdx.x);
  const std::int64_t row = p.range.first + static_cast<std::int64_t>(blockIdx.y);
  if (row >= rows_of_pass(chain, p.range.rows)) return;
  const RowPlace place = locate(chain.context, *chain.batch, p.range.rows, row);
  const int shares = Shares(Keys(chain.context, p.range.rows, place).total).count;
  const float* const partial = partial_of(chain, p, row, head, 0);
  float top = -INFINITY;
  for (int s = 0; s < shares; ++s) top = fmaxf(top, partial[s * (dim + 2) + dim]);
  for (int d = static_cast<int>(threadIdx.x); d < dim; d += kThreads) {
    float sum = 0, total = 0;
    for (int s = 0; s < shares; ++s) {
      const float* const part = partial + s * (dim + 2);
      if (part[dim + 1] == 0.0F) continue;  // nothing seen; its maximum is -infinity, perhaps like `top`
      const float factor = expf(part[dim] - top);
      sum += part[d] * factor;
      total += part[dim + 1] * factor;
    }
    store_float(p.out, type, (row * config.num_heads + head) * dim + d, total == 0.0F ? 0.0F : sum / total);
  }
}

template <int kQueries>
void allow_shared() {
  EAGLEX_CUDA_CHECK(cudaFuncSetAttribute(attention_kernel<kQueries>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared_bytes(kMaxDim, kQueries))));
}

template <int kQueries>
void launch_shares(const Chain& chain, DType type, const AttentionLaunch& params, int num_sms, cudaStream_t stream) {
  const DraftConfig& config = chain.context.config;
  const int width = params.range.rows.pass == Pass::kStep ? chain.context.speculation.topk : 1;
  const int blocks = ceil_div(width * (config.num_heads / config.num_kv_heads), kQueries);
  const int lanes = params.range.count / width;
  const int columns = config.num_kv_heads * blocks * lanes;
  const int workers = std::clamp(4 * num_sms / columns, 1, kMaxShares);  // about four CTAs per SM
  const dim3 grid(static_cast<unsigned>(workers), static_cast<unsigned>(config.num_kv_heads * blocks),
                  static_cast<unsigned>(lanes));
  launch("attention", attention_kernel<kQueries>, {grid, kThreads, shared_bytes(config.head_dim, kQueries), stream},
         chain, type, params);
}

}  // namespace

void prepare_attention(const DraftConfig& config) {
  if (config.head_dim > kMaxDim)
    fail(ErrorCode::kConfig, "head_dim: expected at most ", kMaxDim, ", got ", config.head_dim);
  allow_shared<kFewQueries>();
  allow_shared<kManyQueries>();
}

std::size_t attention_partial_floats(const DraftConfig& config) {
  return static_cast<std::size_t>(config.num_heads) * kMaxShares * static_cast<std::size_t>(config.head_dim + 2);
}

void launch_attention(const Chain& chain, DType type, const AttentionLaunch& params, int num_sms, cudaStream_t stream) {
  const DraftConfig& config = chain.context.config;
  const int width = params.range.rows.pass == Pass::kStep ? chain.context.speculation.topk : 1;
  const bool few = width * (config.num_heads / config.num_kv_heads) <= kFewQueries;
  (few ? launch_shares<kFewQueries> : launch_shares<kManyQueries>)(chain, type, params, num_sms, stream);
  const dim3 rows(static_cast<unsigned>(config.num_heads), static_cast<unsigned>(params.range.count));
  launch("attention combine", combine_kernel, {rows, kThreads, 0, stream}, chain, type, params);
}

}  // namespace eaglex::cuda
