// sums += W x for one warp's part of a chunk, where weights have few bits and tokens are at most 16: two strips of 16 rows
// at once.
//
// Caller: Consumer::accumulate (gemm.cuh).    Bytes: the chunk's weights once, its x and gamma twice.
// Mapping: 64 rows are two pairs of strips; the four warps of a pair share k. So what is read of x and gamma and done to
// them, more than the weights themselves cost in 4 bits, serves two strips. INT4's warps form two teams, to which chunks
// are dealt in turn, so that a warp has a whole group of scales.
#pragma once

#include "cuda/stream/multiply.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, bool kNormed>
struct PairedMultiplier {
  using G = Geometry<Weights, kTokenTiles>;
  static constexpr bool kGrouped = Weights::kGroupScales;
  static constexpr int kTeams = kGrouped ? 2 : 1;
  static constexpr int kParts = 4 / kTeams;             // of a chunk's k, within a team
  static constexpr int kBlocks = G::kKBlocks / kParts;  // K blocks of a warp in a whole chunk
  static_assert(G::kRowWarps == 4 && kBlocks % 2 == 0 && (!kGrouped || kBlocks == kGroupBlocks));
  // Operands are far below the weights (weights.cuh); 2^64 of what they lack goes onto x or gamma, the rest onto the
  // tile's sums. INT4's rows g + 8 come out 16 times as large as its rows g.
  static constexpr std::uint32_t kLift = 0x5F805F80U;  // a pair of 2^64
  static constexpr float kRestLow = kGrouped ? 0x1p69F : 0x1p56F;
  static constexpr float kRestHigh = kGrouped ? 0x1p65F : 0x1p56F;

  using Sums = float (&)[2][kTokenTiles][4];  // of both strips

  struct Operands {
    const std::byte* weights;  // of the pair's first strip
    const std::byte* x;
    const std::byte* gamma;
    __device__ __forceinline__ Operands at(int stage, int x_bytes) const {
      return {weights + stage * G::kStageBytes, x + stage * x_bytes, gamma + stage * G::kChunkK * 2};
    }
  };

  int lane;
  int warp;
  int tokens;

  __device__ __forceinline__ int pair() const { return warp / 4; }
  __device__ __forceinline__ int team() const { return warp % 4 / kParts; }
  __device__ __forceinline__ int part() const { return warp % kParts; }

  // Where the warp's part of stage 0 begins.
  __device__ __forceinline__ Operands operands(const std::byte* shared, const SharedLayout& at) const {
    const int k_block = part() * kBlocks;
    // Of a tile of 8 tokens, lanes of tokens that are not there read the last one's x: a shared address, one access.
    const int g = kTokenTiles == 1 ? min(lane / 4, tokens - 1) : lane / 4;
    const int q = lane % 4;
    return {shared + Weights::offset(k_block) + pair() * 1024 + lane * 16,
            shared + at.x + (k_block * tokens + g) * 64 + q * 16, shared + at.gamma + k_block * 64 + q * 16};
  }

  // Sums of squares as in Multiplier; the two warps that hold the same x take turns.
  __device__ __forceinline__ void add_squares(const uint4 (&x)[2][kTokenTiles], float (&squares)[4]) const {
    const auto add = [&squares](const uint4& b) {
      const std::uint32_t first[4] = {b.x, 0, b.y, 0};
      const std::uint32_t second[4] = {b.z, 0, b.w, 0};
      mma_bf16(squares, first, b.x, b.y);
      mma_bf16(squares, second, b.z, b.w);
    };
    if constexpr (kTokenTiles == 1) {
      add(select(x[0][0], x[1][0]));
    } else {
      add(select(x[0][0], x[0][1]));
      add(select(x[1][0], x[1][1]));
    }
  }
  __device__ __forceinline__ uint4 select(const uint4& a, const uint4& b) const {
    const bool second = pair() != 0;
    return make_uint4(second ? b.x : a.x, second ? b.y : a.y, second ? b.z : a.z, second ? b.w : a.w);
  }

  // kCount K blocks from the warp's first on.
  template <int kCount>
  __device__ __forceinline__ void add(const Operands& now, Sums sums, float (&squares)[4]) const {
    float own[2][kTokenTiles][4] = {};  // of the group
    float offset[kTokenTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      uint4 x[2][kTokenTiles];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
          x[h][t] = *reinterpret_cast<const uint4*>(now.x + ((i + h) * tokens + t * 8) * 64);
      }
      if constexpr (kNormed) add_squares(x, squares);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint4 by = make_uint4(kLift, kLift, kLift, kLift);
        if constexpr (kNormed) scale_pairs(by, *reinterpret_cast<const uint4*>(now.gamma + (i + h) * 64));
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) scale_pairs(x[h][t], by);
      }
      if constexpr (kGrouped) {
        const std::uint32_t a[4] = {kInt4BareOffset, kInt4BareOffsetHigh, kInt4BareOffset, kInt4BareOffsetHigh};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            mma_bf16(offset[t], a, x[h][t].x, x[h][t].y);
            mma_bf16(offset[t], a, x[h][t].z, x[h][t].w);
          }
        }
      }
#pragma unroll
      for (int strip = 0; strip < 2; ++strip) {
        std::uint32_t a[2][2][4];
        Weights::load_two(now.weights + strip * 512, i, a);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            float (&to)[4] = kGrouped ? own[strip][t] : sums[strip][t];
            mma_bf16(to, a[h][0], x[h][t].x, x[h][t].y);
            mma_bf16(to, a[h][1], x[h][t].z, x[h][t].w);
          }
        }
      }
    }
    if constexpr (kGrouped) {
#pragma unroll
      for (int strip = 0; strip < 2; ++strip) {
        const float2 scale = Weights::scales(now.weights - lane * 16 - pair() * 1024, kCount, pair() * 2 + strip, lane);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            sums[strip][t][r] =
                fmaf(r < 2 ? scale.x : scale.y, own[strip][t][r] + offset[t][r], sums[strip][t][r]);
          }
        }
      }
    }
  }

  // Chunks [unit, end) of one segment, of which the first is its `chunk`th.
  __device__ __forceinline__ void add_chunks(const GemmShape& shape, const Ring& ring, const Operands& all, int unit,
                                             int end, int chunk, RingPosition& at, Sums sums,
                                             float (&squares)[4]) const {
    // K is a multiple of 64: of a segment's last chunk this warp has an even number of blocks, or none.
    const int last_blocks = shape.k / kKBlock - (shape.chunks_per_segment - 1) * G::kKBlocks - part() * kBlocks;
    for (; unit < end; ++unit, ++chunk, at.next(ring)) {
      if (kTeams == 2 && (unit ^ team()) & 1) continue;
      mbar_wait(ring.full + 8 * at.stage, at.phase);
      mbar_wait(ring.landed + 8 * at.stage, at.phase);
      const Operands now = all.at(at.stage, ring.x_bytes);
      const int blocks = chunk + 1 < shape.chunks_per_segment ? kBlocks : last_blocks;
      if (blocks >= kBlocks) {
        add<kBlocks>(now, sums, squares);
      } else if (kBlocks > 2 && blocks > 0) {
        add<2>(now, sums, squares);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * at.stage);
    }
  }

  // Sums over the four warps of a pair, in a fixed order: `acc` of strip warp / 2 in the even warps. `exchange` holds 512
  // bytes per warp and tile of 8 tokens, `all_squares` the partial sums of TileSums::own_squares.
  __device__ __forceinline__ void merge(Sums sums, const float (&squares)[4], float4* exchange, float* all_squares,
                                        float (&acc)[kTokenTiles][4]) const {
    const bool second = (warp & 2) != 0;  // the strip of its pair that this warp keeps
    float4* const own = exchange + warp * (kTokenTiles * 32) + lane;
    float4* const others = exchange + (warp ^ 2) * (kTokenTiles * 32) + lane;
    consumer_barrier();  // whoever read `exchange` and `all_squares` before is done
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      own[t * 32] = second ? make_float4(sums[0][t][0], sums[0][t][1], sums[0][t][2], sums[0][t][3])
                           : make_float4(sums[1][t][0], sums[1][t][1], sums[1][t][2], sums[1][t][3]);
    }
    const int g = lane / 4;
    if (kNormed && g / 2 == lane % 4) {
      const int at = kTokenTiles == 1 ? warp * 8 : warp % 4 * 16 + pair() * 8;
      all_squares[at + g] = g % 2 == 0 ? squares[0] : squares[1];
    }
    consumer_barrier();
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float4 other = others[t * 32];
      const float part[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[t][r] = (second ? sums[1][t][r] : sums[0][t][r]) + part[r];
      if ((warp & 1) != 0) others[t * 32] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
    }
    consumer_barrier();
    if ((warp & 1) != 0) return;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float4 other = exchange[(warp ^ 3) * (kTokenTiles * 32) + t * 32 + lane];
      acc[t][0] += other.x, acc[t][1] += other.y, acc[t][2] += other.z, acc[t][3] += other.w;
    }
  }
};

}  // namespace eaglex::stream
