// The pieces of decode attention: keys and where they lie, a warp's ring of them, its running softmax.
#pragma once

#include "cuda/stream/attention.h"
#include "cuda/stream/launch.cuh"
#include "cuda/stream/place.cuh"
#include "cuda/stream/steps.h"

namespace eaglex::stream {

inline constexpr int kThreadsOfBlock = kAttentionWarps * 32;
inline constexpr int kMaskWords = kMaxSteps * kMaxTopk / 32;

struct AttentionArgs {
  EngineContext context;
  const DraftBatch* batch;
  Rows rows;
  AttentionGrid grid;
  int lanes;        // whose lengths are looked at, where the batch has as many; 0: they do not matter
  bool last_fresh;  // the kernel before writes the keys of Pass::kExtendLast's requests: StreamPlan::last_queries
  float scale;      // log2(e) / √D
  const bf16* q;
  const bf16* pool_k;  // of the layer
  const bf16* pool_v;
  const bf16* scratch_k;
  const bf16* scratch_v;
  bf16* out;
  const std::int32_t* needed;
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
  int settled = 0;  // keys that the kernel before does not write
};

inline constexpr std::int64_t kNowhere = -1;

// Row of key `i` in the pool, or in the scratch as -2 - row; kNowhere where there is no K and V.
__device__ __forceinline__ std::int64_t row_of(const Keys& keys, int i) {
  if (i >= keys.total) return kNowhere;
  if (i >= keys.prefix) return -2 - static_cast<std::int64_t>(i - keys.prefix);
  const std::int64_t slot = __ldcg(keys.table + i);
  return slot >= 0 && slot < keys.slots ? slot : kNowhere;
}

__device__ __forceinline__ void copy_or_zero(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

template <int kDim>
inline constexpr int kKeyBytes = key_bytes(kDim);
template <int kDim>
inline constexpr int kStageBytes = 2 * kKeys * kKeyBytes<kDim>;

// K and V of 16 keys into a stage; lane i < 16 brings the row of key i.
template <int kDim>
__device__ __forceinline__ void fetch(const Keys& keys, std::int64_t row, int width, int head, std::uint32_t stage,
                                      int lane) {
  constexpr int kUnits = kDim / 8;
#pragma unroll
  for (int i = 0; i < kKeys * kUnits / 32; ++i) {
    const int key = (i * 32 + lane) / kUnits;
    const int unit = (i * 32 + lane) % kUnits;
    const std::int64_t from = __shfl_sync(0xFFFFFFFF, row, key);
    const bool scratch = from < kNowhere;
    const std::int64_t offset = (from == kNowhere ? 0 : scratch ? -2 - from : from) * width + head * kDim + unit * 8;
    const std::uint32_t to = stage + key * kKeyBytes<kDim> + unit * 16;
    copy_or_zero(to, (scratch ? keys.scratch_k : keys.pool_k) + offset, from != kNowhere);
    copy_or_zero(to + kKeys * kKeyBytes<kDim>, (scratch ? keys.scratch_v : keys.pool_v) + offset, from != kNowhere);
  }
}

__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
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
    const std::uint32_t p[4] = {pack(scores[0][0], scores[0][1]), pack(scores[0][2], scores[0][3]),
                                pack(scores[1][0], scores[1][1]), pack(scores[1][2], scores[1][3])};
    const std::uint32_t at = values + lane % 16 * kKeyBytes<kDim> + lane / 16 * 16;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      std::uint32_t v[4];
      load_matrices_transposed(v, at + d * 32);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float (&sum)[4] = sums[2 * d + t];
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
__device__ __forceinline__ float weight_of(float maximum, float best) {
  return exp2f(maximum - best);
}

// Whether the kernels before are known to be done. If not, attend() starts with what the one before does not write, and
// waits for it before it reads the queries.
enum class Producers : bool { kRunning, kDone };

template <int kDim, int kRing>
__device__ __forceinline__ void attend(const AttentionArgs& args, const Packing& packing, const Keys& keys,
                                       const std::uint32_t (*visible)[kMaskWords], int kv_head, int split, int splits,
                                       std::uint32_t ring, int warp, int lane, Producers producers,
                                       Running<kDim>& running) {
  const int width = args.context.config.kv_size();
  const int g = lane / 4;
  const int q = lane % 4;
  const int steps = (keys.total + kKeys - 1) / kKeys;
  const int begin = static_cast<int>(static_cast<std::int64_t>(split) * steps / splits) + warp;
  const int end = static_cast<int>(static_cast<std::int64_t>(split + 1) * steps / splits);
  const auto look_up = [&](int step) { return row_of(keys, step < end ? step * kKeys + lane % kKeys : keys.total); };
  const auto fetch_step = [&](int step, std::int64_t row, int stage) {
    if (step < end) fetch<kDim>(keys, row, width, kv_head, ring + stage * kStageBytes<kDim>, lane);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  // Rows are looked up one step before they are fetched: two dependent reads would else stand in the way of each step.
  std::int64_t rows[kRing];  // of the step at hand and those in flight
#pragma unroll
  for (int i = 0; i < kRing; ++i) rows[i] = look_up(begin + i * kAttentionWarps);
  const auto is_settled = [&](int step) { return producers == Producers::kDone || (step + 1) * kKeys <= keys.settled; };
#pragma unroll
  for (int i = 0; i < kRing - 1; ++i) {
    const int step = begin + i * kAttentionWarps;
    fetch_step(is_settled(step) ? step : end, rows[i], i);
  }
  if (producers == Producers::kRunning) {
    __syncthreads();  // the wait of one warp holds up the others too: first all must have begun their copies
    wait_for_producers();
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) {
      const int step = begin + i * kAttentionWarps;
      fetch_step(is_settled(step) ? end : step, rows[i], i);
    }
  }

  std::uint32_t query[kDim / 16][4];
  int tree_row[2];  // which row's ancestors the packed rows g and g + 8 see
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row;
    int head;
    const bool inside = packing.find(g + 8 * r, row, head);
    tree_row[r] = inside ? row - packing.first_row : 0;
    const bf16* const from =
        args.q + (static_cast<std::int64_t>(row) * args.context.config.num_heads + head) * kDim + q * 2;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      query[d][r] = inside ? *reinterpret_cast<const std::uint32_t*>(from + d * 16) : 0;
      query[d][r + 2] = inside ? *reinterpret_cast<const std::uint32_t*>(from + d * 16 + 8) : 0;
    }
  }

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

    const std::uint32_t k_at = ring + stage * kStageBytes<kDim>;
    const std::uint32_t at = k_at + (lane % 8 + lane / 16 * 8) * kKeyBytes<kDim> + lane / 8 % 2 * 16;
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
    running.take(scores, k_at + kKeys * kKeyBytes<kDim>, lane);
    __syncwarp();
    free_stage = stage;
    stage = stage + 1 == kRing ? 0 : stage + 1;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace eaglex::stream
