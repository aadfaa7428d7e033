// The order of weights in memory: blocks of 64 rows, each [K / 32][4 strips of 16 rows][piece]. A piece is 16 rows x 32
// k in the order in which a warp's lanes hold the A operands of two m16n8k16, so that a lane reads 16 bytes at 16 ·
// lane. A chunk of 16 KB is contiguous for tiles of 64 rows and two halves of 8 KB for tiles of 128. Low-bit pieces are
// smaller and else alike.
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

// Bytes of the tiles of [rows, k] in a type of `bits`; rows padded to 128.
[[nodiscard]] constexpr std::size_t tile_bytes(std::int64_t rows, std::int64_t k, int bits) {
  return static_cast<std::size_t>((rows + kPaddedRows - 1) / kPaddedRows * kPaddedRows) * static_cast<std::size_t>(k) *
         bits / 8;
}

// Reorders row-major 16-bit matrices [n_i, K] that are read together into `tiles`. Runs on `stream`; the originals may
// be freed once it has. Throws kShape or kConfig where the parts do not fit the order.
void retile(std::span<const Matrix> parts, const TileOrder& order, void* tiles, cudaStream_t stream);

}  // namespace eaglex::stream
