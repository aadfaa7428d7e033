// sums += W x where weights have few bits and tokens are few: a warp multiplies several strips of 16 rows by the same x.
//
// Caller: Consumer::accumulate (gemm.cuh).    Bytes: the chunks' weights once, their x and gamma once per set of strips.
// Mapping: reading x and gamma and multiplying them costs a warp as much as turning 4 bits into operands does, so with up
// to 8 tokens it serves all four strips of a tile, with 16 two. A warp has two K blocks of a chunk; where that leaves
// warps over they form teams, to which chunks are dealt in turn.
#pragma once

#include "cuda/stream/multiply.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, bool kNormed>
struct PairedMultiplier {
  using G = Geometry<Weights, kTokenTiles>;
  static constexpr bool kGrouped = Weights::kGroupScales;
  static constexpr int kStrips = kTokenTiles == 1 ? 4 : 2;                  // of a warp
  static constexpr int kSharers = kConsumerWarps * kStrips / G::kRowWarps;  // warps of a set of strips
  static constexpr int kParts = G::kKBlocks / 2;                            // of a chunk's k
  static constexpr int kTeams = kSharers / kParts;
  static_assert(G::kRowWarps == 4 && kParts * kTeams == kSharers && (!kGrouped || kParts % 2 == 0));
  // Operands are far below the weights (words.h); 2^64 of what they lack goes onto x or gamma, the rest onto the tile's
  // sums. INT4's rows g + 8 come out 16 times as large as its rows g.
  static constexpr std::uint32_t kLift = 0x5F805F80U;  // a pair of 2^64
  static constexpr float kRestLow = Weights::kKeepsX ? 1.0F : kGrouped ? 0x1p69F : 0x1p56F;
  static constexpr float kRestHigh = Weights::kKeepsX ? 1.0F : kGrouped ? 0x1p65F : 0x1p56F;

  using Sums = float (&)[kStrips][kTokenTiles][4];

  struct Operands {
    const std::byte* weights;  // of the first strip
    const std::byte* x;
    const std::byte* gamma;
    const std::byte* scales;  // of the group, in front of its values
    __device__ __forceinline__ Operands at(int stage, int x_bytes) const {
      return {weights + stage * G::kStageBytes, x + stage * x_bytes, gamma + stage * G::kChunkK * 2,
              scales + stage * G::kStageBytes};
    }
  };

  int lane;
  int warp;
  int tokens;

  __device__ __forceinline__ int set() const { return warp / kSharers; }
  __device__ __forceinline__ int team() const { return warp % kSharers / kParts; }
  __device__ __forceinline__ int k_block() const { return warp % kParts * 2; }  // of a chunk

  // Where the warp's part of stage 0 begins.
  __device__ __forceinline__ Operands operands(const std::byte* shared, const SharedLayout& at) const {
    // Lanes of tokens that are not there read the last one's x: one access for all.
    const int g = kTokenTiles == 1 ? min(lane / 4, tokens - 1) : lane / 4;
    const int q = lane % 4;
    return {shared + Weights::offset(k_block()) + set() * (kStrips * 512) + low_bit_unit(lane) * 16,
            shared + at.x + (k_block() * tokens + g) * 64 + q * 16, shared + at.gamma + k_block() * 64 + q * 16,
            shared + Weights::offset(k_block() / kGroupBlocks * kGroupBlocks)};
  }

  // Sums of squares as in Multiplier, on the diagonals of two products of 8 values of k: tokens are rows g of the first
  // and rows g + 8 of the second.
  struct Squares {
    float low[4] = {};
    float high[4] = {};
    __device__ __forceinline__ void add(const uint4& x) {
      mma_bf16(low, x.x, x.y, x.x);
      mma_bf16(high, x.x, x.y, x.y);
      mma_bf16(low, x.z, x.w, x.z);
      mma_bf16(high, x.z, x.w, x.w);
    }
    // Of token g, in the lanes where g / 2 = q.
    [[nodiscard]] __device__ __forceinline__ float of(int g) const {
      return g % 2 == 0 ? low[0] + high[2] : low[1] + high[3];
    }
  };

  // Of two tiles of tokens each set has one.
  __device__ __forceinline__ void add_squares(const uint4 (&x)[kTokenTiles], Squares& squares) const {
    if constexpr (kTokenTiles == 1) {
      squares.add(x[0]);
    } else {
      const bool second = set() != 0;
      squares.add(make_uint4(second ? x[1].x : x[0].x, second ? x[1].y : x[0].y, second ? x[1].z : x[0].z,
                             second ? x[1].w : x[0].w));
    }
  }

  // The warp's two K blocks; its group has `group` blocks. `eights` is an operand of -8 throughout.
  __device__ __forceinline__ void add(const Operands& now, int group, const std::uint32_t (&eights)[4], Sums sums,
                                      Squares& squares) const {
    uint4 x[2][kTokenTiles];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        x[h][t] = *reinterpret_cast<const uint4*>(now.x + h * tokens * 64 + t * 512);
      uint4 by = make_uint4(kLift, kLift, kLift, kLift);
      if constexpr (kNormed) {
        add_squares(x[h], squares);
        const uint4 gamma = *reinterpret_cast<const uint4*>(now.gamma + h * 64);
        scale_pairs(by, gamma);
      }
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) scale_pairs(x[h][t], by);
    }
    float offset[kTokenTiles][4] = {};
    if constexpr (kGrouped) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          mma_bf16(offset[t], eights, x[h][t].x, x[h][t].y);
          mma_bf16(offset[t], eights, x[h][t].z, x[h][t].w);
        }
      }
    }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      std::uint32_t a[2][2][4];
      Weights::load_two(now.weights + strip * 512, a);
      float2 scale;
      if constexpr (kGrouped) scale = Weights::scales(now.scales, group, set() * kStrips + strip, lane);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        float (&sum)[4] = sums[strip][t];
        if constexpr (kGrouped) {
          float own[4];
          mma_bf16(own, a[0][0], x[0][t].x, x[0][t].y, offset[t]);
          mma_bf16(own, a[0][1], x[0][t].z, x[0][t].w);
          mma_bf16(own, a[1][0], x[1][t].x, x[1][t].y);
          mma_bf16(own, a[1][1], x[1][t].z, x[1][t].w);
          sum[0] = fmaf(scale.x, own[0], sum[0]), sum[1] = fmaf(scale.x, own[1], sum[1]);
          sum[2] = fmaf(scale.y, own[2] - own[0], sum[2]), sum[3] = fmaf(scale.y, own[3] - own[1], sum[3]);
        } else {
          mma_bf16(sum, a[0][0], x[0][t].x, x[0][t].y);
          mma_bf16(sum, a[0][1], x[0][t].z, x[0][t].w);
          mma_bf16(sum, a[1][0], x[1][t].x, x[1][t].y);
          mma_bf16(sum, a[1][1], x[1][t].z, x[1][t].w);
        }
      }
    }
  }

  // Chunks [unit, end) of one segment, of which the first is its `chunk`th.
  __device__ __forceinline__ void add_chunks(const GemmShape& shape, const Ring& ring, const Operands& all, int unit,
                                             int end, int chunk, RingPosition& at, Sums sums, Squares& squares) const {
    // Blocks of the segment's last chunk from this warp's group on: K is a multiple of 64, so of those it has two, or none.
    const int first_of_group = k_block() / kGroupBlocks * kGroupBlocks;
    const int last = shape.k / kKBlock - (shape.chunks_per_segment - 1) * G::kKBlocks - first_of_group;
    // Of zeros that the compiler does not know: else it would put the operand together again before every use.
    const std::uint32_t zero = static_cast<std::uint32_t>(tokens) >> 31;
    const std::uint32_t nought = static_cast<std::uint32_t>(tokens) >> 30;
    const std::uint32_t eights[4] = {kInt4BareOffset | zero, kInt4JointOffset | zero, kInt4BareOffset | nought,
                                     kInt4JointOffset | nought};
    RingPosition mine = at;
    at.advance(ring, end - unit);
    if constexpr (kTeams > 1) {
      const int skipped = (team() - unit) & (kTeams - 1);
      unit += skipped, chunk += skipped, mine.advance(ring, skipped);
    }
    for (; unit < end; unit += kTeams, chunk += kTeams, mine.advance(ring, kTeams)) {
      mbar_wait(ring.full + 8 * mine.stage, mine.phase);
      mbar_wait(ring.landed + 8 * mine.stage, mine.phase);
      const int group = chunk + 1 < shape.chunks_per_segment ? kGroupBlocks : min(kGroupBlocks, last);
      if (k_block() - first_of_group < group) add(all.at(mine.stage, ring.x_bytes), group, eights, sums, squares);
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * mine.stage);
    }
  }

  // The warp's part for TileSums::own_squares.
  __device__ __forceinline__ void store_squares(const Squares& squares, float* all_squares) const {
    const int g = lane / 4;
    if (kNormed && g / 2 == lane % 4) {
      const int at = kTokenTiles == 1 ? warp * 8 : warp % 4 * 16 + set() * 8;
      all_squares[at + g] = squares.of(g);
    }
  }

  // Sums over the warps of a set, in a fixed order: `acc` of strip warp / 2 in the even warps. `exchange` holds 512 bytes
  // per warp and tile of 8 tokens; `store_squares` is called where nobody reads those of the piece before any more.
  template <class StoreSquares>
  __device__ __forceinline__ void merge(Sums sums, float4* exchange, float (&acc)[kTokenTiles][4],
                                        StoreSquares&& store_squares) const {
    const auto slot = [&](int of) { return exchange + of * (kTokenTiles * 32) + lane; };
    const auto put = [&](float4* to, const float (&part)[kTokenTiles][4]) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) to[t * 32] = make_float4(part[t][0], part[t][1], part[t][2], part[t][3]);
    };
    const auto add = [&](float (&to)[kTokenTiles][4], const float4* from) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const float4 part = from[t * 32];
        to[t][0] += part.x, to[t][1] += part.y, to[t][2] += part.z, to[t][3] += part.w;
      }
    };
    const auto swap = [&](float (&a)[kTokenTiles][4], float (&b)[kTokenTiles][4], bool when) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float left = a[t][r];
          a[t][r] = when ? b[t][r] : left;
          b[t][r] = when ? left : b[t][r];
        }
      }
    };
    consumer_barrier();  // whoever read `exchange` and the squares before is done
    store_squares();
    // Two warps exchange half of what they have. A slot is written again by the one warp that has read it.
    if constexpr (kStrips == 4) {
      swap(sums[0], sums[2], warp >= 4), swap(sums[1], sums[3], warp >= 4);
      put(slot(warp), sums[2]);
      consumer_barrier();
      add(sums[0], slot(warp ^ 4));
      put(slot(warp ^ 4), sums[3]);
      consumer_barrier();
      add(sums[1], slot(warp));
    }
    swap(sums[0], sums[1], (warp & 2) != 0);
    put(slot(warp), sums[1]);
    consumer_barrier();
    add(sums[0], slot(warp ^ 2));
    if ((warp & 1) != 0) put(slot(warp ^ 2), sums[0]);
    consumer_barrier();
    if ((warp & 1) == 0) add(sums[0], slot(warp ^ 3));
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[t][r] = sums[0][t][r];
    }
  }
};

}  // namespace eaglex::stream
