// Low-bit weights and a single token: a block fetches all the x that it will need once and makes it ready for the tensor
// cores, instead of beside every chunk of every tile.
//
// Caller: run_block and Consumer (gemm.cuh).    Bytes: x and gamma of the block's chunks once, from L2; with norms all x.
// Mapping: a warp prepares one chunk at a time: x times gamma and 2^64, and INT4's 8 times the sum of each 64 k; the sums
// of squares are of all of x, for which a block needs nobody else. What is left of a chunk's work is PairedMultiplier's
// without norms: with 4 bits those cost as much as the weights.
#pragma once

#include <type_traits>

#include "cuda/stream/paired.cuh"

namespace eaglex::stream {

// A block's `unit` finds its x in place (unit - first) % chunks per tile.
template <class Weights, bool kNormed>
class KeptInputs {
  using G = Geometry<Weights, 1>;
  static_assert(G::kChunkK == 32 * 8, "a lane has 16 bytes of a chunk");
  static_assert(Weights::kGroupScales, "INT4's offset is among what is kept");
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
    const int count = kNormed ? per_tile_ : places_;  // a norm needs all of x
    int place = threadIdx.x / 32;
    while (true) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        x[i] = k_[i] < 0 ? make_uint4(0, 0, 0, 0)
                         : __ldcg(reinterpret_cast<const uint4*>(sources[segment_[i] * G::kTokens] + k_[i]));
#pragma unroll
      for (int i = 0; i < kAtOnce; i += kPair) {
        if (place + i * kConsumerWarps < count) store_pair(at, shared, place + i * kConsumerWarps, x + i, gamma_ + i);
      }
      place += kAtOnce * kConsumerWarps;
      if (place >= count) break;
      find(place);
    }
    consumer_barrier();
    if constexpr (kNormed) find_norms(at, shared);
  }

 private:
  __device__ __forceinline__ int chunk_at(int place) const {
    const int chunk = begin_ + place;
    return chunk >= per_tile_ ? chunk - per_tile_ : chunk;
  }

  __device__ __forceinline__ void find(int place) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, place += kConsumerWarps) {
      k_[i] = -1, segment_[i] = 0, gamma_[i] = make_uint4(0, 0, 0, 0);
      if (place >= (kNormed ? per_tile_ : places_)) continue;
      int chunk = chunk_at(place);
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
      if (place + i * kConsumerWarps >= places_) continue;  // for the norm alone
      uint4 by = make_uint4(kLift, kLift, kLift, kLift);
      if constexpr (kNormed) scale_pairs(by, gamma[i]);
      scale_pairs(x[i], by);
      sums[i] = over(x[i], [](float sum, float2 v) { return sum + (v.x + v.y); });
      std::byte* const to = shared + at.x + (place + i * kConsumerWarps) * (G::kChunkK * 2);
      *reinterpret_cast<uint4*>(to + lane * 16) = x[i];
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        if (distance < 8) sums[i] += __shfl_xor_sync(0xFFFFFFFF, sums[i], distance);
        if (kNormed) squares[i] += __shfl_xor_sync(0xFFFFFFFF, squares[i], distance);
      }
    }
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      const int to = place + i * kConsumerWarps;
      if (kNormed && lane == 0 && to < per_tile_)
        reinterpret_cast<float*>(shared + at.x_squares)[chunk_at(to)] = squares[i];
      if (lane % 8 == 0 && to < places_)
        reinterpret_cast<float*>(shared + at.x_sums)[to * (G::kChunkK / kKMultiple) + lane / 8] =
            sums[i] * kInt4BareEights;
    }
  }

  // 1 / rms of each segment, for TileSums::norms; the first tile's end brings the barrier before they are read.
  __device__ __forceinline__ void find_norms(const SharedLayout& at, std::byte* shared) const {
    const int lane = threadIdx.x % 32;
    for (int segment = threadIdx.x / 32; segment < shape_.segments; segment += kConsumerWarps) {
      const float* const squares =
          reinterpret_cast<const float*>(shared + at.x_squares) + segment * shape_.chunks_per_segment;
      float sum = 0;
#pragma unroll 1
      for (int i = lane; i < shape_.chunks_per_segment; i += 32) sum += squares[i];
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
      if (lane == 0)
        (reinterpret_cast<float*>(shared + at.norms) + num_squares(G::kTokens))[segment * G::kTokens] =
            shape_.gamma[segment] == nullptr ? 1.0F : rsqrtf(sum / static_cast<float>(shape_.k) + shape_.eps);
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

// A single token: all columns of a product are the same, so that of its sums a lane keeps those of rows g and g + 8 alone.
template <class Weights, bool kNormed>
struct KeptMultiplier : PairedMultiplier<Weights, 1, kNormed> {
  using Base = PairedMultiplier<Weights, 1, kNormed>;
  using Base::kParts;
  using Base::kStrips;
  using Base::kTeams;
  using Base::lane;
  using Base::warp;
  using typename Base::G;
  using Sums = float (&)[kStrips][2];

  // The warp's two K blocks of a chunk whose weights begin at `weights` and its group's at `scales`.
  __device__ __forceinline__ void add(const std::byte* weights, const std::byte* scales, const std::byte* x_at,
                                      const float* sums_at, int group, Sums sums) const {
    const uint4 x[2] = {*reinterpret_cast<const uint4*>(x_at), *reinterpret_cast<const uint4*>(x_at + 64)};
    const float bare = *sums_at;
    const float joint = bare * (kInt4JointEights / kInt4BareEights);
    const float eights[4] = {bare, bare, joint, joint};
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      std::uint32_t a[2][2][4];
      Weights::load_two(weights + strip * 512, a);
      const float2 scale = Weights::scales(scales, group, strip, lane);
      float own[4];
      mma_bf16(own, a[0][0], x[0].x, x[0].y, eights);
      mma_bf16(own, a[0][1], x[0].z, x[0].w);
      mma_bf16(own, a[1][0], x[1].x, x[1].y);
      mma_bf16(own, a[1][1], x[1].z, x[1].w);
      sums[strip][0] = fmaf(scale.x, own[0], sums[strip][0]);
      sums[strip][1] = fmaf(scale.y, own[2] - own[0], sums[strip][1]);
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
      mine.skip(ring, kTeams);
    }
  }

  // Sums over the warps, in their order: `acc` of strip warp / 2 in the even warps.
  __device__ __forceinline__ void merge(const float (&sums)[kStrips][2], float* exchange, float (&acc)[1][4]) const {
    const int q = lane % 4;
    const float low = q == 0 ? sums[0][0] : q == 1 ? sums[1][0] : q == 2 ? sums[2][0] : sums[3][0];
    const float high = q == 0 ? sums[0][1] : q == 1 ? sums[1][1] : q == 2 ? sums[2][1] : sums[3][1];
    consumer_barrier();  // whoever read `exchange` before is done
    float* const to = exchange + warp * kBlockRows + q * kStripRows + lane / 4;
    to[0] = low, to[8] = high;
    consumer_barrier();
    const float* const from = exchange + warp / 2 * kStripRows + lane / 4;
    float sum[2] = {};
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) sum[0] += from[w * kBlockRows], sum[1] += from[w * kBlockRows + 8];
    acc[0][0] = acc[0][1] = sum[0], acc[0][2] = acc[0][3] = sum[1];
  }
};

}  // namespace eaglex::stream
