// Low-bit weights and a single token: a block fetches all the x that it will need once and makes it ready for the tensor
// cores, instead of beside every chunk of every tile.
//
// Caller: run_block and Consumer (gemm.cuh).    Bytes: x and gamma of the block's chunks once, from L2.
// Mapping: a warp prepares one chunk at a time: x times gamma and 2^64, its sum of squares, and INT4's 8 times the sum of
// each 64 k. What is left of a chunk's work is PairedMultiplier's without norms: with 4 bits those cost as much as the
// weights.
#pragma once

#include <type_traits>

#include "cuda/stream/paired.cuh"

namespace eaglex::stream {

// A block's `unit` finds its x in place (unit - first) % chunks per tile.
template <class Weights, bool kNormed>
class KeptInputs {
  using G = Geometry<Weights, 1>;
  static_assert(G::kChunkK == 32 * 8, "a lane has 16 bytes of a chunk");
  static constexpr int kAtOnce = 4;  // chunks of a warp, whose round trips to L2 are under way together
  static constexpr int kPair = 2;
  static constexpr std::uint32_t kLift = PairedMultiplier<Weights, 1, kNormed>::kLift;

 public:
  // Before the wait: where the first chunks' x will lie, and their gamma.
  __device__ __forceinline__ KeptInputs(const GemmShape& shape, int first, int last) : shape_(shape) {
    per_tile_ = shape.segments * shape.chunks_per_segment;
    places_ = min(last - first, per_tile_);
    begin_ = first % per_tile_;
    if (threadIdx.x < kConsumerThreads) find(threadIdx.x / 32);
  }

  // Behind it, by all consumers; `sources` are the rows of x, one per segment.
  __device__ __forceinline__ void keep(const SharedLayout& at, std::byte* shared, const bf16* const* sources) {
    int place = threadIdx.x / 32;
    while (true) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        x[i] = k_[i] < 0 ? make_uint4(0, 0, 0, 0)
                         : __ldcg(reinterpret_cast<const uint4*>(sources[segment_[i] * G::kTokens] + k_[i]));
#pragma unroll
      for (int i = 0; i < kAtOnce; i += kPair) {
        if (place + i * kConsumerWarps < places_) store_pair(at, shared, place + i * kConsumerWarps, x + i, gamma_ + i);
      }
      place += kAtOnce * kConsumerWarps;
      if (place >= places_) break;
      find(place);
    }
    consumer_barrier();
  }

 private:
  __device__ __forceinline__ void find(int place) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, place += kConsumerWarps) {
      k_[i] = -1, segment_[i] = 0, gamma_[i] = make_uint4(0, 0, 0, 0);
      if (place >= places_) continue;
      int chunk = begin_ + place;
      if (chunk >= per_tile_) chunk -= per_tile_;
      for (; chunk >= shape_.chunks_per_segment; chunk -= shape_.chunks_per_segment) ++segment_[i];
      const int k = chunk * G::kChunkK + lane * 8;
      if (k >= shape_.k) continue;
      k_[i] = k;
      const bf16* const own = kNormed ? shape_.gamma[segment_[i]] : nullptr;
      if constexpr (kNormed) gamma_[i] = load_now((own != nullptr ? own : shape_.ones) + k);
    }
  }

  // Here and not where it is used.
  __device__ static __forceinline__ uint4 load_now(const bf16* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
  }

  // Two at a time: their sums over lanes hide each other's latency. What lies beyond the last place is zero.
  __device__ __forceinline__ void store_pair(const SharedLayout& at, std::byte* shared, int place, uint4* x,
                                             const uint4* gamma) const {
    const int lane = threadIdx.x % 32;
    float squares[kPair] = {};
    float sums[kPair] = {};
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      if constexpr (kNormed)
        squares[i] = over(x[i], [](float sum, float2 v) { return fmaf(v.x, v.x, fmaf(v.y, v.y, sum)); });
      uint4 by = make_uint4(kLift, kLift, kLift, kLift);
      if constexpr (kNormed) scale_pairs(by, gamma[i]);
      scale_pairs(x[i], by);
      if constexpr (Weights::kGroupScales) sums[i] = over(x[i], [](float sum, float2 v) { return sum + (v.x + v.y); });
      if (place + i * kConsumerWarps < places_) {
        std::byte* const to = shared + at.x + (place + i * kConsumerWarps) * (G::kChunkK * 2);
        *reinterpret_cast<uint4*>(to + lane * 16) = x[i];
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        if (Weights::kGroupScales && distance < 8) sums[i] += __shfl_xor_sync(0xFFFFFFFF, sums[i], distance);
        if (kNormed) squares[i] += __shfl_xor_sync(0xFFFFFFFF, squares[i], distance);
      }
    }
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      const int to = place + i * kConsumerWarps;
      if (to >= places_) break;
      if (kNormed && lane == 0) reinterpret_cast<float*>(shared + at.x_squares)[to] = squares[i];
      if (Weights::kGroupScales && lane % 8 == 0)
        reinterpret_cast<float*>(shared + at.x_sums)[to * (G::kChunkK / kKMultiple) + lane / 8] =
            sums[i] * kInt4BareEights;
    }
  }

  template <class Add>
  __device__ static __forceinline__ float over(const uint4& x, Add&& add) {
    const std::uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = add(sum, __bfloat1622float2(unpack(pairs[j])));
    return sum;
  }

  const GemmShape& shape_;
  int per_tile_;
  int places_;
  int begin_;  // of the block's first chunk in its tile
  int k_[kAtOnce];
  int segment_[kAtOnce];
  uint4 gamma_[kAtOnce];
};

// Where x comes beside the weights.
struct StreamedInputs {
  __device__ StreamedInputs(const GemmShape&, int, int) {}
};

// Chunks [unit, end) of one segment, of which the first is its `chunk`th and has its x in place `kept` of `places`.
struct KeptPiece {
  int unit;
  int end;
  int chunk;
  int kept;
  int places;
};

template <class Weights, bool kNormed>
struct KeptMultiplier : PairedMultiplier<Weights, 1, kNormed> {
  using Base = PairedMultiplier<Weights, 1, kNormed>;
  using Base::kGrouped;
  using Base::kParts;
  using Base::kStrips;
  using Base::kTeams;
  using Base::lane;
  using Base::warp;
  using typename Base::G;
  using typename Base::Sums;

  // The warp's two K blocks of a chunk whose weights begin at `weights` and its group's at `scales`.
  __device__ __forceinline__ void add(const std::byte* weights, const std::byte* scales, const std::byte* x_at,
                                      const float* sums_at, int group, Sums sums) const {
    const uint4 x[2] = {*reinterpret_cast<const uint4*>(x_at), *reinterpret_cast<const uint4*>(x_at + 64)};
    float eights[4] = {};  // of columns that nobody reads as well
    if constexpr (kGrouped) {
      eights[0] = eights[1] = *sums_at;
      eights[2] = eights[3] = eights[0] * (kInt4JointEights / kInt4BareEights);
    }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      std::uint32_t a[2][2][4];
      Weights::load_two(weights + strip * 512, a);
      float (&sum)[4] = sums[strip][0];
      if constexpr (kGrouped) {
        const float2 scale = Weights::scales(scales, group, strip, lane);
        float own[4];
        mma_bf16(own, a[0][0], x[0].x, x[0].y, eights);
        mma_bf16(own, a[0][1], x[0].z, x[0].w);
        mma_bf16(own, a[1][0], x[1].x, x[1].y);
        mma_bf16(own, a[1][1], x[1].z, x[1].w);
        sum[0] = fmaf(scale.x, own[0], sum[0]), sum[1] = fmaf(scale.x, own[1], sum[1]);
        sum[2] = fmaf(scale.y, own[2] - own[0], sum[2]), sum[3] = fmaf(scale.y, own[3] - own[1], sum[3]);
      } else {
        mma_bf16(sum, a[0][0], x[0].x, x[0].y);
        mma_bf16(sum, a[0][1], x[0].z, x[0].w);
        mma_bf16(sum, a[1][0], x[1].x, x[1].y);
        mma_bf16(sum, a[1][1], x[1].z, x[1].w);
      }
    }
  }

  // As PairedMultiplier::add_chunks.
  __device__ __forceinline__ void add_chunks(const GemmShape& shape, const Ring& ring, const std::byte* shared,
                                             const SharedLayout& at, KeptPiece piece, RingPosition& position,
                                             Sums sums) const {
    const int first_of_group = this->k_block() / kGroupBlocks * kGroupBlocks;
    const int last = shape.k / kKBlock - (shape.chunks_per_segment - 1) * G::kKBlocks - first_of_group;
    const auto all = this->operands(shared, at);
    const std::byte* const sums_at = shared + at.x_sums + this->k_block() / 2 * 4;
    RingPosition mine = position;
    position.advance(ring, piece.end - piece.unit);
    if constexpr (kTeams > 1) {
      const int skipped = (this->team() - piece.unit) & (kTeams - 1);
      piece.unit += skipped, piece.chunk += skipped, piece.kept += skipped, mine.advance(ring, skipped);
    }
    for (; piece.unit < piece.end; piece.unit += kTeams, piece.chunk += kTeams, piece.kept += kTeams) {
      mbar_wait(ring.landed + 8 * mine.stage, mine.phase);
      if (piece.kept >= piece.places) piece.kept -= piece.places;
      const int group = piece.chunk + 1 < shape.chunks_per_segment ? kGroupBlocks : min(kGroupBlocks, last);
      if (this->k_block() - first_of_group < group) {
        const int stage = mine.stage * G::kStageBytes;
        add(all.weights + stage, all.scales + stage, all.x + piece.kept * (G::kChunkK * 2),
            reinterpret_cast<const float*>(sums_at + piece.kept * (kParts * 4)), group, sums);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * mine.stage);
      mine.advance(ring, kTeams);
    }
  }

  // Of `count` chunks from place `kept` on: the warp's part for TileSums::own_squares.
  __device__ __forceinline__ void store_squares(const float* squares, int kept, int count, int places,
                                                float* all_squares) const {
    if (lane >= 8) return;
    float sum = 0;
#pragma unroll 1
    for (int i = warp; i < count; i += kConsumerWarps)
      sum += squares[kept + i >= places ? kept + i - places : kept + i];
    all_squares[warp * 8 + lane] = sum;
  }
};

}  // namespace eaglex::stream
