// Low-bit weights and a single token: a block fetches all the x that it will need once and makes it ready for the tensor
// cores, instead of beside every chunk of every tile.
//
// Caller: run_block and Consumer (gemm.cuh).    Bytes: x and gamma of the block's chunks once, from L2; with norms all x.
// Mapping: a warp prepares one chunk at a time: x times gamma as whole numbers of two digits of 8 bits, which are columns of
// integer products (words.h), so that INT4's bytes are operands nearly as they are stored. The sums of squares are of
// all of x, for which a block needs nobody else.
#pragma once

#include <type_traits>

#include "cuda/stream/paired.cuh"

namespace eaglex::stream {

// What the products of 64 k with one digit begin with: -8 times the digits' sum, in rows g + 8 with rows g among them
// (words.h). Whole numbers below 2^22 behind kMagic's bits are floats as they stand.
inline constexpr float kMagic = 0x1.8p23F;
inline constexpr int kMagicBits = 0x4B400000;
struct KeptScale {
  int eights;
  int joint_eights;
  std::uint32_t factor;  // a pair of what one of the digit is worth
  std::uint32_t unused;
};
static_assert(2 * sizeof(KeptScale) == kKeptScaleBytes);

// A block's `unit` finds its x in place (unit - first) % chunks per tile.
template <class Weights, bool kNormed>
class KeptInputs {
  using G = Geometry<Weights, 1>;
  static_assert(G::kChunkK == 32 * 8, "a lane has 16 bytes of a chunk");
  static_assert(Weights::kGroupScales, "INT4's offset is among what is kept");
  static constexpr int kAtOnce = 4;  // chunks of a warp, whose round trips to L2 are under way together
  static constexpr int kPair = 2;

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
        x[i] = k_[i] < 0 ? make_uint4(0, 0, 0, 0) : load_x(sources[segment_[i] * G::kTokens] + k_[i]);
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
      const int k = chunk * G::kChunkK + lane / 8 * kKMultiple + lane % 8 * 4;
      if (k >= shape_.k) continue;
      k_[i] = k;
      const bf16* const own = kNormed ? shape_.gamma[segment_[i]] : nullptr;
      if constexpr (kNormed) gamma_[i] = load_now((own != nullptr ? own : shape_.ones) + k);
    }
  }

  // A lane has four values each of two neighbouring K blocks, whose weights share words.
  __device__ static __forceinline__ uint4 load_x(const bf16* from) {
    const uint2 first = __ldcg(reinterpret_cast<const uint2*>(from));
    const uint2 second = __ldcg(reinterpret_cast<const uint2*>(from + kKBlock));
    return make_uint4(first.x, first.y, second.x, second.y);
  }

  // Here and not where it is used.
  __device__ static __forceinline__ uint4 load_now(const bf16* from) {
    uint4 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.z), "=r"(v.w) : "l"(from + kKBlock));
    return v;
  }

  // Two at a time: what goes over the lanes of one hides the other's latency. What lies beyond the last place is zero.
  __device__ __forceinline__ void store_pair(const SharedLayout& at, std::byte* shared, int place, uint4* x,
                                             const uint4* gamma) const {
    const int lane = threadIdx.x % 32;
    float squares[kPair] = {};
    std::uint32_t peaks[kPair] = {};
    std::uint32_t sums[kPair] = {};
    uint2 low[kPair];
    uint2 high[kPair];
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      if constexpr (kNormed)
        squares[i] = over(x[i], [](float sum, float2 v) { return fmaf(v.x, v.x, fmaf(v.y, v.y, sum)); });
      if (place + i * kConsumerWarps >= places_) continue;  // for the norm alone
      if constexpr (kNormed) scale_pairs(x[i], gamma[i]);
      peaks[i] = __reduce_max_sync(0xFFFFFFFF, peak_of(x[i]));
    }
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      if (place + i * kConsumerWarps >= places_) continue;
      const float by = __uint_as_float(kept_multiplier_bits(peaks[i]));
      const Digits first = digits_of(x[i].x, x[i].z, by);
      const Digits second = digits_of(x[i].y, x[i].w, by);
      low[i] = make_uint2(first.low, second.low);
      high[i] = make_uint2(first.high, second.high);
      sums[i] = static_cast<std::uint32_t>(sum_of(high[i])) << 16;
      sums[i] += static_cast<std::uint32_t>(sum_of(low[i]));
      std::byte* const to = shared + at.x + (place + i * kConsumerWarps) * (G::kChunkK * 2);
      store(to + lane * 8 - lane % 2 * 4, low[i]);
      store(to + G::kChunkK + (lane ^ 8) * 8 - lane % 2 * 4, high[i]);
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
      const int digit = lane % 8;
      if (digit < 2 && to < places_) {
        const auto of_low = static_cast<std::int16_t>(sums[i]);
        const int sum = digit == 0 ? of_low : static_cast<int>(sums[i] - of_low) >> 16;
        reinterpret_cast<KeptScale*>(shared + at.x_sums)[to * (G::kChunkK / kKMultiple * 2) + lane / 8 * 2 + digit] = {
            kMagicBits - 8 * sum, kMagicBits - 8 * 17 * sum, kept_factor(peaks[i], digit), 0};
      }
    }
  }

  // A lane's words are 0 and 1 or 2 and 3 of a unit; 0 and 2 shall lie together, and 1 and 3.
  __device__ static __forceinline__ void store(std::byte* to, const uint2& digits) {
    *reinterpret_cast<std::uint32_t*>(to) = digits.x;
    *reinterpret_cast<std::uint32_t*>(to + 8) = digits.y;
  }

  // The largest of a lane's eight absolute values, as bits; NaN is larger than all.
  __device__ static __forceinline__ std::uint32_t peak_of(const uint4& x) {
    constexpr std::uint32_t kSize = 0x7FFF7FFFU;
    const std::uint32_t most = __vmaxu2(__vmaxu2(x.x & kSize, x.y & kSize), __vmaxu2(x.z & kSize, x.w & kSize));
    return max(most & 0xFFFFU, most >> 16);
  }

  struct Digits {
    std::uint32_t low, high;
  };
  // Of a pair of either K block, in the order of a word of weights (words.h).
  __device__ static __forceinline__ Digits digits_of(std::uint32_t first, std::uint32_t second, float by) {
    const float2 a = __bfloat1622float2(unpack(first));
    const float2 b = __bfloat1622float2(unpack(second));
    const auto fixed = [&](float v) { return __float_as_uint(fmaf(v, by, kKeptBias)); };
    const std::uint32_t even = __byte_perm(fixed(a.x), fixed(b.x), 0x5140);
    const std::uint32_t odd = __byte_perm(fixed(a.y), fixed(b.y), 0x5140);
    return {__byte_perm(even, odd, 0x5410) ^ 0x80808080U, __byte_perm(even, odd, 0x7632) ^ 0x80808080U};
  }
  __device__ static __forceinline__ int sum_of(const uint2& digits) {
    return __dp4a(static_cast<int>(digits.x), 0x01010101, __dp4a(static_cast<int>(digits.y), 0x01010101, 0));
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
                                      const std::byte* scale_at, int group, Sums sums) const {
    const uint2 x = *reinterpret_cast<const uint2*>(x_at);
    const uint4 kept = *reinterpret_cast<const uint4*>(scale_at);  // KeptScale
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const uint4 words = *reinterpret_cast<const uint4*>(weights + strip * 512);
      std::uint32_t scale = Weights::scale_pair(scales, group, strip, lane);
      scale_pairs(scale, kept.z);
      int own[2][4];
      mma_int8(own[0], {int4_low(words.x), int4_low(words.y), int4_low(words.z), int4_low(words.w)}, x.x, x.y);
      mma_int8(own[1], {words.x, words.y, words.z, words.w}, x.x, x.y);
      // Words 0 and 2 are rows of the even column, 1 and 3 of the odd.
      const float low = __int_as_float(own[0][0] + own[0][3] + static_cast<int>(kept.x));
      const float joint = __int_as_float(own[1][0] + own[1][3] + static_cast<int>(kept.y));
      sums[strip][0] = fmaf(__uint_as_float(scale << 16), low - kMagic, sums[strip][0]);
      sums[strip][1] = fmaf(__uint_as_float(scale & 0xFFFF0000U), joint - low, sums[strip][1]);
    }
  }

  // As PairedMultiplier::add_chunks.
  __device__ __forceinline__ void add_chunks(const GemmShape& shape, const Ring& ring, const std::byte* shared,
                                             const SharedLayout& at, KeptPiece piece, RingPosition& position,
                                             Sums sums) const {
    const int first_of_group = this->k_block() / kGroupBlocks * kGroupBlocks;
    const int last = shape.k / kKBlock - (shape.chunks_per_segment - 1) * G::kKBlocks - first_of_group;
    const auto all = this->operands(shared, at);
    const int digit =
        lane / 8 % 2;  // of column lane / 4; of the lane's own sums it is the one of columns lane % 4 * 2 ...
    const std::byte* const x_at = shared + at.x + digit * G::kChunkK + (this->k_block() / 2 ^ digit) * kKMultiple +
                                  lane % 4 * 16 + lane / 4 % 2 * 8;
    const std::byte* const scale_at = shared + at.x_sums + this->k_block() / 2 * kKeptScaleBytes + lane % 2 * 16;
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
        add(all.weights + stage, all.scales + stage, x_at + piece.kept * (G::kChunkK * 2),
            scale_at + piece.kept * (kParts * kKeptScaleBytes), group, sums);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * mine.stage);
      mine.skip(ring, kTeams);
    }
  }

  // Sums over the warps, in their order: `acc` of strip warp / 2 in the even warps.
  __device__ __forceinline__ void merge(const float (&sums)[kStrips][2], float* exchange, float (&acc)[1][4]) const {
    // Digit q % 2 of all four strips becomes all of strip q.
    const int q = lane % 4;
    const auto whole = [&](int i) {
      const float even = q < 2 ? sums[0][i] : sums[2][i];
      const float odd = q < 2 ? sums[1][i] : sums[3][i];
      const float other = __shfl_xor_sync(0xFFFFFFFF, q % 2 == 0 ? odd : even, 1);
      return (q % 2 == 0 ? even : odd) + other;
    };
    const float low = whole(0);
    const float high = whole(1) * 0x1p-4F;
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
