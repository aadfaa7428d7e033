// How a weight-streaming GEMM is cut for a device: pure host arithmetic, no CUDA, so that a test on any machine can
// check it.
//
// y[M, N] = x[M, K] Wᵀ with few tokens M: the weights are the A operand of the tensor cores, the tokens the columns of
// B. W is stored as tiles (tiles.h); each block streams an equal share of them, whatever tile it begins or ends in
// (stream-K).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rescore.h"

#if defined(__CUDACC__)
#define EAGLEX_HOST_DEVICE __host__ __device__
#else
#define EAGLEX_HOST_DEVICE
#endif

namespace eaglex::stream {

inline constexpr int kMaxTokens = 64;
inline constexpr int kMaxWideTokens = 128;  // of a launch that multiplies with wgmma alone (wgmma.cuh)
inline constexpr int kMaxSegments =
    8;  // parts of K with a norm of their own: embedding | hidden, or the auxiliary layers
inline constexpr int kMaxStages = 16;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumerThreads = kConsumerWarps * 32;
inline constexpr int kThreads = kConsumerThreads + 64;  // and one warp for weights, one for activations

inline constexpr int kBlockRows = 64;      // rows of W that lie together in memory
inline constexpr int kStripRows = 16;      // rows of one tensor-core operand
inline constexpr int kKBlock = 32;         // k values of one piece: two m16n8k16
inline constexpr int kPanelK = 64;         // k values of a row of 128 bytes, as wgmma reads x
inline constexpr int kKMultiple = 64;      // K of a segment must be a multiple
inline constexpr int kPaddedRows = 128;    // storage is padded to this, with zeros
inline constexpr int kChunkBytes = 16384;  // weights of one pipeline stage, at most
inline constexpr int kGroupBlocks = 4;     // K blocks whose inputs share a scale in INT4: 128 inputs

// Partial sums of squares: 8 tokens per warp, or one for each token.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int num_squares(int tokens) {
  return tokens > 8 * kConsumerWarps ? tokens : 8 * kConsumerWarps;
}

// How the weights of a matrix lie in its tiles.
enum class Precision : std::uint8_t { kBf16, kFp8, kInt4 };

[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int bits_of(Precision precision) {
  return precision == Precision::kBf16 ? 16 : precision == Precision::kFp8 ? 8 : 4;
}

// Bytes of the weights in a stage. Fewer bits bring more k, whose activations lie beside them: half a chunk where those
// would leave no room for a third stage, or on sm_120 for a second.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int chunk_bytes(int bits, int token_tiles) {
  return bits == 4 || (bits == 8 && token_tiles == 8) ? kChunkBytes / 2 : kChunkBytes;
}

// Bytes of `blocks` K blocks of 64 rows in their tiles: in INT4 the group's scales (16 bits) follow its values.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::int64_t k_block_bytes(int bits, std::int64_t blocks) {
  const std::int64_t groups = bits == 4 ? (blocks + kGroupBlocks - 1) / kGroupBlocks : 0;
  return blocks * kBlockRows * kKBlock * bits / 8 + groups * kBlockRows * 2;
}

// Bytes of a stage's weights with their scales.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int stage_bytes(int bits, int token_tiles) {
  const int chunk = chunk_bytes(bits, token_tiles);
  return static_cast<int>(k_block_bytes(bits, chunk * 8 / bits / kBlockRows / kKBlock));
}

// How the parts of a tile that several blocks computed are summed; both in a fixed order.
enum class Reduction : std::uint8_t {
  kOwner,        // the block with the tile's head waits for the others: needs the whole grid resident
  kLastArriver,  // whoever is last sums up: never waits, a little slower
};

// What the kernels need to know of a device and of how it is shared.
struct DeviceLimits {
  int num_sms = 0;
  int shared_per_sm = 0;       // bytes
  int shared_per_block = 0;    // bytes, opt-in
  int compute_capability = 0;  // 90 for sm_90
};

// Every matrix runs as two blocks per SM, each in half of it: the next kernel's blocks come one by one into the halves
// that the last one's leave, so each SM always works for both and prefetches for the next, and no SM gets more than its
// share. Beside two blocks there is room for a small kernel (head_merge, select).
inline constexpr int kBlocksPerSm = 2;
inline constexpr int kReservedPerBlock = 1024;  // bytes that a resident block costs besides its own
inline constexpr int kSmallKernelBytes = 4096;  // and at most 4096 registers

[[nodiscard]] constexpr int slot_bytes(const DeviceLimits& device) {
  return (device.shared_per_sm - kSmallKernelBytes - kReservedPerBlock) / kBlocksPerSm - kReservedPerBlock;
}
[[nodiscard]] constexpr int slots_of(const DeviceLimits& device) {
  return kBlocksPerSm * device.num_sms;
}

// The dim of a head that row `row` of its rotary tiles holds (tiles.h).
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int rotary_dim_at(int row, int rotary_dim) {
  if (row >= rotary_dim) return row;
  const int dim = row / kStripRows * 8 + row % 8;
  return row % kStripRows < 8 ? dim : dim + rotary_dim / 2;
}

// Rows of W per tile: more rows read the activations less often, fewer spread a small matrix more evenly.
[[nodiscard]] constexpr int tile_rows_for(int token_tiles) {
  return token_tiles <= 2 ? 64 : 128;
}

// How units (chunks) are dealt to blocks: in order, `share` each and one more to the first `extra`. No division but for
// block_of, since the epilogue of every tile asks, and while it computes nobody multiplies.
struct Split {
  int share = 0;
  int extra = 0;

  [[nodiscard]] EAGLEX_HOST_DEVICE constexpr int first(int block) const {
    return block * share + (block < extra ? block : extra);
  }
  // The block that works on `unit`.
  [[nodiscard]] EAGLEX_HOST_DEVICE constexpr int block_of(int unit) const {
    const int in_larger = extra * (share + 1);
    return unit < in_larger ? unit / (share + 1) : extra + (unit - in_larger) / share;
  }
};

[[nodiscard]] constexpr Split split_of(int units, int grid) {
  return {units / grid, units % grid};
}

struct GemmProblem {
  int rows = 0;  // N
  int k = 0;     // of one segment
  int segments = 1;
  int tokens = 0;  // M
  bool normed = false;
  int weight_bits = 16;
  int row_info_bytes = 0;  // what the epilogue keeps per token
  int state_bytes = 0;     // what the epilogue keeps per block and tile of 8 tokens
  bool wgmma = false;      // products of more than 16 tokens are wgmma's (wgmma.cuh)
  int spare_slots = 0;     // left to blocks of the kernel before, where those hold them to its end
};

struct GemmConfig {
  int token_tiles = 0;  // n8 tiles: 1, 2, 4 or 8; 16 where one block has its SM for itself
  int tile_rows = 0;    // 64 or 128
  int chunk_k = 0;      // k values of a chunk
  int row_tiles = 0;
  int chunks_per_segment = 0;
  int grid = 0;
  Split split;  // of all chunks over the grid
  int stages = 0;
  int kept_chunks = 0;   // whose x a block keeps for its whole run (kept.cuh); 0: x comes with each chunk of weights
  int shared_bytes = 0;  // the whole slot, needed or not
  bool in_slot = false;  // fits its slot; if not, it still runs, one block per SM and nothing beside it
};

// Throws ErrorCode::kConfig where the problem cannot be streamed at all.
[[nodiscard]] GemmConfig configure(const GemmProblem& problem, const DeviceLimits& device);

// Tokens of one launch: more than 64 where bf16 weights meet wgmma. (Low-bit kernels for more are not compiled.)
[[nodiscard]] constexpr int most_tokens(bool wgmma, int weight_bits) {
  return wgmma && weight_bits == 16 ? kMaxWideTokens : kMaxTokens;
}

// Whether `configure` would accept it: K in multiples of 64, tokens in 1..most_tokens().
[[nodiscard]] bool streamable(const GemmProblem& problem);

// Whether all blocks of a shared tile sum up a slice of it (scatter.cuh) rather than its owner all. Measured on an H200:
// worth the common wait from 7 blocks a tile on where tokens are more than 32, and always where they are more than 64.
[[nodiscard]] bool sums_in_slices(const GemmProblem& problem, const GemmConfig& config);

// What the head's tiles offer of a row where the best are scored again: of each group of ids as many (core/rescore.h).
struct HeadOffers {
  int count = 0;
  int stride = 0;  // between rows: pairs are read together
};

[[nodiscard]] constexpr HeadOffers head_offers(int vocab, int topk) {
  const int count = (vocab + kRescoreGroup - 1) / kRescoreGroup * group_offers(topk);
  return {count, (count + 1) / 2 * 2};
}

// Bytes of the partial sums that the blocks of one launch exchange.
[[nodiscard]] std::size_t partial_bytes(const GemmConfig& config, int segments);

// What a block that keeps x knows of 64 of its values (kept.cuh), for each of their two digits.
inline constexpr int kKeptScaleBytes = 32;

// Words that the blocks of a launch of one token exchange: of each block's first tile, rows g and g + 8 in one.
inline constexpr int kTileWords = kBlockRows / 2;
[[nodiscard]] constexpr std::size_t word_count(const DeviceLimits& device) {
  return static_cast<std::size_t>(slots_of(device)) * kTileWords;
}

// ---- shared between host and kernel

// Offsets into dynamic shared memory.
struct SharedLayout {
  int x = 0;  // [stages][chunk_k / 32][tokens][32] 16-bit, or [stages][chunk_k / 64][8·token_tiles][64], swizzled, for
              // wgmma; with kept_chunks in the place of stages where x is kept, and its sums behind it
  int x_sums = 0;     // x kept, INT4: [kept_chunks][chunk_k / 64][2] of KeptScale
  int x_squares = 0;  // x kept, with norms: [segments][chunks of one] of float
  int gamma = 0;      // [stages][chunk_k] 16-bit, only with norms
  int exchange = 0;   // between the warps: halves of K, tiles of logits
  int norms = 0;      // num_squares() sums of squares, then [segments][tokens] 1 / rms
  int sources = 0;    // [segments][tokens] pointers to rows of x
  int row_info = 0;   // [tokens] of the epilogue's own type
  int state = 0;      // the epilogue's own
  int barriers = 0;   // landed, full and empty per stage, then row_info and the block's flag
  int total = 0;
};

[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int align_up(int value, int to) {
  return (value + to - 1) / to * to;
}

// Whether warps work on several strips at once (paired.cuh).
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr bool is_paired(int bits, int token_tiles) {
  return bits < 16 && token_tiles <= (bits == 8 ? 2 : 1);
}

[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int exchange_bytes(int bits, int token_tiles) {
  // R = 64: four warps hand over their half of K, or in pairs of strips all eight one of their strips. Either R: one n8
  // tile of logits, rows padded by 4 against bank conflicts.
  const int rows = token_tiles <= 2 ? 64 : 128;
  const int halves = rows == 64 ? (is_paired(bits, token_tiles) ? 8 : 4) * 512 * token_tiles : 0;
  const int logits = 8 * (rows + 4) * 4;
  return halves > logits ? halves : logits;
}

[[nodiscard]] EAGLEX_HOST_DEVICE constexpr SharedLayout shared_layout(const GemmProblem& p, int token_tiles,
                                                                      int chunk_k, int stages, int kept_chunks = 0) {
  const int tokens = 8 * token_tiles;
  SharedLayout at;
  const bool wide = p.wgmma && token_tiles >= 4;
  constexpr int kSwizzled = 1024;  // bytes of eight rows, where the swizzle begins anew
  at.x = align_up(stages * stage_bytes(p.weight_bits, token_tiles), wide ? kSwizzled : 16);
  at.x_sums = at.x + (kept_chunks > 0 ? kept_chunks : stages) * chunk_k * (wide ? tokens : p.tokens) * 2;
  at.x_squares = at.x_sums + (p.weight_bits == 4 ? kept_chunks * (chunk_k / kKMultiple) * kKeptScaleBytes : 0);
  const int chunks = p.segments * ((p.k + chunk_k - 1) / chunk_k);
  at.gamma = at.x_squares + align_up(p.normed && kept_chunks > 0 ? chunks * 4 : 0, 16);
  at.exchange = at.gamma + (p.normed && kept_chunks == 0 ? stages * chunk_k * 2 : 0);
  at.norms = at.exchange + align_up(exchange_bytes(p.weight_bits, token_tiles), 16);
  at.sources = at.norms + (p.normed ? (num_squares(tokens) + p.segments * tokens) * 4 : 0);
  at.row_info = at.sources + p.segments * tokens * 8;
  at.state = at.row_info + align_up(p.row_info_bytes * tokens, 16);
  at.barriers = at.state + align_up(p.state_bytes * token_tiles, 16);
  at.total = at.barriers + 8 * (3 * stages + 2);
  return at;
}

}  // namespace eaglex::stream
