// The same for FP8 and INT4: words become operands in registers while the tensor cores work on the panel before.
//
// Caller: Consumer::accumulate.    Bytes: the chunks' weights once, their x once per four warps.
// Mapping: that of wgmma.cuh. One ldmatrix brings a warp 512 bytes of weights, each lane a word of four units: in words.h's
// order its four numbers (FP8) or eight (INT4) are those of rows g and g + 8 that it multiplies of four octets of k.
#pragma once

#include "cuda/stream/wgmma.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, bool kNormed>
struct LowBitWideMultiplier : PanelMultiplier<Weights, kTokenTiles, kNormed> {
  using Base = PanelMultiplier<Weights, kTokenTiles, kNormed>;
  using Base::kPanels;
  using Base::kSquareTiles;
  using Base::kSteps;
  using Base::lane;
  using Base::ring;
  using Base::shared;
  using typename Base::G;
  using Operands = std::uint32_t[kSteps][4];
  static constexpr bool kGrouped = Weights::kGroupScales;
  static constexpr int kBlocks = kPanelK / kKBlock;
  static_assert(!G::kWide || kPanels <= 2);

  // FP8 operands are 2^-120 of the weights (words.h), of which 2^64 goes onto gamma or onto them. INT4's bare ones are 2^-133
  // (rows g) or 2^-129 of the number plus 8, and become number times scale in one instruction, since 8 times a scale is
  // exact: 2^69 and 2^65 go onto the scale, which must stay below 2^58. The rest goes onto the tile's sums.
  static constexpr float kRestLow = kGrouped ? 0x1p64F : 0x1p56F;
  static constexpr float kRestHigh = kRestLow;
  static constexpr std::uint32_t kLift = 0x5F805F80U;        // a pair of 2^64
  static constexpr std::uint32_t kScaleLift = 0x60006200U;   // 2^69 for row g, 2^65 for row g + 8
  static constexpr std::uint32_t kScaleEight = 0xA100A100U;  // a pair of -2^-61: -8 · 2^-133 · 2^69

  std::uint32_t weights;  // shared addresses of the lane's rows of matrices, in stage 0
  std::uint32_t gamma;
  int block;  // of the strip's 64 rows, in a stage
  int strip;

  __device__ LowBitWideMultiplier(const Ring& of, const std::byte* from, const SharedLayout& at, const WarpRole& role)
      : Base(of, from, at, role),
        block(role.strip / 4 * (G::kStageBytes / G::kRowBlocks)),
        strip(role.strip % 4) {
    weights = ring.weights + block + strip * 512 + low_bit_unit(lane % 8 * 4 + lane / 8) * 16;
    gamma = ring.gamma + lane / 8 * 16;
  }

  // The operands of a panel, once its weights have landed; of the segment's last chunk there may be one panel alone.
  __device__ __forceinline__ void load(int stage, int panel, bool alone, Operands& a) const {
    const std::uint32_t from = weights + stage * G::kStageBytes + Weights::offset(panel * kBlocks);
    std::uint32_t by[kBlocks][4];
    if constexpr (kNormed) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        load_matrices(by[i], gamma + stage * G::kChunkK * 2 + (panel * kBlocks + i) * (kKBlock * 2));
    }
    if constexpr (kGrouped) {
      std::uint32_t words[4];
      load_matrices(words, from);
      const std::uint32_t pair = Weights::scale_pair(shared + block + stage * G::kStageBytes,
                                                     alone ? kBlocks : kGroupBlocks, strip, lane);
      const std::uint32_t scales = pack(__hmul2(unpack(pair), unpack(kScaleLift)));
      const std::uint32_t eights = pack(__hmul2(unpack(pair), unpack(kScaleEight)));
      const std::uint32_t scale[2] = {__byte_perm(scales, 0, 0x1010), __byte_perm(scales, 0, 0x3232)};
      const std::uint32_t eight[2] = {__byte_perm(eights, 0, 0x1010), __byte_perm(eights, 0, 0x3232)};
#pragma unroll
      for (int octet = 0; octet < 4; ++octet) {
#pragma unroll
        for (int pair_of = 0; pair_of < 4; ++pair_of) {
          const int row = pair_of % 2;
          std::uint32_t& to = a[pair_of / 2 * 2 + octet / 2][octet % 2 * 2 + row];
          to = pack(__hfma2(unpack(int4_bare(words[octet], pair_of)), unpack(scale[row]), unpack(eight[row])));
          if constexpr (kNormed) scale_pairs(to, by[pair_of / 2][octet]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        std::uint32_t words[4];
        load_matrices(words, from + Weights::offset(i));
#pragma unroll
        for (int octet = 0; octet < 4; ++octet) {
          std::uint32_t lift = kLift;
          if constexpr (kNormed) scale_pairs(lift, by[i][octet]);
          std::uint32_t* const to = a[i * 2 + octet / 2] + octet % 2 * 2;
          Weights::spread(words[octet], to[0], to[1]);
          scale_pairs(to[0], lift), scale_pairs(to[1], lift);
        }
      }
    }
  }

  // Products of one panel, and the next one's operands meanwhile. Returns whether it was the last.
  template <int kPanel>
  __device__ __forceinline__ bool turn(int& left, RingPosition& at, Operands& a, Operands& ahead,
                                       float (&acc)[kTokenTiles][4], float (&squares)[kSquareTiles][4]) const {
    constexpr bool kLast = kPanel + 1 == kPanels;
    if constexpr (kPanel == 0) {
      mbar_wait(ring.full + 8 * at.stage, at.phase);
      fence_async_shared();  // x came by copies of threads, wgmma reads as bulk copies do
    }
    this->start(at.stage, kPanel, a, acc);
    if constexpr (kNormed) this->add_squares(at.stage, kPanel, squares);
    --left;
    RingPosition next = at;
    if (kLast || left == 0) next.next(ring);
    if (left > 0) {
      if constexpr (kLast) {
        mbar_wait(ring.landed + 8 * next.stage, next.phase);
        __syncwarp();
      }
      load(next.stage, kLast ? 0 : kPanel + 1, kLast && left == 1 && cut, ahead);
    }
    wgmma_wait();
#pragma unroll
    for (int n = 0; n < kSteps * 4; ++n) hold(a[n / 4][n % 4]);
    if (kLast || left == 0) {
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * at.stage);
    }
    at = next;
    return left == 0;
  }

  bool cut = false;  // the last chunk has one panel alone

  // Sums of `chunks` chunks from `at` on. Two sets of operands take turns.
  __device__ __forceinline__ void add_chunks(int chunks, RingPosition& at, float (&acc)[kTokenTiles][4],
                                             float (&squares)[kSquareTiles][4]) const {
    int left = chunks * kPanels - (cut ? 1 : 0);
    Operands even;
    Operands odd;
    mbar_wait(ring.landed + 8 * at.stage, at.phase);
    __syncwarp();
    load(at.stage, 0, left == 1 && cut, even);
#pragma unroll 1
    while (!turn<0>(left, at, even, odd, acc, squares) && !turn<kPanels - 1>(left, at, odd, even, acc, squares)) {
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles * 4; ++n) hold(acc[n / 4][n % 4]);
  }
};

}  // namespace eaglex::stream
