// Low-bit weights and a single token: a block fetches all the x that it will need once and makes it ready for the tensor
// cores, instead of beside every chunk of every tile.
//
// Caller: run_block and Consumer (gemm.cuh).    Bytes: x and gamma of the block's chunks once, from L2.
// Mapping: a warp prepares one chunk at a time: x times gamma and 2^64, its sum of squares, and INT4's 8 times the sum of
// each 64 k. What is left of a chunk's work is PairedMultiplier's without norms: with 4 bits those cost as much as the
// weights.
#pragma once

#include "cuda/stream/paired.cuh"

namespace eaglex::stream {

// Of the four pairs of a lane.
template <class Add>
__device__ __forceinline__ float over(const uint4& x, Add&& add) {
  const std::uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = add(sum, __bfloat1622float2(unpack(pairs[i])));
  return sum;
}

// Over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float sum_over(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
  return value;
}

// A block's `unit` finds its x in place (unit - first) % chunks per tile; `begin` is where its first chunk stands in its
// tile. By all consumers, behind the wait; `sources` are the rows of x, one per segment.
template <class Weights, bool kNormed>
__device__ __forceinline__ void keep_inputs(const GemmShape& shape, const SharedLayout& at, std::byte* shared,
                                            const bf16* const* sources, int begin, int units) {
  using G = Geometry<Weights, 1>;
  static_assert(G::kChunkK == 32 * 8, "a lane has 16 bytes of a chunk");
  constexpr int kAtOnce = 4;  // round trips to L2 under way
  constexpr std::uint32_t kLift = PairedMultiplier<Weights, 1, kNormed>::kLift;
  const int lane = threadIdx.x % 32;
  const int per_tile = shape.segments * shape.chunks_per_segment;
  const int places = min(units, per_tile);
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < places; first += kAtOnce * kConsumerWarps) {
    uint4 x[kAtOnce];
    uint4 gamma[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = first + i * kConsumerWarps;
      x[i] = gamma[i] = make_uint4(0, 0, 0, 0);
      if (place >= places) continue;
      int chunk = begin + place;
      if (chunk >= per_tile) chunk -= per_tile;
      int segment = 0;
      for (; chunk >= shape.chunks_per_segment; chunk -= shape.chunks_per_segment) ++segment;
      const int k = chunk * G::kChunkK + lane * 8;
      if (k >= shape.k) continue;
      x[i] = __ldcg(reinterpret_cast<const uint4*>(sources[segment * G::kTokens] + k));
      const bf16* const own = kNormed ? shape.gamma[segment] : nullptr;
      if (kNormed) gamma[i] = __ldg(reinterpret_cast<const uint4*>((own != nullptr ? own : shape.ones) + k));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = first + i * kConsumerWarps;
      if (place >= places) break;
      const float squares = over(x[i], [](float sum, float2 v) { return fmaf(v.x, v.x, fmaf(v.y, v.y, sum)); });
      uint4 by = make_uint4(kLift, kLift, kLift, kLift);
      if constexpr (kNormed) scale_pairs(by, gamma[i]);
      scale_pairs(x[i], by);
      *reinterpret_cast<uint4*>(shared + at.x + place * (G::kChunkK * 2) + lane * 16) = x[i];
      if constexpr (kNormed) {
        const float sum = sum_over<32>(squares);
        if (lane == 0) reinterpret_cast<float*>(shared + at.x_squares)[place] = sum;
      }
      if constexpr (Weights::kGroupScales) {
        const float sum = sum_over<8>(over(x[i], [](float so_far, float2 v) { return so_far + (v.x + v.y); }));
        float* const to = reinterpret_cast<float*>(shared + at.x_sums) + place * (G::kChunkK / kKMultiple);
        if (lane % 8 == 0) to[lane / 8] = sum * kInt4BareEights;
      }
    }
  }
  consumer_barrier();
}

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
