// head, second half where the head's matrix only scans (INT4 beside its own rows as stored): the best of what its tiles
// offer are scored again by those rows.
// Formula: reference.py head, rescore, top_k, select.
// Caller: Backend::head, or Backend::select for a chain.    Bytes: per row of x R rows of lm_head, from memory; 8 per
// offer (2 or topk of 64 ids) and 8 per block of the head, from L2.
// Mapping: a cluster of up to 8 blocks per row; each chooses the same R by itself (two warps, half of the offers each),
// reads its share of their columns and of x, and writes its parts of the sums into the first block's shared memory, which
// finishes. All orders are fixed. Nothing fits beside two blocks of a low-bit matrix, whose registers are too many: a
// cluster comes into what the head's first blocks leave, where qkv begins with a block less.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cuda/stream/cluster.cuh"
#include "cuda/stream/offers.cuh"

namespace eaglex::stream {
namespace {

constexpr int kMaxRanks = 8;  // blocks of a cluster, on every device that has them
constexpr int kWarps = kEndThreads / 32;
constexpr int kAtOnce = 4;  // rows that a warp reads together
constexpr int kDeep = 4;    // units that a lane reads of each: one trip to memory for a share of 1,024 elements
constexpr int kUnit = 8;    // elements of 16 bytes

struct RescoreArgs : HeadEnd {
  Offers offers;
  int ranks;   // blocks per row
  int blocks;  // of the head's grid
  const float2* stats;
  const bf16* x;  // [R, H]
  const bf16* rows_as_stored;
  int row_units;               // between their beginnings
  const bf16* next_embedding;  // [V, H]: of each that is scored again the row is fetched; null: unknown, or not needed
  const bf16* next_products;   // [Vd, token_product_width()], in its place
};

// Offsets into shared memory.
struct RescoreLayout {
  int x;      // [share] units, then as many of γ
  int sums;   // [ranks][num + 1] parts of x·γ·w, the last of x·x; of the first block alone, written by all
  int stats;  // [ranks · kWarps] maximum and Σ exp, the same
  int warps;  // per warp: [32] maxima, [num] chosen of its offers, [num] of all, [capacity] list
  int warp_bytes;
  int total;
};

// Units of H that a block takes.
__host__ __device__ constexpr int share_of(int hidden, int ranks) {
  return (hidden / kUnit + ranks - 1) / ranks;
}

__host__ __device__ constexpr RescoreLayout rescore_layout(int share, int ranks, int num, int capacity) {
  RescoreLayout at{};
  at.sums = 2 * share * 16;
  at.stats = align_up(at.sums + ranks * (num + 1) * 4, 8);
  at.warps = align_up(at.stats + ranks * kWarps * 8, 16);
  at.warp_bytes = 32 * 4 + 2 * align_up(num, 2) * 8 + capacity * 8;
  at.total = at.warps + kWarps * at.warp_bytes;
  return at;
}

// Σ exp of several blocks of the head, as far as their maximum.
struct Part {
  float maximum = kMinusInfinity;
  float sum = 0;
};

__device__ __forceinline__ void add(Part& part, const float2& next) {
  if (next.x == kMinusInfinity && next.y == 0) return;
  const float maximum = fmaxf(part.maximum, next.x);
  part.sum = (part.sum == 0 ? 0.0F : part.sum * __expf(part.maximum - maximum)) + next.y * __expf(next.x - maximum);
  part.maximum = maximum;
}

__device__ __forceinline__ float2 stats_of(const RescoreArgs& args, int row, int block) {
  if (block >= args.blocks) return make_float2(kMinusInfinity, 0);
  return __ldcg(args.stats + static_cast<std::int64_t>(block) * kMaxTokens + row);
}

__device__ __forceinline__ float scaled(const Part& part, float maximum) {
  return part.sum == 0 ? 0.0F : part.sum * __expf(part.maximum - maximum);
}

__device__ __forceinline__ float dot(const float (&x)[kUnit], const uint4& packed) {
  const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 w = __bfloat1622float2(unpack(pairs[i]));
    sum = fmaf(x[2 * i], w.x, fmaf(x[2 * i + 1], w.y, sum));
  }
  return sum;
}

// The share of x·γ·w of four rows, and of x·x; the lanes' parts are not summed up yet.
struct Dots {
  float rows[kAtOnce] = {};
  float squares = 0;
};

using Weights = uint4[kDeep][kAtOnce];

// A lane's units of four rows from `unit` on; `rows` are where these begin, in units.
__device__ __forceinline__ void load_rows(const RescoreArgs& args, const std::uint32_t (&rows)[kAtOnce], int unit,
                                          int end, Weights& weights) {
  const auto* const stored = reinterpret_cast<const uint4*>(args.rows_as_stored);
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      weights[d][i] = unit + 32 * d < end ? __ldcs(stored + (rows[i] + unit + 32 * d)) : make_uint4(0, 0, 0, 0);
  }
}

// `x` and `gamma` are those of `unit`, in shared memory.
__device__ __forceinline__ void multiply(const Weights& weights, const uint4* x, const uint4* gamma, int unit, int end,
                                         Dots& dots) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    if (unit + 32 * d >= end) break;
    const uint4 states = x[32 * d];
    const uint4 gammas = gamma[32 * d];
    const std::uint32_t x_pairs[4] = {states.x, states.y, states.z, states.w};
    const std::uint32_t gamma_pairs[4] = {gammas.x, gammas.y, gammas.z, gammas.w};
    float values[kUnit];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = __bfloat1622float2(unpack(x_pairs[i]));
      const float2 g = __bfloat1622float2(unpack(gamma_pairs[i]));
      dots.squares = fmaf(v.x, v.x, fmaf(v.y, v.y, dots.squares));
      values[2 * i] = v.x * g.x, values[2 * i + 1] = v.y * g.y;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) dots.rows[i] += dot(values, weights[d][i]);
  }
}

// What the cluster has found of a row, in lane c of the first block's first warp for candidate c.
struct Rescored {
  std::uint64_t key = 0;  // by the exact score; 0: none
  int place = 0;          // among them
  float log_sum = 0;
};

__device__ __forceinline__ Rescored finish(const RescoreArgs& args, std::uint64_t scanned, const float* sums,
                                           const float2* stats) {
  const int lane = threadIdx.x % 32;
  const int width = args.offers.num + 1;
  const bool valid = lane < args.offers.num && scanned != 0;
  float product = 0;
  float squares = 0;
  for (int rank = 0; rank < args.ranks; ++rank) {
    if (valid) product += sums[rank * width + lane];
    squares += sums[rank * width + args.offers.num];
  }
  const float hidden = static_cast<float>(args.context.config.hidden_size);
  const float score = product * rsqrtf(squares / hidden + args.context.config.rms_norm_eps);
  Part part;
  if (lane < args.ranks * kWarps) part = {stats[lane].x, stats[lane].y};
  Rescored rescored;
  rescored.key = valid ? key_of(score, id_of(scanned)) : 0;
  // NaN is no maximum, but stays in the sums.
  const float maximum = warp_max(fmaxf(part.maximum, valid ? score : kMinusInfinity));
  const float all = warp_sum(scaled(part, maximum));
  const float old = value_of(scanned);
  const float replaced = warp_sum(valid && old != kMinusInfinity ? __expf(old - maximum) : 0.0F);
  const float fresh = warp_sum(valid && score != kMinusInfinity ? __expf(score - maximum) : 0.0F);
  const float rest = all - replaced;
  rescored.log_sum = maximum + logf((rest < 0 ? 0.0F : rest) + fresh);
  for (int other = 0; other < args.offers.num; ++other)
    rescored.place += __shfl_sync(0xFFFFFFFF, rescored.key, other) > rescored.key ? 1 : 0;
  return rescored;
}

// What is known of a row's lane beforehand.
struct Lane {
  int index;
  int status;
  float score_before;  // of its chain so far
  bool inside;         // the batch
};

__device__ __forceinline__ Lane lane_of_row(const RescoreArgs& args, int row) {
  const LaneState& state = args.context.lanes;
  Lane lane{};
  lane.index = row / (args.rows.pass == Pass::kExtendLast ? 1 : args.context.speculation.topk);
  lane.status = __ldcg(state.status + lane.index);
  const bool first = args.select.draft_step == 0;
  lane.score_before = args.selects && !first ? __ldcg(state.frontier_scores + lane.index) : 0.0F;
  lane.inside = lane.index < __ldcg(&args.batch->batch);
  return lane;
}

// The first block's first warp: what a row's blocks have found becomes its candidates, and for a chain its next token;
// `token` is that of candidate `thread`.
__device__ __forceinline__ void conclude(const RescoreArgs& args, int row, const Lane& lane, const Rescored& rescored,
                                         std::int64_t token) {
  const bool finite = isfinite(rescored.log_sum);
  const int thread = threadIdx.x;
  if (thread == 0 && lane.inside && lane.status == static_cast<int>(LaneStatus::kLive) && !finite) {
    args.context.lanes.status[lane.index] = static_cast<std::int32_t>(LaneStatus::kNotFinite);
  }
  if (finite && rescored.key != 0 && rescored.place < args.context.speculation.topk)
    write_top(args, row, rescored.place, rescored.key, rescored.log_sum);
  __syncwarp();
  if (!args.selects || !lane.inside) return;
  const std::uint32_t winners = __ballot_sync(0xFFFFFFFF, rescored.key != 0 && rescored.place == 0);
  const int winner = winners == 0 ? 0 : __ffs(winners) - 1;
  const float score = __shfl_sync(0xFFFFFFFF, value_of(rescored.key), winner);
  const Found found{lane.index, static_cast<LaneStatus>(lane.status),  __shfl_sync(0xFFFFFFFF, token, winner),
                    0,          fminf(0.0F, score - rescored.log_sum), lane.score_before};
  const bool done = finite && advance_chain(args, found);
  if (!done && thread == 0) select(args, lane.index);
}

__global__ void __maxnreg__(128) head_rescore(const __grid_constant__ RescoreArgs args) {
#if EAGLEX_STREAM_KERNELS
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ float block_sums[kWarps];
  release_dependents();
  cluster_arrive();
  touch_parameters(args);
  const DraftConfig& config = args.context.config;
  const int rank = cluster_rank();
  const int row = static_cast<int>(blockIdx.x) / args.ranks;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int share = share_of(config.hidden_size, args.ranks);
  const int begin = rank * share;
  const int end = min(config.hidden_size / kUnit, begin + share);
  // Raised, if at all, before this pass's qkv.
  const bool idle = is_idle(args.needed);
  // Of the head's norm, which no kernel writes.
  for (int unit = begin + static_cast<int>(threadIdx.x); unit < end; unit += kEndThreads)
    cp_async_16(shared_address(shared) + (share + unit - begin) * 16, args.norm + unit * kUnit);
  wait_for_producers();
  if (idle) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    const int first_lane = row / (args.rows.pass == Pass::kExtendLast ? 1 : args.context.speculation.topk);
    if (args.selects && rank == 0 && threadIdx.x == 0 && first_lane < __ldcg(&args.batch->batch))
      select(args, first_lane);
    return;
  }
  // All reads in one trip, wanted or not.
  OfferKeys keys;
  load_offers(args.offers, row, warp * kOffersAtOnce, keys);
  const bf16* const x = args.x + static_cast<std::int64_t>(row) * config.hidden_size;
  for (int unit = begin + static_cast<int>(threadIdx.x); unit < end; unit += kEndThreads)
    cp_async_16(shared_address(shared) + (unit - begin) * 16, x + unit * kUnit);
  const int block = rank * kEndThreads + static_cast<int>(threadIdx.x);
  const float2 first_stats = stats_of(args, row, block);
  const Lane lane_of = lane_of_row(args, row);
  const RescoreLayout at = rescore_layout(share, args.ranks, args.offers.num, args.offers.capacity);
  const auto space_of = [&](int which) {
    std::byte* const begin = shared + at.warps + which * at.warp_bytes;
    auto* const lists = reinterpret_cast<std::uint64_t*>(begin + 32 * 4);
    const int size = align_up(args.offers.num, 2);
    return WarpSpace{reinterpret_cast<std::uint32_t*>(begin), lists, lists + size, lists + 2 * size};
  };
  const WarpSpace space = space_of(warp);
  choose_own(args.offers, row, warp, keys, space);
  asm volatile("cp.async.wait_all;" ::: "memory");  // for all behind the barrier in choose
  choose(args.offers, space, space_of(1 - warp).own);

  // Of a draft that is void anyhow, because a block never came, offers may be anything.
  const auto id_at = [&](int c) {
    return min(static_cast<std::uint32_t>(id_of(c < args.offers.num ? space.chosen[c] : 0)),
               static_cast<std::uint32_t>(config.draft_vocab_size - 1));
  };
  cluster_wait();  // all blocks run, so the first one's shared memory is there
  const std::int64_t token = args.selects && warp == 0 ? token_of(args, static_cast<int>(id_at(lane))) : 0;
  const std::uint32_t sums = shared_address(shared) + at.sums + rank * (args.offers.num + 1) * 4;
  const auto* const own_x = reinterpret_cast<const uint4*>(shared) + lane;
#pragma unroll 1
  for (int first = warp; first < args.offers.num; first += kAtOnce * kWarps) {
    std::uint32_t rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) rows[i] = id_at(first + i * kWarps) * static_cast<std::uint32_t>(args.row_units);
    Weights weights;
    load_rows(args, rows, begin + lane, end, weights);
    for (int unit = begin + kDeep * 32 + lane * kUnit; unit < end; unit += 32 * kUnit) {  // lines of what comes then
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        touch_l2(reinterpret_cast<const uint4*>(args.rows_as_stored) + (rows[i] + unit));
    }
    if (first == warp) {  // while they come
      Part part;
      add(part, first_stats);
      for (int i = block + args.ranks * kEndThreads; i < args.blocks; i += args.ranks * kEndThreads)
        add(part, stats_of(args, row, i));
      const float maximum = warp_max(part.maximum);
      const float sum = warp_sum(scaled(part, maximum));
      const std::uint32_t to = shared_address(shared) + at.stats + (rank * kWarps + warp) * 8;
      if (lane < 2) store_in(0, to + lane * 4, lane == 0 ? maximum : sum);
    }
    if (first == 0 && args.next_products != nullptr) {  // qkv of the next step will read one of them
      for (int c = rank; c < args.offers.num; c += args.ranks)
        fetch_row(args.next_products, id_at(c), token_product_width(config));
    } else if (first == 0 && args.next_embedding != nullptr) {
      for (int c = rank; c < args.offers.num; c += args.ranks) {
        std::int64_t next = __shfl_sync(0xFFFFFFFF, token, c);
        if (next < 0 || next >= config.vocab_size) next = 0;
        fetch_row(args.next_embedding, next, config.hidden_size);
      }
    }
    Dots dots;
    multiply(weights, own_x, own_x + share, begin + lane, end, dots);
#pragma unroll 1
    for (int at_unit = begin + kDeep * 32; at_unit < end; at_unit += kDeep * 32) {
      load_rows(args, rows, at_unit + lane, end, weights);
      multiply(weights, own_x + (at_unit - begin), own_x + share + (at_unit - begin), at_unit + lane, end, dots);
    }
#pragma unroll
    for (float& value : dots.rows) value = warp_sum(value);
    dots.squares = warp_sum(dots.squares);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int c = first + i * kWarps;
      if (lane == i && c < args.offers.num) store_in(0, sums + c * 4, dots.rows[i]);
    }
    if (first == 0 && lane == kAtOnce) store_in(0, sums + args.offers.num * 4, dots.squares);
    __syncwarp();
  }
  cluster_arrive();
  if (rank != 0) return;
  cluster_wait();
  if (warp == 0) {
    const Rescored rescored =
        finish(args, lane < args.offers.num ? space.chosen[lane] : 0, reinterpret_cast<float*>(shared + at.sums),
               reinterpret_cast<float2*>(shared + at.stats));
    conclude(args, row, lane_of, rescored, token);
  }
  if (args.hidden != nullptr) replace_by_norm(args, row, block_sums);
#endif
}

// Two blocks per SM at most: more would take the place of qkv's.
int ranks_of(const DeviceLimits& device, int rows) {
  int ranks = kMaxRanks;
  while (ranks > 2 && rows * ranks > kBlocksPerSm * device.num_sms) ranks /= 2;
  return ranks;
}

// Whether the device, its driver and its partition place clusters of so many blocks. Asked once per size and number of SMs.
bool are_placed(const DeviceLimits& device, int ranks, int shared_bytes) {
  if (ranks == 1) return true;
  static std::atomic<std::int64_t> known[kMaxRanks + 1];
  std::atomic<std::int64_t>& of = known[ranks];
  const std::int64_t key = static_cast<std::int64_t>(device.num_sms) << 32 | shared_bytes;
  const std::int64_t before = of.load(std::memory_order_relaxed);
  if (before >> 1 == key) return (before & 1) != 0;
  check(cudaFuncSetAttribute(head_rescore, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "shared memory");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(ranks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ranks));
  config.blockDim = dim3(kEndThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, head_rescore, &config) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    clusters = 0;
  }
  of.store(key << 1 | (clusters > 0 ? 1 : 0), std::memory_order_relaxed);
  return clusters > 0;
}

}  // namespace

void launch_head_rescore(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                         const EngineContext& context, const DraftBatch* batch, cudaStream_t stream) {
  expect_bf16("rescore_rows", params.rescore_rows);
  const std::int64_t row_stride = params.rescore_rows.stride[0];
  expect_range("units of rescore_rows", params.rescore_rows.shape[0] * row_stride / kUnit, 1LL, 0xFFFFFFFFLL);
  expect(reinterpret_cast<std::uintptr_t>(params.rescore_rows.data) % 16 == 0 && row_stride % kUnit == 0,
         ErrorCode::kShape, "rescore_rows", "rows aligned to 16 bytes", row_stride);
  RescoreArgs args{};
  static_cast<HeadEnd&>(args) = head_end_of(plan, params, select, context, batch);
  const int topk = context.speculation.topk;
  const HeadOffers offers = head_offers(rows_of(params.lm_head), topk);
  const int num = rescored(topk);
  args.offers = {plan.head_offers, offers.stride, offers.count, num, offer_capacity(num)};
  const auto shared_of = [&](int ranks) {
    return rescore_layout(share_of(context.config.hidden_size, ranks), ranks, num, args.offers.capacity).total;
  };
  args.ranks = ranks_of(plan.device, params.rows.max_rows);
  while (!are_placed(plan.device, args.ranks, shared_of(args.ranks))) args.ranks /= 2;
  args.blocks = blocks;
  args.stats = plan.head_stats;
  args.x = static_cast<const bf16*>(params.hidden);
  args.rows_as_stored = params.rescore_rows.as<const bf16>();
  args.row_units = static_cast<int>(row_stride / kUnit);
  if (select != nullptr && select->draft_step + 1 < context.speculation.num_steps)
    args.next_products = args.products, args.next_embedding = args.embed_tokens;
  args.products = args.embed_tokens = nullptr;
  launch_clusters(plan, args.ranks, head_rescore, dim3(static_cast<unsigned>(params.rows.max_rows * args.ranks)),
                  kEndThreads, shared_of(args.ranks), stream, args);
}

}  // namespace eaglex::stream
