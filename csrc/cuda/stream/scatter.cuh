// Sums of shared tiles where many blocks share each: every one of them sums up a slice instead of the owner all of it.
//
// Caller: Consumer (gemm.cuh), from 33 tokens on (config.cpp: sums_in_slices). Bytes: those of reduce.cuh, read by all
// blocks instead of by owners.
// Mapping: a unit is 16 rows by 8 tokens; a block's warps take those of its slice. All blocks of a tile wait for one
// another. Where only a part of the grid is resident the tiles whose blocks all are complete and leave, so of a grid no
// more blocks than share one tile can be stuck, and the others' slots bring the missing ones in (reduce.cuh's rule).
#pragma once

#include "cuda/stream/reduce.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, class Step>
class SlicedSums : public TileSums<Weights, kTokenTiles, Step> {
  using Base = TileSums<Weights, kTokenTiles, Step>;

 protected:
  using Base::at_;
  using Base::kNormed;
  using Base::params_;
  using Base::per_tile_;
  using Base::ring_;
  using Base::role_;
  using Base::shape_;
  using Base::shared_;
  using Base::waits_;
  using typename Base::G;
  static constexpr bool kSliced = Step::kSliced && kTokenTiles >= 4;

  __device__ SlicedSums(const GemmShape& shape, const typename Step::Params& params, const Ring& ring,
                        std::byte* shared, const SharedLayout& at)
      : Base(shape, params, ring, shared, at) {}

  __device__ __forceinline__ bool sliced() const { return kSliced && shape_.scatter && waits_; }

  // This block's part of a tile, for all that share it.
  __device__ __forceinline__ void hand_over(int tile, int segment, const float (&acc)[kTokenTiles][4]) {
    this->publish(this->slot(blockIdx.x, tile, segment), acc);
    consumer_barrier();
    if (threadIdx.x == 0) add_release(shape_.counters + tile);
  }

  // Sums this block's slice of the tile and gives `finish` (first token, strip, sums) one unit at a time, per warp.
  template <class Finish>
  __device__ __forceinline__ void sum_slice(int tile, Finish&& finish) {
    const int begin = tile * per_tile_;
    const int first = shape_.split.block_of(begin);
    const int last = shape_.split.block_of(begin + per_tile_ - 1);
    const int sharers = last - first + 1;
    volatile int* const flag = this->block_flag();
    if (threadIdx.x == 0) {
      std::uint32_t* const counter = shape_.counters + tile;
      const bool there = this->wait_until(counter, sharers);
      // Whoever has seen the full count adds one more; the last of them leaves zero.
      if (there) static_cast<void>(increment_wrapping(counter, 2 * sharers - 1));
      *flag = there;
    }
    consumer_barrier();
    const bool valid = *flag != 0;
    if constexpr (kNormed) find_all_norms(tile, first, last);
    const int units = (shape_.tokens + 7) / 8 * G::kRowWarps;
    const int own = static_cast<int>(blockIdx.x) - first;
    const int end = units * (own + 1) / sharers;
    const int lane = this->opaque_lane();
#pragma unroll 1
    for (int unit = units * own / sharers + role_.warp; unit < end; unit += kUnits * kConsumerWarps) {
      float acc[kUnits][1][4] = {};
      for (int segment = 0; segment < shape_.segments; ++segment) {
        float4 sum[kUnits] = {};
        for (int base = first; base <= last; base += kAtOnce) {
          float4 part[kUnits][kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const bool there = this->published(base + i, last, tile, segment, -1);
            const float4* const from = this->slot(base + i, tile, segment) + unit * 32 + lane;
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
              part[u][i] = there && unit + u * kConsumerWarps < end ? __ldcg(from + u * kConsumerWarps * 32)
                                                                    : make_float4(0, 0, 0, 0);
            }
          }
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              sum[u].x += part[u][i].x, sum[u].y += part[u][i].y;
              sum[u].z += part[u][i].z, sum[u].w += part[u][i].w;
            }
          }
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          float (&to)[4] = acc[u][0];
          const int token = token_of(unit + u * kConsumerWarps) + lane % 4 * 2;
          const float* const norm = this->norms() + segment * G::kTokens + token % G::kTokens;
          const float2 by = kNormed ? *reinterpret_cast<const float2*>(norm) : make_float2(1.0F, 1.0F);
          to[0] = fmaf(by.x, sum[u].x, to[0]), to[1] = fmaf(by.y, sum[u].y, to[1]);
          to[2] = fmaf(by.x, sum[u].z, to[2]), to[3] = fmaf(by.y, sum[u].w, to[3]);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float (&to)[4] = acc[u][0];
        if (!valid) to[0] = to[1] = to[2] = to[3] = __int_as_float(0x7FFFFFFF);
        const int at = unit + u * kConsumerWarps;
        if (at < end) finish(token_of(at), at % G::kRowWarps, acc[u]);
      }
    }
    consumer_barrier();  // flag and norms serve the next tile too
  }

 private:
  // Reads of a lane that are under way at once: parts of a unit, and units of a warp.
  static constexpr int kUnits = kTokenTiles > 8 ? 4 : 1;
  static constexpr int kAtOnce = 8 / (kUnits > 1 ? 2 : 1);

  __device__ static __forceinline__ int token_of(int unit) { return unit / G::kRowWarps * 8; }

  __device__ __forceinline__ void find_all_norms(int tile, int first, int last) {
    constexpr int kSums = Base::kTokenSums;
    const int token = role_.warp * 32 + this->opaque_lane();
    if (token < G::kTokens) {
      for (int segment = 0; segment < shape_.segments; ++segment) {
        float sum = 0;
        for (int base = first; base <= last; base += kAtOnce) {
          float part[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const auto* const from =
                reinterpret_cast<const float*>(this->slot(base + i, tile, segment) + kSums) + token;
            part[i] = this->published(base + i, last, tile, segment, -1) ? __ldcg(from) : 0.0F;
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) sum += part[i];
        }
        this->norms()[segment * G::kTokens + token] =
            shape_.gamma[segment] == nullptr ? 1.0F : rsqrtf(sum / static_cast<float>(shape_.k) + shape_.eps);
      }
    }
    consumer_barrier();
  }
};

}  // namespace eaglex::stream
