// sums += W x for one warp's part of a chunk: 16 rows, up to 64 tokens, operands from shared memory.
//
// Caller: Consumer::accumulate, once per chunk.    Bytes: the chunk's weights once, its x once per warp.
// Mapping: per K block of 32 two m16n8k16 for each 8 tokens; gamma is multiplied in in registers.
#pragma once

#include "cuda/stream/reduce.cuh"

namespace eaglex::stream {

__device__ __forceinline__ void scale_pairs(std::uint32_t& x, std::uint32_t by) {
  x = pack(__hmul2(unpack(x), unpack(by)));
}
__device__ __forceinline__ void scale_pairs(uint4& x, const uint4& by) {
  scale_pairs(x.x, by.x), scale_pairs(x.y, by.y), scale_pairs(x.z, by.z), scale_pairs(x.w, by.w);
}

template <class Weights, int kTokenTiles, bool kNormed>
struct Multiplier {
  using G = Geometry<Weights, kTokenTiles>;
  // INT4's scales go onto the sums of their group, or with more tokens than 16 onto the weights, which is less work.
  static constexpr bool kGrouped = Weights::kGroupScales && kTokenTiles <= 2;
  static constexpr bool kScaleGroups = Weights::kGroupScales && !kGrouped;
  // With few tokens two chains of mma hide each other's latency; groups have two of their own.
  static constexpr int kSums = kTokenTiles <= 2 && !kGrouped ? 2 : 1;
  // K blocks whose operands are in registers at once.
  static constexpr int kBatch = kGrouped ? kGroupBlocks : Weights::kSpan;
  // Gamma goes onto x, or with more tokens than 16 onto operands of few bits, which is less work (bf16 is 3 % slower so
  // with 64 tokens). What FP8 operands lack, 2^120, goes with it in part, 2^64, the rest onto the tile's sums. So a product
  // lies 2^56 below its true size, far from both ends of float. (FP8 with fewer tokens is paired.cuh's.)
  static constexpr bool kScaleWeights = Weights::kBits < 16 && kTokenTiles > 2 && (kNormed || Weights::kLift);
  static constexpr bool kScaleX = kNormed && !kScaleWeights;
  static_assert(!Weights::kLift || kScaleWeights);
  static constexpr std::uint32_t kLift = 0x5F805F80U;                 // a pair of 2^64
  static constexpr float kRestLow = Weights::kLift ? 0x1p56F : 1.0F;  // of rows g and g + 8
  static constexpr float kRestHigh = kRestLow;
  static constexpr int kTeams = 1;  // all warps read every chunk

  // Where the warp's part of a stage begins.
  struct Operands {
    const std::byte* weights;
    const std::byte* x;
    const std::byte* gamma;
    __device__ __forceinline__ Operands at(int stage, int x_bytes) const {
      return {weights + stage * G::kStageBytes, x + stage * x_bytes, gamma + stage * G::kChunkK * 2};
    }
  };

  WarpRole role;
  int tokens;

  // Over kBlocks K blocks from `kb` on. `group` is how many their group has, where groups have scales.
  template <int kBlocks>
  __device__ __forceinline__ void add(const Operands& now, int kb, int group,
                                      float (&sums)[kSums][kTokenTiles][4]) const {
    std::uint32_t a[kBlocks / Weights::kSpan][Weights::kSpan][2][4];
    uint4 scale[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; i += Weights::kSpan)
      Weights::load(now.weights + Weights::offset(kb + i), role.strip % 4, role.lane, a[i / Weights::kSpan]);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      scale[i] = make_uint4(kLift, kLift, kLift, kLift);
      if constexpr (kNormed) {
        const uint4 gamma = *reinterpret_cast<const uint4*>(now.gamma + (kb + i) * 64);
        if (!Weights::kLift) scale[i] = gamma;
        if (Weights::kLift) scale_pairs(scale[i], gamma);
      }
      if constexpr (kScaleWeights) {
        const std::uint32_t by[4] = {scale[i].x, scale[i].y, scale[i].z, scale[i].w};
#pragma unroll
        for (int r = 0; r < 8; ++r) scale_pairs(a[i / Weights::kSpan][i % Weights::kSpan][r / 4][r % 4], by[r / 2]);
      }
    }
    float2 of_group;
    if constexpr (Weights::kGroupScales) {
      const std::byte* const begin = now.weights + Weights::offset(kb / kGroupBlocks * kGroupBlocks);
      of_group = Weights::scales(begin, group, role.strip % 4, role.lane);
    }
    if constexpr (kScaleGroups) {
      const std::uint32_t by[2] = {pack(of_group.x, of_group.x), pack(of_group.y, of_group.y)};  // rows g, rows g + 8
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 8; ++r) scale_pairs(a[i / Weights::kSpan][i % Weights::kSpan][r / 4][r % 4], by[r % 2]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      float own[2][4] = {};
      float (&first)[4] = kGrouped ? own[0] : sums[0][t];
      float (&second)[4] = kGrouped ? own[1] : sums[kSums - 1][t];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const auto& operands = a[i / Weights::kSpan][i % Weights::kSpan];
        uint4 b = *reinterpret_cast<const uint4*>(now.x + ((kb + i) * tokens + t * 8) * 64);
        if (kScaleX) scale_pairs(b, scale[i]);
        mma_bf16(first, operands[0], b.x, b.y);
        mma_bf16(second, operands[1], b.z, b.w);
      }
      if constexpr (kGrouped) {
        float (&to)[4] = sums[0][t];
        to[0] = fmaf(of_group.x, own[0][0] + own[1][0], to[0]), to[1] = fmaf(of_group.x, own[0][1] + own[1][1], to[1]);
        to[2] = fmaf(of_group.y, own[0][2] + own[1][2], to[2]), to[3] = fmaf(of_group.y, own[0][3] + own[1][3], to[3]);
      }
    }
  }

  // Sums of squares: the diagonal of x xᵀ, whose lanes hold tokens as rows of A (g) and as columns of B (2q, 2q + 1). The
  // strips that share a tile of 8 tokens take turns in k.
  static constexpr int kSharers = G::kRowWarps / kTokenTiles;

  __device__ __forceinline__ void add_squares(const Operands& now, int kb, float (&squares)[4]) const {
    const std::byte* const x = now.x + (kb * tokens + role.strip % kTokenTiles * 8) * 64;
    const uint4 b = *reinterpret_cast<const uint4*>(x);
    const std::uint32_t first[4] = {b.x, 0, b.y, 0};
    const std::uint32_t second[4] = {b.z, 0, b.w, 0};
    mma_bf16(squares, first, b.x, b.y);
    mma_bf16(squares, second, b.z, b.w);
  }

  __device__ __forceinline__ void add_all_squares(const Operands& now, int blocks, float (&squares)[4]) const {
    const int own = role.strip / kTokenTiles;
    if (blocks == G::kWarpKBlocks && G::kWarpKBlocks % kSharers == 0) {
#pragma unroll
      for (int kb = 0; kb < G::kWarpKBlocks; kb += kSharers) add_squares(now, kb + own, squares);
    } else {
#pragma unroll 1
      for (int kb = own; kb < blocks; kb += kSharers) add_squares(now, kb, squares);
    }
  }
};

}  // namespace eaglex::stream
