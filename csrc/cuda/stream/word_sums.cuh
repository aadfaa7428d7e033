// Sums of shared tiles of a single token whose x is kept: they go from block to block as words that are their own flags.
//
// Caller: Consumer::run_kept (gemm.cuh).    Bytes: 256 per shared tile and block, through L2.
// Mapping: a word is the sums of rows g and g + 8 of a strip; all its bits are ones until it is there, and again when the
// tile's owner has read it, so nobody fences, counts, or waits at a barrier. The lanes of a row take four blocks' words at
// a time. The owners' rule of reduce.cuh holds; where no block may wait, TileSums::complete sums up instead. After a wait
// in vain words may be left, which a later launch would take for its own: `broken` makes all of it void until the
// host has heard.
#pragma once

#include "cuda/stream/scatter.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, class Step>
class WordSums : public SlicedSums<Weights, kTokenTiles, Step> {
  using Base = SlicedSums<Weights, kTokenTiles, Step>;

 protected:
  using Base::role_;
  using Base::shape_;

  __device__ WordSums(const GemmShape& shape, const typename Step::Params& params, const Ring& ring, std::byte* shared,
                      const SharedLayout& at)
      : Base(shape, params, ring, shared, at) {}

  // What lane (g, q) gets of block q of the `others` behind this one: before the block's own sums are computed it has
  // often been published.
  __device__ __forceinline__ std::uint64_t early_word(int others) const {
    const int q = role_.lane % 4;
    if (role_.half != 0 || q >= others) return kNoWord;
    return load_word(word_of(static_cast<int>(blockIdx.x) + 1 + q));
  }

  __device__ __forceinline__ void publish_words(const float (&acc)[1][4]) const {
    if (role_.half != 0 || role_.lane % 4 != 0) return;
    const float low = isnan(acc[0][0]) ? __int_as_float(0x7FFFFFFF) : acc[0][0];  // never kNoWord
    set_word(word_of(static_cast<int>(blockIdx.x)),
             static_cast<std::uint64_t>(__float_as_uint(acc[0][2])) << 32 | __float_as_uint(low));
  }

  // acc += what the `others` next blocks have of the tile, in their order; `word` is the early one.
  __device__ __forceinline__ void add_words(int others, std::uint64_t word, std::int32_t broken, float (&acc)[1][4]) {
    const int q = role_.lane % 4;
    bool valid = __all_sync(0xFFFFFFFF, broken == 0);  // the same for all, whenever it was raised
#pragma unroll 1
    for (int base = 0; base < others; base += 4) {
      const bool mine = base + q < others;
      std::uint64_t* const from = word_of(static_cast<int>(blockIdx.x) + 1 + base + (mine ? q : 0));
      if (base > 0) word = mine ? load_word(from) : kNoWord;
      const std::uint64_t start = now_ns();
      std::uint32_t polls = 0;
      while (valid && __any_sync(0xFFFFFFFF, mine && word == kNoWord)) {
        if (mine && word == kNoWord) word = load_word(from);
        if ((++polls & 255U) == 0) valid = !gives_up(start);
      }
      if (mine) set_word(from, kNoWord);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint64_t each = __shfl_sync(0xFFFFFFFF, word, role_.lane / 4 * 4 + i);
        if (base + i < others) {
          acc[0][0] += __uint_as_float(static_cast<std::uint32_t>(each));
          acc[0][2] += __uint_as_float(static_cast<std::uint32_t>(each >> 32));
        }
      }
    }
    if (!valid) acc[0][0] = acc[0][2] = __int_as_float(0x7FFFFFFF);
    acc[0][1] = acc[0][0], acc[0][3] = acc[0][2];
  }

 private:
  static constexpr std::uint64_t kNoWord = ~0ULL;

  // Of the lane's rows in the sums by `block`, which publishes those of its first tile alone.
  __device__ __forceinline__ std::uint64_t* word_of(int block) const {
    return shape_.words + block * kTileWords + role_.strip * 8 + role_.lane / 4;
  }
  __device__ static __forceinline__ std::uint64_t load_word(const std::uint64_t* from) {
    std::uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
  }
  __device__ static __forceinline__ void set_word(std::uint64_t* to, std::uint64_t word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
  }

  // By a whole warp, for the same answer in all lanes. As TileSums::wait_until; words may be left behind.
  __device__ bool gives_up(std::uint64_t start) const {
    volatile std::uint32_t* const failed = shape_.failed;
    const bool late = *failed != 0 || now_ns() - start > kDeadlineNs;
    if (!__any_sync(0xFFFFFFFF, late)) return false;
    *failed = 1;
    *shape_.broken = 1;
    __threadfence_system();
    return true;
  }
};

}  // namespace eaglex::stream
