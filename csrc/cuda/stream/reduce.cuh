// What the blocks of one matrix owe each other: partial sums of the tiles that they share, summed in a fixed order.
//
// Caller: Consumer (gemm.cuh). Bytes: 2 KB per shared tile, block and 8 tokens, through L2.
// Mapping: each thread of half 0 hands over and takes in what it holds in registers; slots are never shared by writers.
#pragma once

#include "cuda/stream/pipeline.cuh"

namespace eaglex::stream {

__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory");
}

// What a consumer warp is to a tile.
struct WarpRole {
  int lane;
  int warp;
  int strip;  // of 16 rows
  int half;   // of a chunk's k; half 0 keeps the sums
};

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
  int first_token = 0;  // acc[0] is of tokens from here on

  // f(token, row of W, sum) for each of the thread's sums; rows and tokens may lie beyond the matrix and the batch.
  template <int kTokenTiles>
  __device__ __forceinline__ void each_sum(const float (&acc)[kTokenTiles][4], auto f) const {
    if (role.half != 0) return;
    const int row = tile_row + role.strip * kStripRows + role.lane / 4;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(first_token + t * 8 + role.lane % 4 * 2 + i % 2, row + i / 2 * 8, acc[t][i]);
    }
  }
};
template <class Weights, int kTokenTiles, class Step>
class TileSums {
 protected:
  using G = Geometry<Weights, kTokenTiles>;
  // Where x is kept a block knows the norms, and sums come scaled, those of all segments as one.
  static constexpr bool kNormed = Step::kNormed && !Weights::kKeepsX;
  static constexpr int kLaneSums = G::kRowWarps * 32;         // float4 of one n8 tile in a slot
  static constexpr int kTokenSums = kTokenTiles * kLaneSums;  // behind them the tokens' squares
  static constexpr int kSlot = kTokenSums + kTokenTiles * 2;
  // More tokens leave no registers for them, and kept x needs none.
  static constexpr int kEarlyParts = kTokenTiles == 1 && !Weights::kKeepsX ? 2 : 0;

  // Parts of others for the block's last tile, read before its own is computed.
  struct Early {
    int count = 0;  // 0: not there yet, or not looked for
    float4 sums[kEarlyParts + 1];
    float squares[kEarlyParts + 1];
  };

  __device__ TileSums(const GemmShape& shape, const typename Step::Params& params, const Ring& ring, std::byte* shared,
                      const SharedLayout& at)
      : shape_(shape),
        params_(params),
        ring_(ring),
        shared_(shared),
        at_(at),
        per_tile_(shape.segments * shape.chunks_per_segment),
        waits_(shape.reduction != Reduction::kLastArriver &&
               (shape.never_wait == nullptr || is_idle(shape.never_wait))) {  // nobody changes that while cycles run
    role_.lane = threadIdx.x % 32;
    role_.warp = threadIdx.x / 32;
    role_.strip = role_.warp / G::kHalves;
    role_.half = role_.warp % G::kHalves;
  }

  __device__ __forceinline__ float4* exchange() const { return reinterpret_cast<float4*>(shared_ + at_.exchange); }
  __device__ __forceinline__ float* squares() const { return reinterpret_cast<float*>(shared_ + at_.norms); }
  __device__ __forceinline__ float* norms() const { return squares() + num_squares(G::kTokens); }

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
    if (kNormed && g / 2 == lane % 4) {
      const int part = role_.strip / kTokenTiles * G::kHalves + role_.half;
      squares()[part * G::kTokens + role_.strip % kTokenTiles * 8 + g] = g % 2 == 0 ? lane_squares[0] : lane_squares[1];
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

  __device__ __forceinline__ volatile int* block_flag() const {
    return reinterpret_cast<int*>(shared_ + at_.barriers + 8 * (3 * ring_.stages + 1));
  }

  __device__ __forceinline__ float own_squares(int token) const {
    float sum = squares()[token];
#pragma unroll
    for (int part = 1; part < num_squares(G::kTokens) / G::kTokens; ++part) sum += squares()[part * G::kTokens + token];
    return sum;
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
    const int size = Weights::kKeepsX ? per_tile_ : shape_.chunks_per_segment;
    const int begin = tile * per_tile_ + segment * size;
    return shape_.split.first(block) < begin + size && shape_.split.first(block + 1) > begin;
  }

  // Brings the tile's whole sum into `acc` if it falls to this block; publishes this block's part and returns false if
  // not.
  __device__ __forceinline__ bool complete(int tile, int segment, int piece_begin, int piece_end, const Early& early,
                                           float (&acc)[kTokenTiles][4]) {
    const int begin = tile * per_tile_;
    if constexpr (kEarlyParts > 0) {
      if (early.count > 0) {
        add_early(early, acc);
        return true;
      }
    }
    const bool whole = piece_begin == begin && piece_end == begin + per_tile_;
    int in_registers = segment;
    bool valid = true;
    int first = blockIdx.x;
    int last = blockIdx.x;
    if (!whole) {
      last = last_sharer_;
      if (!waits_) first = shape_.split.block_of(begin), last = shape_.split.block_of(begin + per_tile_ - 1);
      volatile int* const flag = block_flag();
      std::uint32_t* const counter = shape_.counters + tile;
      if (!waits_ || piece_begin != begin) {
        publish(slot(blockIdx.x, tile, segment), acc);
        consumer_barrier();
        if (waits_) {
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
        touch_inputs(tile);
        if (threadIdx.x == 0) *flag = wait_for(counter, last - first);
        consumer_barrier();
        valid = *flag != 0;
      }
    }
    if (whole && (shape_.segments == 1 || Weights::kKeepsX) && !kNormed) return true;
    add_parts(tile, first, last, in_registers, acc);
    if (!valid) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = __int_as_float(0x7FFFFFFF);
    }
    return true;
  }

  // The tile in which a block's range ends is, where tiles are shorter than ranges, the one in which the next block's
  // began: that part was published long ago. Reading it before this block's own hides three round trips to L2, which
  // everybody would wait for at the end of the kernel. Whether it is there in time does not change the sums' order.
  __device__ __forceinline__ void look_for_parts(int tile, int piece_begin, int piece_end, Early& early) const {
    const int begin = tile * per_tile_;
    if (!waits_ || shape_.segments > 1 || piece_begin != begin || piece_end == begin + per_tile_) return;
    const int count = last_sharer_ - static_cast<int>(blockIdx.x);
    if (count > kEarlyParts) return;
    volatile int* const flag = block_flag();
    std::uint32_t* const counter = shape_.counters + tile;
    if (threadIdx.x == 0) {
      const bool there = load_acquire(counter) == static_cast<std::uint32_t>(count);
      if (there) *reinterpret_cast<volatile std::uint32_t*>(counter) = 0;
      *flag = there;
    }
    consumer_barrier();
    if (*flag == 0) return;
    early.count = count;
    const int lane = opaque_lane();
    const int token = role_.warp * 32 + lane;
#pragma unroll
    for (int i = 0; i < kEarlyParts; ++i) {
      const float4* const from = slot(static_cast<int>(blockIdx.x) + 1 + i, tile, 0);
      const bool mine = i < count;
      early.sums[i] =
          mine && role_.half == 0 ? __ldcg(from + role_.strip * 32 + lane) : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      early.squares[i] = kNormed && mine && token < G::kTokens
                             ? __ldcg(reinterpret_cast<const float*>(from + kTokenTiles * kLaneSums) + token)
                             : 0.0F;
    }
  }

  // add_parts for those: the same sums in the same order.
  __device__ __forceinline__ void add_early(const Early& early, float (&acc)[kTokenTiles][4]) {
    const int lane = opaque_lane();
    if constexpr (kNormed) {
      const int token = role_.warp * 32 + lane;
      if (token < G::kTokens) {
        float sum = own_squares(token);
#pragma unroll
        for (int i = 0; i < kEarlyParts; ++i) sum += early.squares[i];
        norms()[token] = shape_.gamma[0] == nullptr ? 1.0F : rsqrtf(sum / static_cast<float>(shape_.k) + shape_.eps);
      }
      consumer_barrier();
    }
    if (role_.half != 0) return;
#pragma unroll
    for (int i = 0; i < kEarlyParts; ++i) {
      acc[0][0] += early.sums[i].x, acc[0][1] += early.sums[i].y;
      acc[0][2] += early.sums[i].z, acc[0][3] += early.sums[i].w;
    }
    if (kNormed) {
      const float2 norm = norm_of(0, 0, lane);
      acc[0][0] *= norm.x, acc[0][1] *= norm.y, acc[0][2] *= norm.x, acc[0][3] *= norm.y;
    }
  }

  // What the tile's epilogue will read comes into L1, where it is known.
  __device__ __forceinline__ void touch_inputs(int tile) const {
    if (!rows_known_) return;
    mbar_wait(ring_.empty + 8 * ring_.stages, 0);  // row_info is there
    Step::template touch_inputs<kTokenTiles>(params_, view_of(tile));
  }

  // Waits until `count` blocks have published. A block that never comes (the grid was not resident after all) costs a
  // draft, not the server: `failed` tells the host, and the NaN that follows becomes "no draft". Its counter keeps a rest,
  // so what comes before the host has cleared it (FastChain::check) is void as well.
  __device__ bool wait_for(std::uint32_t* counter, int count) const {
    if (!wait_until(counter, count)) return false;
    *reinterpret_cast<volatile std::uint32_t*>(counter) = 0;
    return true;
  }

  __device__ bool wait_until(const std::uint32_t* counter, int count) const {
    const std::uint64_t start = now_ns();
    std::uint32_t polls = 0;
#pragma unroll 1
    while (load_acquire(counter) < static_cast<std::uint32_t>(count)) {
      if ((++polls & 255U) != 0) continue;
      volatile std::uint32_t* const failed = shape_.failed;
      if (*failed != 0) return false;  // launches behind one that failed must not take their 2 s each
      if (now_ns() - start > kDeadlineNs) {
        *failed = 1;
        __threadfence_system();  // it may lie in the host's memory
        return false;
      }
    }
    return true;
  }

  // 1/rms of every token and segment, from the blocks' sums of squares.
  __device__ __forceinline__ void find_norms(int tile, int first, int last, int in_registers) {
    if constexpr (kNormed) {
      const int token = role_.warp * 32 + opaque_lane();
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
  }

  // acc = Σ over segments of 1/rms · Σ over blocks, in a fixed order; `in_registers` is the segment whose own part acc
  // holds.
  __device__ __forceinline__ void add_parts(int tile, int first, int last, int in_registers,
                                            float (&acc)[kTokenTiles][4]) {
    const int lane = opaque_lane();
    find_norms(tile, first, last, in_registers);
    if (role_.half != 0) return;
    if (in_registers < 0) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0F;
    } else {
      add_published(tile, first, last, in_registers, in_registers, lane, acc);
      scale(in_registers, lane, acc);
    }
    for (int segment = 0; segment < (Weights::kKeepsX ? 1 : shape_.segments); ++segment) {
      if (segment != in_registers) add_published(tile, first, last, segment, in_registers, lane, acc);
    }
  }

  __device__ __forceinline__ void scale(int segment, int lane, float (&acc)[kTokenTiles][4]) const {
    if constexpr (kNormed) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const float2 norm = norm_of(segment, t, lane);
        acc[t][0] *= norm.x, acc[t][1] *= norm.y, acc[t][2] *= norm.x, acc[t][3] *= norm.y;
      }
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
    constexpr int kGroup = kTokenTiles < 8 ? kTokenTiles : 8;
#pragma unroll
    for (int group = 0; group < kTokenTiles; group += kGroup)
      add_group<kAtOnce, kGroup>(tile, first, last, segment, in_registers, lane, group, acc);
  }

  // The same of kGroup tiles of 8 tokens from `group` on.
  template <int kAtOnce, int kGroup>
  __device__ __forceinline__ void add_group(int tile, int first, int last, int segment, int in_registers, int lane,
                                            int group, float (&acc)[kTokenTiles][4]) {
    for (int base = first; base <= last; base += kAtOnce) {
      float4 part[kAtOnce][kGroup];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool there = published(base + i, last, tile, segment, in_registers);
        const float4* const from = slot(base + i, tile, segment) + role_.strip * 32 + lane;
#pragma unroll
        for (int t = 0; t < kGroup; ++t)
          part[i][t] = there ? __ldcg(from + (group + t) * kLaneSums) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int t = 0; t < kGroup; ++t) {
          float (&to)[4] = acc[group + t];
          const float2 norm =
              kNormed && segment != in_registers ? norm_of(segment, group + t, lane) : make_float2(1.0F, 1.0F);
          to[0] = fmaf(norm.x, part[i][t].x, to[0]), to[1] = fmaf(norm.y, part[i][t].y, to[1]);
          to[2] = fmaf(norm.x, part[i][t].z, to[2]), to[3] = fmaf(norm.y, part[i][t].w, to[3]);
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

  const GemmShape& shape_;
  const typename Step::Params& params_;
  const Ring& ring_;
  std::byte* const shared_;
  const SharedLayout& at_;
  WarpRole role_;
  int last_sharer_ = 0;  // last block of the tile in which this one's range ends
  const int per_tile_;
  const bool waits_;                  // owners do; else whoever is last sums up
  bool waits_for_producers_ = false;  // the kernels before are not known to be done (run_early)
  bool rows_known_ = true;            // or will be soon; false: not yet, or nobody wants the result
};

}  // namespace eaglex::stream
