// y[tokens, N] = x Wᵀ at the speed of reading W, for 1 to 64 tokens (to 128 by wgmma.cuh); what x is and what becomes of
// y is the step's.
//
// Callers: the launch_* functions. Bytes: N·K of weights once; x once per block and tile, from L2.
// Mapping: two blocks per SM stream an equal share of the weights' chunks; 8 warps multiply (64 rows: two warps per
// strip of 16, each with half of a chunk's k; 128 rows: one), 2 warps copy. Tiles that several blocks share are summed
// in a fixed order.
// RMSNorm is folded in: gamma goes onto x (onto W by wgmma and where scales go there), the sum of squares comes from
// the tensor cores (x xᵀ, its diagonal), 1/rms is applied to the sums, so no kernel stands in between and nobody reads x
// twice; but where x is kept (kept.cuh) each block reads all of it.
#pragma once

#include <type_traits>

#include "cuda/stream/early.cuh"
#include "cuda/stream/kept.cuh"
#include "cuda/stream/multiply.cuh"
#include "cuda/stream/paired.cuh"
#include "cuda/stream/wgmma.cuh"
#include "cuda/stream/wgmma_bits.cuh"
#include "cuda/stream/word_sums.cuh"

namespace eaglex::stream {

template <class Weights, int kTokenTiles, class Step>
class Consumer : WordSums<Weights, kTokenTiles, Step> {
  using Base = WordSums<Weights, kTokenTiles, Step>;
  using Base::at_;
  using Base::kEarlyParts;
  using Base::kSliced;
  using Base::params_;
  using Base::per_tile_;
  using Base::ring_;
  using Base::role_;
  using Base::shape_;
  using Base::shared_;
  using typename Base::G;
  static constexpr bool kNormed = Step::kNormed;
  static constexpr bool kPaired = is_paired(Weights::kBits, kTokenTiles);
  using Multiply = std::conditional_t<kPaired, PairedMultiplier<Weights, kTokenTiles, kNormed>,
                                      Multiplier<Weights, kTokenTiles, kNormed>>;
  using Wide = std::conditional_t<Weights::kBits == 16, WideMultiplier<Weights, kTokenTiles, kNormed>,
                                  LowBitWideMultiplier<Weights, kTokenTiles, kNormed>>;
  using Rest = std::conditional_t<G::kWide, Wide, Multiply>;  // what sums lack

 public:
  static constexpr int kReaders = kConsumerWarps / Multiply::kTeams;  // warps that read a stage

  __device__ Consumer(const GemmShape& shape, const typename Step::Params& params, const Ring& ring, std::byte* shared,
                      const SharedLayout& at)
      : Base(shape, params, ring, shared, at) {}

  // All that a thread can find out before the wait.
  __device__ __forceinline__ void prepare() {
    first_ = shape_.split.first(blockIdx.x);
    last_ = shape_.split.first(blockIdx.x + 1);
    tile_ = first_ / per_tile_;
    this->last_sharer_ = shape_.split.block_of(((last_ - 1) / per_tile_ + 1) * per_tile_ - 1);
    asm volatile("" : "+r"(first_), "+r"(last_), "+r"(tile_), "+r"(this->last_sharer_));
    if (threadIdx.x < kConsumerThreads) Step::template begin<kTokenTiles>(shared_ + at_.state);
  }

  // One token, x kept: what other blocks have of a tile comes as words (word_sums.cuh). `producers` waits for the kernels
  // before, where that has not been done: in front of the first epilogue, or of sums whose place is every launch's.
  template <class Producers>
  __device__ void run_kept(std::int32_t broken, Producers producers) {
    RingPosition at(kConsumer);
    begin_waiting(Producers::kRunning);
    for (int unit = first_, tile = tile_; unit < last_; ++tile) {
      const int begin = tile * per_tile_;
      const int piece_begin = unit;
      const int piece_end = min(last_, begin + per_tile_);
      const bool whole = piece_begin == begin && piece_end == begin + per_tile_;
      const int others =
          !whole && piece_begin == begin && this->waits_ ? this->last_sharer_ - static_cast<int>(blockIdx.x) : 0;
      const std::uint64_t word = this->early_word(others);
      float acc[1][4] = {};
      for (int segment = segment_of(unit - begin); unit < piece_end; ++segment) {
        const int end = min(piece_end, begin + (segment + 1) * shape_.chunks_per_segment);
        float part[1][4];
        accumulate_kept(unit, end, segment, at, part);
        const float norm = kNormed ? this->norms()[segment * G::kTokens] : 1.0F;
        acc[0][0] = fmaf(norm, part[0][0], acc[0][0]), acc[0][2] = fmaf(norm, part[0][2], acc[0][2]);
        unit = end;
      }
      acc[0][1] = acc[0][0], acc[0][3] = acc[0][2];
      if (!whole && !this->waits_) {
        wait_once(producers);
        if (!this->complete(tile, 0, piece_begin, piece_end, typename Base::Early{}, acc)) continue;
      } else if (piece_begin != begin) {
        this->publish_words(acc);
        continue;
      } else if (!whole) {
        this->touch_inputs(tile);
        if (role_.half == 0) this->add_words(others, word, broken, acc);
      }
      wait_once(producers);
      if (this->rows_known_) epilogue(this->view_of(tile), acc);
    }
    wait_once(producers);
    Step::template end<1>(params_, role_, shape_.tokens, shared_ + at_.state);
  }

  __device__ void run() {
    const int first = first_;
    const int last = last_;
    RingPosition at(kConsumer);
    for (int unit = first, tile = tile_; unit < last; ++tile) {
      if (Weights::kRowScales && role_.half == 0 && role_.lane == 0) touch(row_scales(tile));
      const int piece_begin = unit;
      const int piece_end = min(last, (tile + 1) * per_tile_);
      float acc[kTokenTiles][4];
      typename Base::Early early;
      if constexpr (kEarlyParts > 0) this->look_for_parts(tile, piece_begin, piece_end, early);
      int segment;
      while (true) {
        segment = segment_of(unit - tile * per_tile_);
        const int end = min(piece_end, tile * per_tile_ + (segment + 1) * shape_.chunks_per_segment);
        accumulate(unit, end, segment, at, acc);
        unit = end;
        if (unit == piece_end) break;
        this->publish(this->slot(blockIdx.x, tile, segment),
                      acc);  // another segment follows: its sums have another 1/rms
      }
      if (kSliced && this->sliced() && !whole(tile, first, last)) {
        this->hand_over(tile, segment, acc);
      } else if (this->complete(tile, segment, piece_begin, piece_end, early, acc)) {
        epilogue(this->view_of(tile), acc);
      }
    }
    if constexpr (kSliced) {
      if (this->sliced()) sum_slices(first, last);
    }
    Step::template end<kTokenTiles>(params_, role_, shape_.tokens, shared_ + at_.state);
  }

 private:
  __device__ __forceinline__ void begin_waiting(bool running) {
    if (running) this->waits_for_producers_ = true, this->rows_known_ = false;
  }
  // Waits for the kernels before, where that has not been done.
  template <class Producers>
  __device__ __forceinline__ void wait_once(const Producers& producers) {
    if constexpr (Producers::kRunning) {
      if (!this->waits_for_producers_) return;
      this->waits_for_producers_ = false;
      this->rows_known_ = producers();
    }
  }

  __device__ __forceinline__ int segment_of(int chunk) const {
    if (shape_.segments == 1) return 0;
    return chunk / shape_.chunks_per_segment;
  }

  // Whether all of the tile is this block's.
  __device__ __forceinline__ bool whole(int tile, int first, int last) const {
    return first <= tile * per_tile_ && (tile + 1) * per_tile_ <= last;
  }

  __device__ __forceinline__ void sum_slices(int first, int last) {
#pragma unroll 1
    for (int tile = first / per_tile_; tile * per_tile_ < last; ++tile) {
      if (whole(tile, first, last)) continue;
      this->sum_slice(tile, [&](int first_token, int strip, float (&acc)[1][4]) {
        auto view = this->view_of(tile);
        view.role.strip = strip;
        view.first_token = first_token;
        epilogue(view, acc);
      });
    }
  }

  // The same sums by wgmma. `ends`: the last chunk is the segment's.
  __device__ __forceinline__ void accumulate_wide(int chunks, bool ends, RingPosition& at,
                                                  float (&acc)[kTokenTiles][4]) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0F;
    float squares[Wide::kSquareSums][4] = {};
    Wide multiply(ring_, shared_, at_, role_);
    // K is a multiple of a panel: of a segment's last chunk there may be one alone.
    if constexpr (Wide::kPanels == 2) multiply.cut = ends && shape_.k % G::kChunkK != 0;
    multiply.add_chunks(chunks, at, acc, squares);
    if constexpr (kNormed) {
      consumer_barrier();  // whoever read `squares` before is done
      multiply.store_squares(squares, this->squares());
      consumer_barrier();
    }
  }

  // Sums of chunks [unit, end) of one segment, over both halves of k (in the warps of half 0).
  __device__ __forceinline__ void accumulate(int unit, int end, int segment, RingPosition& at,
                                             float (&acc)[kTokenTiles][4]) {
    if constexpr (G::kWide) {
      accumulate_wide(end - unit, (end - 1) % shape_.chunks_per_segment + 1 == shape_.chunks_per_segment, at, acc);
    } else if constexpr (kPaired) {
      accumulate_pairs(unit, end, segment, at, acc);
    } else {
      accumulate_strip(unit, end, segment, at, acc);
    }
  }

  __device__ __forceinline__ void accumulate_pairs(int unit, int end, int segment, RingPosition& at,
                                                   float (&acc)[kTokenTiles][4]) {
    float sums[Multiply::kStrips][kTokenTiles][4] = {};
    typename Multiply::Squares squares;
    Multiply multiply{role_.lane, role_.warp, shape_.tokens};
    multiply.add_chunks(shape_, ring_, multiply.operands(shared_, at_), unit, end,
                        (unit - segment * shape_.chunks_per_segment) % per_tile_, at, sums, squares);
    multiply.lane = this->opaque_lane();
    multiply.merge(sums, this->exchange(), acc, [&] { multiply.store_squares(squares, this->squares()); });
  }

  __device__ __forceinline__ void accumulate_kept(int unit, int end, int segment, RingPosition& at,
                                                  float (&acc)[kTokenTiles][4]) {
    float sums[Multiply::kStrips][2] = {};
    KeptMultiplier<Weights, kNormed> multiply{{role_.lane, role_.warp, shape_.tokens}};
    int kept = unit - first_;
    while (kept >= per_tile_) kept -= per_tile_;
    int chunk = unit - tile_ * per_tile_;
    while (chunk >= per_tile_) chunk -= per_tile_;
    multiply.add_chunks(shape_, ring_, shared_, at_,
                        {unit, end, chunk - segment * shape_.chunks_per_segment, kept, per_tile_}, at, sums);
    multiply.lane = this->opaque_lane();
    multiply.merge(sums, reinterpret_cast<float*>(this->exchange()), acc);
  }

  __device__ __forceinline__ void accumulate_strip(int unit, int end, int segment, RingPosition& at,
                                                   float (&acc)[kTokenTiles][4]) {
    constexpr int kSums = Multiply::kSums;
    float sums[kSums][kTokenTiles][4] = {};
    float squares[4] = {};
    const int g = role_.lane / 4;
    const int q = role_.lane % 4;
    const int k_block = role_.half * G::kWarpKBlocks;
    const int last_blocks = shape_.k / kKBlock - (shape_.chunks_per_segment - 1) * G::kKBlocks - k_block;
    const Multiply multiply{role_, shape_.tokens};
    const typename Multiply::Operands all{
        shared_ + role_.strip / 4 * (G::kStageBytes / G::kRowBlocks) + Weights::offset(k_block),
        shared_ + at_.x + (k_block * shape_.tokens + g) * 64 + q * 16, shared_ + at_.gamma + k_block * 64 + q * 16};
    int chunk = (unit - segment * shape_.chunks_per_segment) % per_tile_;
    for (; unit < end; ++unit, ++chunk) {
      mbar_wait(ring_.full + 8 * at.stage, at.phase);
      mbar_wait(ring_.landed + 8 * at.stage, at.phase);
      const auto now = all.at(at.stage, ring_.x_bytes);
      // Rows beyond the last token are whatever follows in shared memory: they only reach columns that nobody reads.
      // K is a multiple of 64: of a segment's last chunk this warp has an even number of blocks, or none.
      const int blocks = chunk + 1 < shape_.chunks_per_segment ? G::kWarpKBlocks : min(G::kWarpKBlocks, last_blocks);
      if constexpr (kNormed) multiply.add_all_squares(now, blocks, squares);
      if (blocks == G::kWarpKBlocks) {
#pragma unroll
        for (int kb = 0; kb < G::kWarpKBlocks; kb += Multiply::kBatch)
          multiply.template add<Multiply::kBatch>(now, kb, kGroupBlocks, sums);
      } else if constexpr (G::kWarpKBlocks > 2) {
#pragma unroll 1
        for (int kb = 0; kb < blocks; kb += 2) {
          const int group = min(kGroupBlocks, blocks - kb / kGroupBlocks * kGroupBlocks);
          multiply.template add<2>(now, kb, group, sums);
        }
      }
      __syncwarp();
      if (role_.lane == 0) mbar_arrive(ring_.empty + 8 * at.stage);
      at.next(ring_);
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[t][i] = kSums == 2 ? sums[0][t][i] + sums[1][t][i] : sums[0][t][i];
    }
    this->merge_halves(acc, squares);
  }

  // Of the first row of this warp's strip.
  __device__ __forceinline__ const float* row_scales(int tile) const {
    return shape_.row_scales + (shape_.first_row_tile + tile) * G::kTileRows + role_.strip * kStripRows;
  }

  template <int kTiles>
  __device__ __forceinline__ void epilogue(const TileView<typename Step::RowInfo>& view, float (&acc)[kTiles][4]) {
    mbar_wait(ring_.empty + 8 * ring_.stages, 0);  // row_info is there; passes at once ever after
    if (Rest::kRestLow != 1 && role_.half == 0) {
      constexpr float kLow = Rest::kRestLow;
      constexpr float kHigh = Rest::kRestHigh;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) acc[t][0] *= kLow, acc[t][1] *= kLow, acc[t][2] *= kHigh, acc[t][3] *= kHigh;
    }
    if (Weights::kRowScales && role_.half == 0) {
      const float* const scales = shape_.row_scales + view.tile_row + view.role.strip * kStripRows + view.role.lane / 4;
      const float low = __ldg(scales);
      const float high = __ldg(scales + 8);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) acc[t][0] *= low, acc[t][1] *= low, acc[t][2] *= high, acc[t][3] *= high;
    }
    Step::template tile<kTiles>(params_, view, acc);
  }

  int first_;
  int last_;
  int tile_;
};

// All that a block does before it waits for the kernels before is under way, and its barriers are there.
__device__ __forceinline__ void begin_barrier() {
  __syncwarp();
  asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
}

template <class Weights, int kTokenTiles, class Step>
__device__ __forceinline__ void run_block(const GemmShape& shape, const SharedLayout& at,
                                          const typename Step::Params& params) {
  using G = Geometry<Weights, kTokenTiles>;
  constexpr bool kGammaStreams = Step::kNormed && !Weights::kKeepsX;
  extern __shared__ __align__(1024) std::byte shared[];
  if (shape.release == Release::kAtOnce) release_dependents();
  // num_live may be read before the wait: parts behind the first follow a kernel of the cycle that has waited for admit.
  if (is_idle(shape.needed) || is_behind(shape.num_live, shape.first_live)) {
    wait_for_producers();
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const std::uint32_t base = shared_address(shared);
  const std::uint32_t barriers = base + at.barriers;
  const Ring ring{base,
                  base + at.x,
                  base + at.gamma,
                  barriers,
                  barriers + 8 * shape.stages,
                  barriers + 16 * shape.stages,
                  shape.stages,
                  G::kChunkK * (G::kWide ? G::kTokens : shape.tokens) * 2};
  const std::uint32_t rows_ready = barriers + 24 * shape.stages;
  constexpr bool kAllLocate = kTokenTiles > 8;  // more rows than one warp finds in time
  const int first = shape.split.first(blockIdx.x);
  const int last = shape.split.first(blockIdx.x + 1);
  int issued = 0;  // chunks, by the thread that issues them
  if (warp == kConsumerWarps) {
    if (lane == 0) {
      for (int stage = 0; stage < shape.stages; ++stage) {
        mbar_init(ring.landed + 8 * stage, 1);
        mbar_init(ring.full + 8 * stage, 32);
        mbar_init(ring.empty + 8 * stage, Consumer<Weights, kTokenTiles, Step>::kReaders);
      }
      mbar_init(rows_ready, kAllLocate ? kConsumerThreads : 1);
      mbar_init_fence();
    }
    if constexpr (Step::kMayBeEarly && Weights::kKeepsX) {
      if (shape.x_is_there) say_barriers_are_there();
    }
    if (lane == 0) issued = fill_ring<Weights, kTokenTiles, kGammaStreams>(shape, ring, first, last);
  }
  const bool locates = warp > kConsumerWarps;
  const bf16** const sources = reinterpret_cast<const bf16**>(shared + at.sources);
  if (locates) touch_parameters(params);
  std::conditional_t<Weights::kKeepsX, KeptInputs<Weights, Step::kNormed>, StreamedInputs> kept(shape, first, last);
  Consumer<Weights, kTokenTiles, Step> consumer(shape, params, ring, shared, at);
  consumer.prepare();
  if constexpr (Step::kMayBeEarly && Weights::kKeepsX) {
    if (shape.x_is_there) return run_early<Weights, Step>(shape, at, params, ring, shared, issued, kept, consumer);
  }
  bool idle = false;
  // All warps come through here, because a barrier of the whole block is for one place in the code.
#pragma unroll 1
  for (int round = locates && Step::rehearses(params) ? 0 : 1; round < 2; ++round) {
    if (round == 1) {
      begin_barrier();
      wait_for_producers();
      if (locates && shape.release == Release::kAfterWait) release_dependents();
      idle = is_idle(shape.needed_late);
    }
    if (kAllLocate || !locates) continue;
    auto* const rows = reinterpret_cast<typename Step::RowInfo*>(shared + at.row_info);
    for (int token = lane; token < shape.tokens; token += 32)
      Step::locate(params, token, sources + token, G::kTokens, rows + token);
    __syncwarp();
  }
  if (locates) {
    if (idle) return;
    if (!kAllLocate && lane == 0) mbar_arrive(rows_ready);
    if (kAllLocate) mbar_wait(rows_ready, 0);
    if constexpr (!Weights::kKeepsX) produce_activations<Weights, kTokenTiles>(shape, ring, sources, first, last);
    Step::template beside<kTokenTiles>(params, sources, shape.tokens, lane);
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
  if (warp == kConsumerWarps) {
    if (lane != 0) return;
    if (idle) return land_ring(ring, issued);
    return produce_weights<Weights, kTokenTiles, kGammaStreams>(shape, ring, issued, first, last);
  }
  if (idle) return;
  if constexpr (kAllLocate) {
    const int token = static_cast<int>(threadIdx.x);
    auto* const rows = reinterpret_cast<typename Step::RowInfo*>(shared + at.row_info);
    if (token < shape.tokens) Step::locate(params, token, sources + token, G::kTokens, rows + token);
    mbar_arrive(rows_ready);
  }
  std::int32_t broken = 0;
  if constexpr (Weights::kKeepsX) {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(broken) : "l"(shape.broken) : "memory");
    const bf16* row = nullptr;
    if constexpr (std::is_empty_v<typename Step::RowInfo>) {
      Step::locate(params, 0, &row, G::kTokens, nullptr);  // sooner than the other warp can tell
      kept.keep(at, shared, &row);
    } else {
      mbar_wait(rows_ready, 0);
      kept.keep(at, shared, sources);
    }
  }
  if constexpr (Weights::kKeepsX) consumer.run_kept(broken, ProducersDone{});
  if constexpr (!Weights::kKeepsX) consumer.run();
}

// More than 64 tokens leave no room for a second block on the SM, and only wgmma has use for them.
template <class Weights, int kTokenTiles, class Step>
__global__ void __launch_bounds__(kThreads, kTokenTiles > 8 ? 1 : 2)
    stream_gemm(const __grid_constant__ GemmShape shape, const __grid_constant__ SharedLayout at,
                const __grid_constant__ typename Step::Params params) {
#if EAGLEX_STREAM_KERNELS
  if constexpr (kTokenTiles <= 8 || kWgmma) run_block<Weights, kTokenTiles, Step>(shape, at, params);
#endif
}

}  // namespace eaglex::stream
