// Which of what the head's tiles offer of a row is scored again: the R best, by two warps, each for itself half of it.
// Formula: reference_low_bit.py offered (the order: score descending, id ascending).
// Caller: head_rescore.    Bytes: 8 per offer, from L2; all that a row has under way at once, to 1,024.
// Mapping: a lane has 16 offers; those that reach what R lanes reach are few: they are listed, and each counts those
// before it.
#pragma once

#include "cuda/stream/head_end.cuh"

namespace eaglex::stream {

struct Offers {
  const std::uint64_t* keys;  // [64, stride]
  int stride;
  int count;     // of a row
  int num;       // that are scored again, at least one per warp
  int capacity;  // of a warp's list
};

struct WarpSpace {
  std::uint32_t* maxima;
  std::uint64_t* own;
  std::uint64_t* chosen;
  std::uint64_t* list;
};

__device__ __forceinline__ std::uint32_t high(std::uint64_t key) {
  return static_cast<std::uint32_t>(key >> 32);
}

// The value that at least `num` of the lanes reach; 0 where fewer have any.
__device__ __forceinline__ std::uint32_t reached_by(std::uint32_t maximum, int num, std::uint32_t* maxima, int lane) {
  maxima[lane] = maximum;
  __syncwarp();
  int above = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 others = reinterpret_cast<const uint4*>(maxima)[i];
    above += (others.x > maximum) + (others.y > maximum) + (others.z > maximum) + (others.w > maximum);
  }
  return __reduce_min_sync(0xFFFFFFFF, above < num ? maximum : 0xFFFFFFFF);
}

inline constexpr int kPairs = 8;
inline constexpr int kOffersAtOnce = 64 * kPairs;
inline constexpr int kOfferKeys = 2 * kPairs + 1;  // of a lane: its share of the offers, and one that was chosen before
using OfferKeys = std::uint64_t[kOfferKeys];

// A lane's share of the offers from `base` on.
__device__ __forceinline__ void load_offers(const Offers& args, int row, int base, OfferKeys& keys) {
  const std::uint64_t* const offers = args.keys + static_cast<std::int64_t>(row) * args.stride;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int at = base + j * 64 + static_cast<int>(threadIdx.x % 32) * 2;
    ulonglong2 pair = make_ulonglong2(0, 0);
    if (at < args.count) pair = __ldcg(reinterpret_cast<const ulonglong2*>(offers + at));
    keys[2 * j] = pair.x;
    keys[2 * j + 1] = at + 1 < args.count ? pair.y : 0;
  }
}

// The best `num` of the warp's share of a row's offers, descending, 0 behind the last, into `space.own`; `keys` are its
// first already. Of 512 at a time those that reach what `num` lanes reach, which are few, are listed, and each counts
// those before it.
__device__ __forceinline__ void choose_own(const Offers& args, int row, int warp, OfferKeys& keys,
                                           const WarpSpace& space) {
  const int lane = threadIdx.x % 32;
  std::uint64_t before = 0;  // of lane < num: chosen so far
  int base = warp * kOffersAtOnce;
#pragma unroll 1
  while (true) {
    keys[2 * kPairs] = before;
    std::uint32_t maximum = 0;
#pragma unroll
    for (const std::uint64_t key : keys) maximum = max(maximum, high(key));
    const std::uint32_t least = reached_by(maximum, args.num, space.maxima, lane);
    int total = 0;
#pragma unroll
    for (const std::uint64_t key : keys) {
      const bool in = high(key) >= least && key != 0;
      const std::uint32_t who = __ballot_sync(0xFFFFFFFF, in);
      const int at = total + __popc(who & ((1U << lane) - 1));
      if (in && at < args.capacity) space.list[at] = key;
      total += __popc(who);
    }
    __syncwarp();
    if (total <= args.capacity) {
      for (int i = lane; i < total; i += 32) {
        const std::uint64_t mine = space.list[i];
        int place = 0;
#pragma unroll 4
        for (int other = 0; other < total; ++other) place += space.list[other] > mine ? 1 : 0;
        if (place < args.num) space.own[place] = mine;
      }
      if (lane >= total && lane < args.num) space.own[lane] = 0;
    } else {  // values that lie together, or many alike
      std::uint64_t last = ~std::uint64_t{0};
#pragma unroll 1
      for (int place = 0; place < args.num; ++place) {
        std::uint64_t next = 0;
#pragma unroll
        for (const std::uint64_t key : keys) next = key < last && key > next ? key : next;
        last = warp_max(next);
        if (lane == 0) space.own[place] = last;
      }
    }
    __syncwarp();
    base += kEndThreads / 32 * kOffersAtOnce;
    if (base >= args.count) return;
    before = lane < args.num ? space.own[lane] : 0;
    load_offers(args, row, base, keys);
  }
}

// The best of both warps' shares, into `space.chosen`; by the block.
__device__ __forceinline__ void choose(const Offers& args, const WarpSpace& space, const std::uint64_t* others) {
  const int lane = threadIdx.x % 32;
  if (lane < args.num) space.chosen[lane] = 0;
  __syncthreads();
  const std::uint64_t mine = lane < args.num ? space.own[lane] : 0;
  const std::uint64_t other = lane < args.num ? others[lane] : 0;
  int place = lane;  // both lists are in order
  int place_of_other = lane;
#pragma unroll 4
  for (int i = 0; i < args.num; ++i) {
    place += others[i] > mine ? 1 : 0;
    place_of_other += space.own[i] > other ? 1 : 0;
  }
  if (mine != 0 && place < args.num) space.chosen[place] = mine;
  if (other != 0 && place_of_other < args.num) space.chosen[place_of_other] = other;
  __syncwarp();
}

// As a rule few more are listed than are chosen, and a list that is too short costs time alone; but where 32 are chosen
// most lanes of a warp hold one.
[[nodiscard]] inline int offer_capacity(int num) {
  return num <= 8 ? 64 : num <= 16 ? 96 : num < 32 ? 192 : kOffersAtOnce + 32;
}

}  // namespace eaglex::stream
