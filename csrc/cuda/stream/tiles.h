// The order of weights in memory: blocks of 64 rows, each [K / 32][4 strips of 16 rows][piece]. A piece is 16 rows x 32
// k in the order in which a warp's lanes hold the A operands of two m16n8k16, so that a lane reads 16 bytes at 16 times
// its unit (words.h). A chunk of 16 KB is contiguous for tiles of 64 rows and two halves of 8 KB for tiles of 128.
// FP8's pieces have half the bytes; their scales, one per row, lie behind the tiles. INT4's have a quarter, so two of
// neighbours in k share the 512 bytes of a warp's read, and behind four follow the scales of their 64 rows, in bf16,
// pairs of rows g and g + 8.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/weights.h"
#include "cuda/stream/config.h"

namespace eaglex::stream {

// Which row of the concatenated parts stands where. The last two put what an epilogue needs together into one thread:
// rows g and g + 8 of a strip.
enum class RowOrder : std::uint8_t {
  kNatural,
  kPaired,  // two parts: in each strip 8 rows of the first, then the same 8 of the second (gate, up)
  kRotary,  // in each strip of a head 8 dims of the first rotary half, then their partners; the rest as it was
};

struct TileOrder {
  RowOrder rows = RowOrder::kNatural;
  int head_dim = 0;    // kRotary; a multiple of 16
  int rotary_dim = 0;  // kRotary; a multiple of 16
};

// What `retile` made of a matrix; Linear::prepared points to it.
struct Tiles {
  const std::byte* data = nullptr;
  const float* row_scales = nullptr;  // kFp8: [rows padded to 128], in the tiles' order
  Precision precision = Precision::kBf16;
};

// How parts that are read together are stored: in the bits that they have where there is one kind of tiles for all of
// them, else in bf16. FP8 needs one scale per row; INT4 scales in bf16, and segments of whole groups.
[[nodiscard]] Precision precision_of(std::span<const Matrix> parts, int segments);

// Bytes of the tiles of [rows, k], with their scales; rows padded to 128.
[[nodiscard]] constexpr std::size_t tile_bytes(std::int64_t rows, std::int64_t k, Precision precision) {
  const std::int64_t padded = (rows + kPaddedRows - 1) / kPaddedRows * kPaddedRows;
  const std::int64_t weights = padded / kBlockRows * k_block_bytes(bits_of(precision), k / kKBlock);
  return static_cast<std::size_t>(weights + (precision == Precision::kFp8 ? padded * 4 : 0));
}

// Reorders row-major matrices [n_i, K], bf16 or packed, that are read together into `memory`, of tile_bytes(). Packed
// parts keep their numbers bit for bit; with kBf16 they are rounded to bf16. Runs on `stream`; the originals may be
// freed once it has. Throws kShape or kConfig where the parts do not fit the order or the precision.
[[nodiscard]] Tiles retile(std::span<const Matrix> parts, const TileOrder& order, Precision precision, void* memory,
                           cudaStream_t stream);

}  // namespace eaglex::stream
