// The two producer warps of a weight-streaming GEMM and the ring between them and the consumers.
//
// Weights and gammas never change, so the ring is filled before the wait for the kernel before, a few chunks at a time:
// under PDL it is full when the activations arrive. After it the activation warp finds the rows and copies them beside
// the weights.
#pragma once

#include "cuda/stream/config.h"
#include "cuda/stream/ptx.cuh"
#include "cuda/stream/weights.cuh"

namespace eaglex::stream {

using bf16 = __nv_bfloat16;

// When the next kernel of the chain may start. At once: it prefetches its weights while this one works. After this
// one's wait: it may then read, before its own wait, all that was written before this one.
enum class Release : std::uint8_t { kAtOnce, kAfterWait };

// Bytes of a block's weights that are under way at once, whole chunks, also when its ring has been filled. More would
// only queue up in front of the memory, and what a step needs beside its weights would wait behind them.
inline constexpr int kInFlight = 2 * kChunkBytes;
inline constexpr int kInFlightAlone = 4 * kChunkBytes;        // where one block has its SM for itself
inline constexpr int kInFlightBesideX = 3 * kChunkBytes / 2;  // of small chunks, where x is kept
// That holds for the first round too: whole rings of all blocks at once, 29 MB, would stand for 6 µs in front of what
// the kernel before needs for its end. But nobody knows when that has ended, and no warp of the block can wait for it
// while one fills the ring: so after this time the rest of the round is left for later.
inline constexpr std::uint64_t kFillNs = 2500;
inline constexpr std::uint64_t kFillNsInt4 = 1500;  // its kernels are shorter

// One launch, without what its step adds.
struct GemmShape {
  const std::byte* tiles = nullptr;
  const float* row_scales = nullptr;     // FP8: [padded rows], in the tiles' order
  const bf16* ones = nullptr;            // [k]: gamma of a segment without a norm
  const bf16* gamma[kMaxSegments] = {};  // [k] per segment; null where the segment has no norm
  int k = 0;                             // of one segment
  int in_flight = kInFlight;
  std::uint64_t fill_ns = kFillNs;
  int segments = 1;
  int stored_segments = 1;  // of the matrix; `tiles` is where the first of `segments` begins
  int tokens = 0;
  int first_row_tile = 0;
  int chunks_per_segment = 0;
  int stages = 0;
  Split split;
  Reduction reduction = Reduction::kOwner;
  bool scatter = false;  // scatter.cuh
  float eps = 0;
  float4* partials = nullptr;         // partial_bytes()
  std::uint32_t* counters = nullptr;  // [row tiles], zero between launches
  Release release = Release::kAtOnce;
  bool x_is_there = false;  // before the wait: what wrote it was done when the launch could begin (run_early)
  const std::int32_t* needed = nullptr;       // null, or 0 there: nobody wants the result; read before the wait
  const std::int32_t* needed_late = nullptr;  // the same, read after it
  const std::int32_t* num_live = nullptr;     // null, or at most first_live there: no row of this launch counts
  int first_live = 0;
  std::uint64_t* words = nullptr;            // Consumer::run_kept
  std::int32_t* broken = nullptr;            // 1 there: words may be left of a launch in which a wait has failed
  const std::int32_t* never_wait = nullptr;  // 1 there: once a wait between blocks has failed, last arrivers sum up
  std::uint32_t* failed = nullptr;           // set where a wait between blocks ran into its deadline
};

template <class Weights, int kTokenTiles>
struct Geometry {
  static constexpr int kTileRows = tile_rows_for(kTokenTiles);
  static constexpr int kRowWarps = kTileRows / kStripRows;
  static constexpr int kHalves =
      kConsumerWarps / kRowWarps;  // warps that share a strip, each with its part of a chunk's k
  static constexpr int kStageBytes = stage_bytes(Weights::kBits, kTokenTiles);
  static constexpr int kChunkK = chunk_bytes(Weights::kBits, kTokenTiles) * 8 / Weights::kBits / kTileRows;
  static constexpr int kKBlocks = kChunkK / kKBlock;
  static constexpr int kWarpKBlocks = kKBlocks / kHalves;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kRowBlocks = kTileRows / kBlockRows;
  static constexpr bool kWide = kWgmma && kTokenTiles >= 4;  // wgmma.cuh
  static_assert(kWarpKBlocks * kHalves == kKBlocks && kRowWarps * kHalves == kConsumerWarps);
};

// Where a unit lies: the tile (row_tile, segment) and which chunk of the segment.
struct Cursor {
  int row_tile;
  int segment;
  int chunk;

  __device__ Cursor(const GemmShape& shape, int unit) {
    const int per_tile = shape.segments * shape.chunks_per_segment;
    row_tile = unit / per_tile;
    segment = unit % per_tile / shape.chunks_per_segment;
    chunk = unit % shape.chunks_per_segment;
  }
  __device__ void next(const GemmShape& shape) {
    if (++chunk < shape.chunks_per_segment) return;
    chunk = 0;
    if (++segment < shape.segments) return;
    segment = 0;
    ++row_tile;
  }
};

struct Ring {
  std::uint32_t weights;  // shared addresses
  std::uint32_t x;
  std::uint32_t gamma;
  std::uint32_t landed;  // barriers per stage: its weights are there
  std::uint32_t full;    // its activations are there
  std::uint32_t empty;   // everybody has read it
  int stages;
  int x_bytes;  // of a stage
};

// Position in the ring. A producer starts one round ahead: its first waits for an empty stage return at once.
struct RingPosition {
  int stage = 0;
  std::uint32_t phase;
  __device__ explicit RingPosition(std::uint32_t first_phase) : phase(first_phase) {}
  __device__ void next(const Ring& ring) {
    if (++stage < ring.stages) return;
    stage = 0;
    phase ^= 1;
  }
  // At most a round.
  __device__ void skip(const Ring& ring, int stages) {
    stage += stages;
    if (stage >= ring.stages) stage -= ring.stages, phase ^= 1;
  }
  __device__ void advance(const Ring& ring, int stages) {
    stage += stages;
    while (stage >= ring.stages) stage -= ring.stages, phase ^= 1;
  }
};
inline constexpr std::uint32_t kProducer = 1;
inline constexpr std::uint32_t kConsumer = 0;

// Issues the copies of a chunk; by one thread.
template <class Weights, int kTokenTiles, bool kNormed>
__device__ __forceinline__ void copy_weights(const GemmShape& shape, const Ring& ring, const Cursor& cursor, int stage,
                                             std::uint64_t policy) {
  using G = Geometry<Weights, kTokenTiles>;
  const int k_blocks = shape.k / kKBlock;
  const std::int64_t segment_bytes = k_block_bytes(Weights::kBits, k_blocks);
  const int k_block = cursor.chunk * G::kKBlocks;
  const int count = min(G::kKBlocks, k_blocks - k_block);
  const auto bytes = static_cast<std::uint32_t>(k_block_bytes(Weights::kBits, count));
  const std::uint32_t bar = ring.landed + 8 * stage;
  const std::uint32_t to = ring.weights + stage * G::kStageBytes;
  mbar_arrive_expect(bar, G::kRowBlocks * bytes + (kNormed ? count * kKBlock * 2 : 0));
#pragma unroll
  for (int block = 0; block < G::kRowBlocks; ++block) {
    const std::int64_t row_block =
        static_cast<std::int64_t>(shape.first_row_tile + cursor.row_tile) * G::kRowBlocks + block;
    const std::byte* const from = shape.tiles + (row_block * shape.stored_segments + cursor.segment) * segment_bytes +
                                  k_block_bytes(Weights::kBits, k_block);
    bulk_copy(to + block * (G::kStageBytes / G::kRowBlocks), from, bytes, bar, policy);
  }
  if constexpr (kNormed) {
    const bf16* const own = shape.gamma[cursor.segment];
    const bf16* const gamma = (own != nullptr ? own : shape.ones) + k_block * kKBlock;
    bulk_copy(ring.gamma + stage * G::kChunkK * 2, gamma, count * kKBlock * 2, bar, policy);
  }
}

// Chunks of a block that are under way at most.
template <class Weights, int kTokenTiles>
__device__ __forceinline__ int most_under_way(const GemmShape& shape) {
  return min(shape.in_flight / chunk_bytes(Weights::kBits, kTokenTiles), shape.stages);
}

// Begins the first round and returns how many of its chunks are issued. They must be before any thread of the block
// waits for the kernels before: griddepcontrol.wait holds up the whole block, whichever warp calls it.
template <class Weights, int kTokenTiles, bool kNormed>
__device__ __forceinline__ int fill_ring(const GemmShape& shape, const Ring& ring, int first, int last) {
  const std::uint64_t policy = evict_first_policy();
  const int count = min(shape.stages, last - first);
  const int most = most_under_way<Weights, kTokenTiles>(shape);
  const std::uint64_t start = now_ns();
  Cursor cursor(shape, first);
#pragma unroll 1
  for (int i = 0; i < count; ++i, cursor.next(shape)) {
    while (i >= most && !mbar_try_wait(ring.landed + 8 * (i - most), kConsumer)) {
      if (now_ns() - start > shape.fill_ns) return i;
    }
    copy_weights<Weights, kTokenTiles, kNormed>(shape, ring, cursor, i, policy);
  }
  return count;
}

// All chunks after those.
template <class Weights, int kTokenTiles, bool kNormed>
__device__ __forceinline__ void produce_weights(const GemmShape& shape, const Ring& ring, int issued, int first,
                                                int last) {
  const int most = most_under_way<Weights, kTokenTiles>(shape);
  const std::uint64_t policy = evict_first_policy();
  int under_way = issued;
  RingPosition oldest(kConsumer);  // of those under way
  RingPosition at(under_way == ring.stages ? kProducer ^ 1 : kProducer);
  at.stage = under_way % ring.stages;
  Cursor cursor(shape, first + under_way);
  // Consumers that begin early may wait for the kernels before, which a wait in vain may hold up for one deadline each.
  const std::uint64_t deadline = shape.x_is_there ? 4 * kDeadlineNs : kDeadlineNs;
  for (int unit = first + under_way; unit < last; ++unit, cursor.next(shape), at.next(ring)) {
    mbar_wait(ring.empty + 8 * at.stage, at.phase, deadline);
    for (; under_way >= most; --under_way, oldest.next(ring)) mbar_wait(ring.landed + 8 * oldest.stage, oldest.phase);
    copy_weights<Weights, kTokenTiles, kNormed>(shape, ring, cursor, at.stage, policy);
    ++under_way;
  }
}

// What fill_ring has begun, where nobody will consume it: a block must not end under its copies, since the shared
// memory goes to another.
__device__ __forceinline__ void land_ring(const Ring& ring, int count) {
  for (int i = 0; i < count; ++i) mbar_wait(ring.landed + 8 * i, kConsumer);
}

// `sources` [segments][tokens]: where each token's row of x begins, per segment. A lane keeps the pointers to its rows
// in registers: with one warp for all copies of a chunk, a look-up per copy would be slower than the weights.
template <class Weights, int kTokenTiles>
__device__ void produce_activations(const GemmShape& shape, const Ring& ring, const bf16* const* sources, int first,
                                    int last) {
  using G = Geometry<Weights, kTokenTiles>;
  // Of 16 bytes, per token and pass; wgmma's panels come one by one.
  constexpr int kPieces = G::kWide ? kPanelK / 8 : G::kKBlocks * 4 < 32 ? G::kKBlocks * 4 : 32;
  constexpr int kPasses = G::kKBlocks * 4 / kPieces;  // over a chunk
  constexpr int kTokensAtOnce = 32 / kPieces;         // a warp's copies cover whole rows
  constexpr int kCopies = G::kTokens / kTokensAtOnce;
  const int lane = threadIdx.x % 32;
  const int token = lane / kPieces;
  const int piece = lane % kPieces;
  const int last_pieces = (shape.k / kKBlock - (shape.chunks_per_segment - 1) * G::kKBlocks) * 4;
  // wgmma's 128-byte swizzle: a row's 64 k are 128 bytes, unit u of 16 stands at u ^ row % 8.
  constexpr int kRowBytes = G::kWide ? 128 : 64;
  static_assert(!G::kWide || kTokensAtOnce == 4);
  const std::uint32_t to = ring.x + (G::kWide ? token * 128 + (piece ^ token) * 16
                                              : ((piece / 4) * shape.tokens + token) * 64 + piece % 4 * 16);
  const bf16* rows[kCopies];
  int segment = -1;
  RingPosition at(kProducer);
  Cursor cursor(shape, first);
  for (int unit = first; unit < last; ++unit, cursor.next(shape), at.next(ring)) {
    if (cursor.segment != segment) {
      segment = cursor.segment;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = token + i * kTokensAtOnce;
        rows[i] = sources[segment * G::kTokens + (row < shape.tokens ? row : 0)] + piece * 8;
      }
    }
    mbar_wait(ring.empty + 8 * at.stage, at.phase);
    const int offset = cursor.chunk * G::kChunkK;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (cursor.chunk + 1 < shape.chunks_per_segment || pass * kPieces + piece < last_pieces) {
        const std::uint32_t pass_to =
            to + at.stage * ring.x_bytes + pass * kPieces / 4 * (G::kWide ? G::kTokens : shape.tokens) * 64;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (token + i * kTokensAtOnce < shape.tokens)
            cp_async_16((G::kWide ? pass_to ^ i % 2 * 64 : pass_to) + i * kTokensAtOnce * kRowBytes,
                        rows[i] + offset + pass * kPieces * 8);
        }
      }
    }
    mbar_arrive_on_cp_async(ring.full + 8 * at.stage);
  }
}

}  // namespace eaglex::stream
