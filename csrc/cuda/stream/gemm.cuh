// y[tokens, N] = x Wᵀ at the speed of reading W, for 1 to 64 tokens; what x is and what becomes of y is the step's.
//
// Callers: the launch_* functions. Bytes: N·K of weights once; x once per block and tile, from L2.
// Mapping: one block per SM streams an equal share of the weights' chunks; 8 warps multiply (64 rows: two warps per
// strip of 16, each with half of a chunk's k; 128 rows: one), 2 warps copy. Tiles that several blocks share are summed
// in a fixed order.
// RMSNorm is folded in: gamma goes onto x, the sum of squares comes from the tensor cores (x xᵀ, its diagonal), 1/rms
// is applied to the sums, so nobody reads x twice and no kernel stands in between.
#pragma once

#include "cuda/stream/multiply.cuh"

namespace eaglex::stream {

__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory");
}

// What a step's epilogue gets besides the sums. Lane (g, q) = (lane / 4, lane % 4) holds rows g and g + 8 of the warp's
// strip for tokens 8·t + 2q + {0, 1}: acc[t] = {(g, 0), (g, 1), (g + 8, 0), (g + 8, 1)}. All eight warps call; those of
// half 0 have sums.
template <class RowInfo>
struct TileView {
  WarpRole role;
  int tile_row;  // first row of the tile in W
  int tokens;
  const RowInfo* rows;  // shared memory, [tokens]
  float* exchange;      // shared memory, exchange_bytes()
  std::byte* state;     // shared memory, the step's own
};

template <class Weights, int kTokenTiles, class Step>
class Consumer {
  using G = Geometry<Weights, kTokenTiles>;
  static constexpr bool kNormed = Step::kNormed;
  using Multiply = Multiplier<Weights, kTokenTiles, kNormed>;
  static constexpr int kSums = Multiply::kSums;
  static constexpr int kLaneSums = G::kRowWarps * 32;  // float4 of one n8 tile in a slot
  static constexpr int kSlot = kTokenTiles * kLaneSums + kTokenTiles * 2;

 public:
  __device__ Consumer(const GemmShape& shape, const typename Step::Params& params, const Ring& ring, std::byte* shared,
                      const SharedLayout& at)
      : shape_(shape), params_(params), ring_(ring), shared_(shared), at_(at) {
    role_.lane = threadIdx.x % 32;
    role_.warp = threadIdx.x / 32;
    role_.strip = role_.warp / G::kHalves;
    role_.half = role_.warp % G::kHalves;
    per_tile_ = shape.segments * shape.chunks_per_segment;
  }

  __device__ void run() {
    const int first = shape_.split.first(blockIdx.x);
    const int last = shape_.split.first(blockIdx.x + 1);
    Step::template begin<kTokenTiles>(shared_ + at_.state);
    RingPosition at(kConsumer);
    for (int unit = first; unit < last;) {
      const int tile = unit / per_tile_;
      if (Weights::kRowScales && role_.half == 0 && role_.lane == 0) touch(row_scales(tile));
      const int piece_begin = unit;
      const int piece_end = min(last, (tile + 1) * per_tile_);
      float acc[kTokenTiles][4];
      int segment;
      while (true) {
        segment = (unit - tile * per_tile_) / shape_.chunks_per_segment;
        const int end = min(piece_end, tile * per_tile_ + (segment + 1) * shape_.chunks_per_segment);
        accumulate(unit, end, segment, at, acc);
        unit = end;
        if (unit == piece_end) break;
        publish(slot(blockIdx.x, tile, segment), acc);  // another segment follows: its sums have another 1/rms
      }
      if (complete(tile, segment, piece_begin, piece_end, acc)) epilogue(tile, acc);
    }
    Step::template end<kTokenTiles>(params_, role_, shape_.tokens, shared_ + at_.state);
  }

 private:
  // Sums of chunks [unit, end) of one segment, over both halves of k (in the warps of half 0).
  __device__ __forceinline__ void accumulate(int unit, int end, int segment, RingPosition& at,
                                             float (&acc)[kTokenTiles][4]) {
    float sums[kSums][kTokenTiles][4] = {};
    float squares[4] = {};
    const int g = role_.lane / 4;
    const int q = role_.lane % 4;
    const int k_block = role_.half * G::kWarpKBlocks;
    const int last_blocks = shape_.k / kKBlock - (shape_.chunks_per_segment - 1) * G::kKBlocks - k_block;
    const Multiply multiply{role_, shape_.tokens, kNormed && shape_.gamma[segment] != nullptr};
    const typename Multiply::Operands all{
        shared_ + role_.strip / 4 * (G::kStageBytes / G::kRowBlocks) + Weights::offset(k_block),
        shared_ + at_.x + (k_block * shape_.tokens + g) * 64 + q * 16, shared_ + at_.gamma + k_block * 64 + q * 16};
    int chunk = (unit - segment * shape_.chunks_per_segment) % per_tile_;
    for (; unit < end; ++unit, ++chunk) {
      mbar_wait(ring_.full + 8 * at.stage, at.phase);
      const auto now = all.at(at.stage, ring_.x_bytes);
      // Rows beyond the last token are whatever follows in shared memory: they only reach columns that nobody reads.
      // K is a multiple of 64: of a segment's last chunk this warp has an even number of blocks, or none.
      const int blocks = chunk + 1 < shape_.chunks_per_segment ? G::kWarpKBlocks : last_blocks;
      if (blocks >= G::kWarpKBlocks) {
#pragma unroll
        for (int kb = 0; kb < G::kWarpKBlocks; kb += Multiply::kBatch)
          multiply.template add<Multiply::kBatch>(now, kb, kGroupBlocks, sums, squares);
      } else if constexpr (G::kWarpKBlocks > 2) {
#pragma unroll 1
        for (int kb = 0; kb < blocks; kb += 2) {
          const int group = min(kGroupBlocks, blocks - kb / kGroupBlocks * kGroupBlocks);
          multiply.template add<2>(now, kb, group, sums, squares);
        }
      }
      __syncwarp();
      if (role_.lane == 0) mbar_arrive(ring_.empty + 8 * at.stage);
      at.next(ring_);
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[t][i] = kSums == 2 ? sums[0][t][i] + sums[1][t][i] : sums[0][t][i];
    }
    merge_halves(acc, squares);
  }

  __device__ __forceinline__ float4* exchange() const { return reinterpret_cast<float4*>(shared_ + at_.exchange); }
  __device__ __forceinline__ float* squares() const { return reinterpret_cast<float*>(shared_ + at_.norms); }
  __device__ __forceinline__ float* norms() const { return squares() + 2 * G::kTokens; }

  __device__ __forceinline__ void merge_halves(float (&acc)[kTokenTiles][4], const float (&lane_squares)[4]) {
    if constexpr (G::kHalves == 1 && !kNormed) return;
    const int lane = opaque_lane();
    consumer_barrier();  // whoever read `exchange` and `squares` before is done
    if (G::kHalves == 2 && role_.half == 1) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        exchange()[(t * G::kRowWarps + role_.strip) * 32 + lane] =
            make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
      }
    }
    const int g = lane / 4;
    if (kNormed && role_.strip < kTokenTiles && g / 2 == lane % 4) {
      squares()[role_.half * G::kTokens + role_.strip * 8 + g] = g % 2 == 0 ? lane_squares[0] : lane_squares[1];
    }
    consumer_barrier();
    if (G::kHalves == 2 && role_.half == 0) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const float4 other = exchange()[(t * G::kRowWarps + role_.strip) * 32 + lane];
        acc[t][0] += other.x, acc[t][1] += other.y, acc[t][2] += other.z, acc[t][3] += other.w;
      }
    }
  }

  __device__ __forceinline__ float own_squares(int token) const {
    return squares()[token] + (G::kHalves == 2 ? squares()[G::kTokens + token] : 0.0F);
  }

  // The lane behind a veil: else the compiler computes all epilogue addresses before the main loop and spills them.
  __device__ __forceinline__ int opaque_lane() const {
    int lane = role_.lane;
    asm volatile("" : "+r"(lane));
    return lane;
  }

  // A block shares at most two tiles with others: slot 0 is for the tile in which its range begins, 1 for any later
  // one.
  __device__ __forceinline__ float4* slot(int block, int tile, int segment) const {
    const int which = shape_.split.first(block) >= tile * per_tile_ ? 0 : 1;
    return shape_.partials + (static_cast<std::int64_t>(block * 2 + which) * shape_.segments + segment) * kSlot;
  }

  __device__ __forceinline__ void publish(float4* to, const float (&acc)[kTokenTiles][4]) {
    const int lane = opaque_lane();
    if (role_.half == 0) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        __stcg(to + (t * G::kRowWarps + role_.strip) * 32 + lane,
               make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]));
      }
    }
    const int token = role_.warp * 32 + lane;
    if (kNormed && token < G::kTokens)
      __stcg(reinterpret_cast<float*>(to + kTokenTiles * kLaneSums) + token, own_squares(token));
  }

  // Whether block `block` has chunks of this segment of the tile.
  __device__ __forceinline__ bool contributes(int block, int tile, int segment) const {
    const int begin = tile * per_tile_ + segment * shape_.chunks_per_segment;
    return shape_.split.first(block) < begin + shape_.chunks_per_segment && shape_.split.first(block + 1) > begin;
  }

  // Brings the tile's whole sum into `acc` if it falls to this block; publishes this block's part and returns false if
  // not.
  __device__ __forceinline__ bool complete(int tile, int segment, int piece_begin, int piece_end,
                                           float (&acc)[kTokenTiles][4]) {
    const int begin = tile * per_tile_;
    const bool whole = piece_begin == begin && piece_end == begin + per_tile_;
    int in_registers = segment;
    bool valid = true;
    int first = blockIdx.x;
    int last = blockIdx.x;
    if (!whole) {
      first = shape_.split.block_of(begin);
      last = shape_.split.block_of(begin + per_tile_ - 1);
      volatile int* const flag = reinterpret_cast<int*>(shared_ + at_.barriers + 8 * (2 * ring_.stages + 1));
      std::uint32_t* const counter = shape_.counters + tile;
      const bool owner = shape_.reduction == Reduction::kOwner;
      if (!owner || piece_begin != begin) {
        publish(slot(blockIdx.x, tile, segment), acc);
        consumer_barrier();
        if (owner) {
          if (threadIdx.x == 0) add_release(counter);
          return false;
        }
        if (threadIdx.x == 0)
          *flag = increment_wrapping(counter, last - first) == static_cast<std::uint32_t>(last - first);
        consumer_barrier();
        const bool mine = *flag != 0;
        consumer_barrier();  // the flag serves the next tile too
        if (!mine) return false;
        in_registers = -1;
      } else {
        Step::template touch_inputs<kTokenTiles>(params_, view_of(tile));
        if (threadIdx.x == 0) *flag = wait_for(counter, last - first);
        consumer_barrier();
        valid = *flag != 0;
      }
    }
    if (whole && shape_.segments == 1 && !kNormed) return true;
    add_parts(tile, first, last, in_registers, acc);
    if (!valid) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = __int_as_float(0x7FFFFFFF);
    }
    return true;
  }

  // Waits until `count` blocks have published. A block that never comes (the grid was not resident after all) costs a
  // draft, not the server: `failed` tells the host, and the NaN that follows becomes "no draft".
  __device__ bool wait_for(std::uint32_t* counter, int count) const {
    const std::uint64_t start = now_ns();
    std::uint32_t polls = 0;
#pragma unroll 1
    while (load_acquire(counter) < static_cast<std::uint32_t>(count)) {
      if ((++polls & 255U) == 0 && now_ns() - start > kDeadlineNs) {
        *reinterpret_cast<volatile std::uint32_t*>(shape_.failed) = 1;
        __threadfence_system();  // it may lie in the host's memory
        return false;
      }
    }
    *reinterpret_cast<volatile std::uint32_t*>(counter) = 0;
    return true;
  }

  // acc = Σ over segments of 1/rms · Σ over blocks, in a fixed order; `in_registers` is the segment whose own part acc
  // holds.
  __device__ __forceinline__ void add_parts(int tile, int first, int last, int in_registers,
                                            float (&acc)[kTokenTiles][4]) {
    const int lane = opaque_lane();
    if constexpr (kNormed) {
      const int token = role_.warp * 32 + lane;
      if (token < G::kTokens) {
        for (int segment = 0; segment < shape_.segments; ++segment) {
          float sum = segment == in_registers ? own_squares(token) : 0.0F;
          for (int base = first; base <= last; base += 4) {
            float part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int block = base + i;
              const auto* const from =
                  reinterpret_cast<const float*>(slot(block, tile, segment) + kTokenTiles * kLaneSums) + token;
              part[i] = published(block, last, tile, segment, in_registers) ? __ldcg(from) : 0.0F;
            }
            sum += part[0], sum += part[1], sum += part[2], sum += part[3];
          }
          norms()[segment * G::kTokens + token] =
              shape_.gamma[segment] == nullptr ? 1.0F : rsqrtf(sum / static_cast<float>(shape_.k) + shape_.eps);
        }
      }
      consumer_barrier();
    }
    if (role_.half != 0) return;
    if (in_registers < 0) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0F;
    } else {
      add_published(tile, first, last, in_registers, in_registers, lane, acc);
      if (kNormed) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const float2 norm = norm_of(in_registers, t, lane);
          acc[t][0] *= norm.x, acc[t][1] *= norm.y, acc[t][2] *= norm.x, acc[t][3] *= norm.y;
        }
      }
    }
    for (int segment = 0; segment < shape_.segments; ++segment) {
      if (segment != in_registers) add_published(tile, first, last, segment, in_registers, lane, acc);
    }
  }

  __device__ __forceinline__ float2 norm_of(int segment, int t, int lane) const {
    return *reinterpret_cast<const float2*>(norms() + segment * G::kTokens + t * 8 + lane % 4 * 2);
  }

  // Whether `block`, of first..last, has published a part of this segment; the own part of `in_registers` is not.
  __device__ __forceinline__ bool published(int block, int last, int tile, int segment, int in_registers) const {
    return block <= last && !(segment == in_registers && block == blockIdx.x) && contributes(block, tile, segment);
  }

  // acc += the published parts of a segment, times its 1/rms unless it is the one in registers, which is scaled later.
  // Each read is a round trip to L2: with few tokens several are under way at once; they are added in order.
  __device__ __forceinline__ void add_published(int tile, int first, int last, int segment, int in_registers, int lane,
                                                float (&acc)[kTokenTiles][4]) {
    constexpr int kAtOnce = kTokenTiles == 1 ? 4 : kTokenTiles == 2 ? 2 : 1;
    for (int base = first; base <= last; base += kAtOnce) {
      float4 part[kAtOnce][kTokenTiles];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool there = published(base + i, last, tile, segment, in_registers);
        const float4* const from = slot(base + i, tile, segment) + role_.strip * 32 + lane;
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
          part[i][t] = there ? __ldcg(from + t * kLaneSums) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const float2 norm = kNormed && segment != in_registers ? norm_of(segment, t, lane) : make_float2(1.0F, 1.0F);
          acc[t][0] = fmaf(norm.x, part[i][t].x, acc[t][0]), acc[t][1] = fmaf(norm.y, part[i][t].y, acc[t][1]);
          acc[t][2] = fmaf(norm.x, part[i][t].z, acc[t][2]), acc[t][3] = fmaf(norm.y, part[i][t].w, acc[t][3]);
        }
      }
    }
  }

  __device__ __forceinline__ TileView<typename Step::RowInfo> view_of(int tile) const {
    TileView<typename Step::RowInfo> view;
    view.role = role_;
    view.role.lane = opaque_lane();
    view.tile_row = (shape_.first_row_tile + tile) * G::kTileRows;
    view.tokens = shape_.tokens;
    view.rows = reinterpret_cast<const typename Step::RowInfo*>(shared_ + at_.row_info);
    view.exchange = reinterpret_cast<float*>(exchange());
    view.state = shared_ + at_.state;
    return view;
  }

  // Of the first row of this warp's strip.
  __device__ __forceinline__ const float* row_scales(int tile) const {
    return shape_.row_scales + (shape_.first_row_tile + tile) * G::kTileRows + role_.strip * kStripRows;
  }

  __device__ __forceinline__ void epilogue(int tile, float (&acc)[kTokenTiles][4]) {
    mbar_wait(ring_.empty + 8 * ring_.stages, 0);  // row_info is there; passes at once ever after
    if (Weights::kRowScales && role_.half == 0) {
      constexpr float kRest = Multiply::kRest;
      const float* const scales = row_scales(tile) + opaque_lane() / 4;
      const float low = __ldg(scales);
      const float high = __ldg(scales + 8);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        acc[t][0] *= kRest, acc[t][1] *= kRest, acc[t][2] *= kRest, acc[t][3] *= kRest;
        acc[t][0] *= low, acc[t][1] *= low, acc[t][2] *= high, acc[t][3] *= high;
      }
    }
    Step::template tile<kTokenTiles>(params_, view_of(tile), acc);
  }

  const GemmShape& shape_;
  const typename Step::Params& params_;
  const Ring& ring_;
  std::byte* const shared_;
  const SharedLayout& at_;
  WarpRole role_;
  int per_tile_;
};

template <class Weights, int kTokenTiles, class Step>
__global__ void __launch_bounds__(kThreads, 2)
    stream_gemm(const __grid_constant__ GemmShape shape, const __grid_constant__ SharedLayout at,
                const __grid_constant__ typename Step::Params params) {
  using G = Geometry<Weights, kTokenTiles>;
  extern __shared__ __align__(128) std::byte shared[];
  if (shape.release == Release::kAtOnce) release_dependents();
  if (is_idle(shape.needed)) {
    wait_for_producers();
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const std::uint32_t base = shared_address(shared);
  const std::uint32_t full = base + at.barriers;
  const Ring ring{
      base, base + at.x, base + at.gamma, full, full + 8 * shape.stages, shape.stages, G::kChunkK * shape.tokens * 2};
  const std::uint32_t rows_ready = ring.empty + 8 * shape.stages;
  if (threadIdx.x == kConsumerThreads) {
    for (int stage = 0; stage < shape.stages; ++stage) {
      mbar_init(ring.full + 8 * stage, kFullArrivals);
      mbar_init(ring.empty + 8 * stage, kConsumerWarps);
    }
    mbar_init(rows_ready, 1);
    mbar_init_fence();
  }
  __syncthreads();

  const int first = shape.split.first(blockIdx.x);
  const int last = shape.split.first(blockIdx.x + 1);
  if (warp == kConsumerWarps) {
    produce_weights<Weights, kTokenTiles, Step::kNormed>(shape, ring, first, last);
    wait_for_producers();
    if (!kBulkCopies) asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
  if (warp > kConsumerWarps) {
    const bf16** const sources = reinterpret_cast<const bf16**>(shared + at.sources);
    auto* const rows = reinterpret_cast<typename Step::RowInfo*>(shared + at.row_info);
    touch_parameters(params);
#pragma unroll 1
    for (int round = Step::rehearses(params) ? 0 : 1; round < 2; ++round) {
      if (round == 1) wait_for_producers();  // below it is whatever the kernels before have made
      for (int token = lane; token < shape.tokens; token += 32)
        Step::locate(params, token, sources + token, G::kTokens, rows + token);
      __syncwarp();
    }
    if (shape.release == Release::kAfterWait) release_dependents();
    if (lane == 0) mbar_arrive(rows_ready);
    produce_activations<Weights, kTokenTiles>(shape, ring, sources, first, last);
    Step::template beside<kTokenTiles>(params, sources, shape.tokens, lane);
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
  mbar_wait(full, 0);  // activations are there, so the wait is over; till here the consumers have touched no memory
  wait_for_producers();
  Consumer<Weights, kTokenTiles, Step>(shape, params, ring, shared, at).run();
}

}  // namespace eaglex::stream
