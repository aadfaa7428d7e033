// The same for FP8 and INT4: words become operands in registers while the tensor cores work on the panel before.
//
// Caller: Consumer::accumulate.    Bytes: the chunks' weights once, their x once per four warps.
// Mapping: that of wgmma.cuh. One ldmatrix brings a warp 512 bytes of weights, each lane a word of four units: in
// words.h's order its numbers, four (FP8) or eight (INT4), are those of rows g and g + 8 that it multiplies.
#pragma once

#include "cuda/stream/wgmma.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, bool kNormed>
struct LowBitWideMultiplier : PanelMultiplier<Weights, kTokenTiles, kNormed> {
  using Base = PanelMultiplier<Weights, kTokenTiles, kNormed>;
  using Base::kPanels;
  using Base::kSteps;
  using Base::lane;
  using Base::ring;
  using Base::shared;
  using typename Base::G;
  using Operands = std::uint32_t[kSteps][4];
  static constexpr bool kGrouped = Weights::kGroupScales;
  static constexpr int kBlocks = kPanelK / kKBlock;
  static constexpr int kSquareSums = 2;
  static_assert(!G::kWide || kPanels <= 2);

  // FP8 operands are 2^-120 of the weights (words.h), of which 2^64 goes onto gamma or onto them. INT4's bare ones are
  // 2^-133 (rows g) or 2^-129 of the number plus 8, and become number times scale in one instruction, since 8 times a
  // scale is exact: 2^69 and 2^65 go onto the scale, which must stay below 2^58. The rest goes onto the tile's sums.
  static constexpr float kRestLow = kGrouped ? 0x1p64F : 0x1p56F;
  static constexpr float kRestHigh = kRestLow;
  static constexpr std::uint32_t kLift = 0x5F805F80U;        // a pair of 2^64
  static constexpr std::uint32_t kScaleLift = 0x60006200U;   // 2^69 for row g, 2^65 for row g + 8
  static constexpr std::uint32_t kScaleEight = 0xA100A100U;  // a pair of -2^-61: -8 · 2^-133 · 2^69

  std::uint32_t weights;  // shared addresses of the lane's rows of matrices, in stage 0
  std::uint32_t gamma;
  int block;  // of the strip's 64 rows, in a stage
  int strip;
  bool cut = false;  // the segment ends with a chunk that has one panel alone

  __device__ LowBitWideMultiplier(const Ring& of, const std::byte* from, const SharedLayout& at, const WarpRole& role)
      : Base(of, from, at, role), block(role.strip / 4 * (G::kStageBytes / G::kRowBlocks)), strip(role.strip % 4) {
    weights = ring.weights + block + strip * 512 + low_bit_unit(lane % 8 * 4 + lane / 8) * 16;
    gamma = ring.gamma + lane / 8 * 16;
  }

  // A lane's words of a panel, with the scales of rows g and g + 8 in INT4.
  struct Words {
    std::uint32_t of[kGrouped ? 1 : kBlocks][4];
    std::uint32_t scales;
  };

  // Once its weights have landed; `alone`: the chunk has this panel only.
  __device__ __forceinline__ void fetch(int stage, int panel, bool alone, Words& words) const {
    const std::uint32_t from = weights + stage * G::kStageBytes + Weights::offset(panel * kBlocks);
    if constexpr (kGrouped) {
      load_matrices(words.of[0], from);
      const int blocks = alone ? kBlocks : kGroupBlocks;
      words.scales = Weights::scale_pair(shared + block + stage * G::kStageBytes, blocks, strip, lane);
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) load_matrices(words.of[i], from + Weights::offset(i));
    }
  }

  // Its operands.
  __device__ __forceinline__ void spread(const Words& words, int stage, int panel, Operands& a) const {
    const std::uint32_t gammas = gamma + stage * G::kChunkK * 2 + panel * kPanelK * 2;
    std::uint32_t scale[2];
    std::uint32_t eight[2];
    if constexpr (kGrouped) {
      const std::uint32_t scales = pack(__hmul2(unpack(words.scales), unpack(kScaleLift)));
      const std::uint32_t eights = pack(__hmul2(unpack(words.scales), unpack(kScaleEight)));
      scale[0] = __byte_perm(scales, 0, 0x1010), scale[1] = __byte_perm(scales, 0, 0x3232);
      eight[0] = __byte_perm(eights, 0, 0x1010), eight[1] = __byte_perm(eights, 0, 0x3232);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      std::uint32_t by[4] = {kLift, kLift, kLift, kLift};
      if constexpr (kNormed) {
        load_matrices(by, gammas + i * (kKBlock * 2));
        if constexpr (Weights::kLift) {
#pragma unroll
          for (int octet = 0; octet < 4; ++octet) scale_pairs(by[octet], kLift);
        }
      }
#pragma unroll
      for (int octet = 0; octet < 4; ++octet) {
        std::uint32_t* const to = a[i * 2 + octet / 2] + octet % 2 * 2;  // of rows g and g + 8
        if constexpr (kGrouped) {
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const std::uint32_t bare = int4_bare(words.of[0][octet], i * 2 + row);
            to[row] = pack(__hfma2(unpack(bare), unpack(scale[row]), unpack(eight[row])));
          }
        } else {
          Weights::spread(words.of[i][octet], to[0], to[1]);
        }
        if constexpr (kNormed || Weights::kLift) scale_pairs(to[0], by[octet]), scale_pairs(to[1], by[octet]);
      }
    }
  }

  // As PairedMultiplier::Squares: twice the products, of half the depth, but no operand to be put together of zeros.
  __device__ __forceinline__ void add_squares(int stage, int panel, float (&squares)[kSquareSums][4]) const {
#pragma unroll
    for (int kb = 0; kb < kBlocks; ++kb) {
      if (kTokenTiles == 4 && kb != this->warp / 4) continue;  // two warps share a tile
      const uint4 x = this->of_squares(stage, panel, kb, 0);
      mma_bf16(squares[0], x.x, x.y, x.x);
      mma_bf16(squares[1], x.x, x.y, x.y);
      mma_bf16(squares[0], x.z, x.w, x.z);
      mma_bf16(squares[1], x.z, x.w, x.w);
    }
  }
  __device__ __forceinline__ void store_squares(const float (&squares)[kSquareSums][4], float* to) const {
    const float own[1][4] = {{squares[0][0] + squares[1][2], squares[0][1] + squares[1][3]}};
    Base::store_squares(own, to);
  }

  // Products of one panel, and thereafter the next one's operands. Returns whether it was the last. (Operands beside the
  // products take 16 registers more and were 3 to 5 % slower at 64 tokens.)
  template <int kPanel>
  __device__ __forceinline__ bool turn(int& left, RingPosition& at, Operands& a, float (&acc)[kTokenTiles][4],
                                       float (&squares)[kSquareSums][4]) const {
    constexpr bool kLast = kPanel + 1 == kPanels;
    constexpr int kNext = kLast ? 0 : kPanel + 1;
    if constexpr (kPanel == 0) {
      mbar_wait(ring.full + 8 * at.stage, at.phase);
      fence_async_shared();  // x came by copies of threads, wgmma reads as bulk copies do
    }
    this->start(at.stage, kPanel, a, acc);
    if constexpr (kNormed) add_squares(at.stage, kPanel, squares);
    --left;
    const bool more = left > 0;
    RingPosition next = at;
    if (kLast || !more) next.next(ring);
    Words words;
    if (more) {
      if constexpr (kLast) {
        mbar_wait(ring.landed + 8 * next.stage, next.phase);
        __syncwarp();
      }
      fetch(next.stage, kNext, kLast && left == 1 && cut, words);
    }
    wgmma_wait();
#pragma unroll
    for (int n = 0; n < kSteps * 4; ++n) hold(a[n / 4][n % 4]);
    if (kLast || !more) {
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * at.stage);
    }
    if (more) spread(words, next.stage, kNext, a);
    at = next;
    return !more;
  }

  // Sums of `chunks` chunks from `at` on.
  __device__ __forceinline__ void add_chunks(int chunks, RingPosition& at, float (&acc)[kTokenTiles][4],
                                             float (&squares)[kSquareSums][4]) const {
    int left = chunks * kPanels - (cut ? 1 : 0);
    Operands a;
    Words words;
    mbar_wait(ring.landed + 8 * at.stage, at.phase);
    __syncwarp();
    fetch(at.stage, 0, left == 1 && cut, words);
    spread(words, at.stage, 0, a);
    if constexpr (kPanels == 2) {
#pragma unroll 1
      while (!turn<0>(left, at, a, acc, squares) && !turn<1>(left, at, a, acc, squares)) {
      }
    } else {
#pragma unroll 1
      while (!turn<0>(left, at, a, acc, squares)) {
      }
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles * 4; ++n) hold(acc[n / 4][n % 4]);
  }
};

}  // namespace eaglex::stream
