// row-major weights -> tiles. Caller: Backend::prepare, once per matrix at load. Bytes: the matrix in, the matrix out.
// Mapping: one warp per piece; a lane reads 16 bytes of two rows and writes two of the warp's 512-byte halves.
#include "core/error.h"
#include "cuda/stream/check.h"
#include "cuda/stream/tiles.h"

namespace eaglex::stream {
namespace {

struct RetileArgs {
  const std::uint16_t* part[3];
  std::int64_t begin[4];  // first row of each part in the concatenation, then the end
  int num_parts;
  TileOrder order;
  std::int64_t k;
  std::int64_t blocks;  // of 64 rows
  uint4* tiles;
};

// The source row of row `n` of the tiles, or null where it is padding.
__device__ const std::uint16_t* source_row(const RetileArgs& args, std::int64_t n) {
  const std::int64_t rows = args.begin[args.num_parts];
  if (n >= rows) return nullptr;
  if (args.order.rows == RowOrder::kPaired) {
    const std::int64_t feature = n / kStripRows * 8 + n % 8;
    return args.part[n % kStripRows < 8 ? 0 : 1] + feature * args.k;
  }
  if (args.order.rows == RowOrder::kRotary) {
    const int row = static_cast<int>(n % args.order.head_dim);
    n += rotary_dim_at(row, args.order.rotary_dim) - row;
  }
  int part = 0;
  while (n >= args.begin[part + 1]) ++part;
  return args.part[part] + (n - args.begin[part]) * args.k;
}

__global__ void retile_kernel(RetileArgs args) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const std::int64_t k_blocks = args.k / kKBlock;
  const std::int64_t pieces = args.blocks * k_blocks * 4;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / 32;
  for (std::int64_t piece = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; piece < pieces;
       piece += warps) {
    const std::int64_t strip = piece % 4;
    const std::int64_t k_block = piece / 4 % k_blocks;
    const std::int64_t row = piece / 4 / k_blocks * kBlockRows + strip * kStripRows + g;
    const std::int64_t at = k_block * kKBlock + q * 8;
    const std::uint16_t* const low = source_row(args, row);
    const std::uint16_t* const high = source_row(args, row + 8);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 a = low == nullptr ? zero : *reinterpret_cast<const uint4*>(low + at);
    const uint4 b = high == nullptr ? zero : *reinterpret_cast<const uint4*>(high + at);
    // The order of k inside a piece is free as long as the activations follow it: lane q takes k 8q..8q+7 of both
    // operands.
    args.tiles[piece * 64 + lane] = make_uint4(a.x, b.x, a.y, b.y);
    args.tiles[piece * 64 + 32 + lane] = make_uint4(a.z, b.z, a.w, b.w);
  }
}

}  // namespace

void retile(std::span<const Matrix> parts, const TileOrder& order, void* tiles, cudaStream_t stream) {
  expect_range("parts", static_cast<long long>(parts.size()), 1, 3);
  RetileArgs args{};
  args.num_parts = static_cast<int>(parts.size());
  args.order = order;
  args.k = parts[0].shape[1];
  args.tiles = static_cast<uint4*>(tiles);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const TensorView& part = parts[i];
    expect(part.rank == 2 && part.contiguous() && part.shape[1] == args.k && size_of(part.dtype) == 2,
           ErrorCode::kShape, "weight", concat("contiguous [n, ", args.k, "] of a 16-bit type"), describe(part));
    expect(reinterpret_cast<std::uintptr_t>(part.data) % 16 == 0, ErrorCode::kShape, "weight", "16-byte alignment",
           part.data);
    args.part[i] = part.as<const std::uint16_t>();
    args.begin[i + 1] = args.begin[i] + part.shape[0];
  }
  expect(args.k % kKMultiple == 0, ErrorCode::kShape, "weight", concat("columns in multiples of ", kKMultiple), args.k);
  if (order.rows == RowOrder::kPaired) {
    expect(parts.size() == 2 && parts[0].shape[0] == parts[1].shape[0] && parts[0].shape[0] % 8 == 0, ErrorCode::kShape,
           "weight", "two parts of the same number of rows, a multiple of 8", parts[0].shape[0]);
  }
  if (order.rows == RowOrder::kRotary) {
    expect(order.head_dim > 0 && order.head_dim % kStripRows == 0, ErrorCode::kConfig, "head_dim", "a multiple of 16",
           order.head_dim);
    expect(order.rotary_dim % kStripRows == 0 && order.rotary_dim <= order.head_dim, ErrorCode::kConfig, "rotary_dim",
           "a multiple of 16, at most head_dim", order.rotary_dim);
  }
  args.blocks = (args.begin[args.num_parts] + kPaddedRows - 1) / kPaddedRows * (kPaddedRows / kBlockRows);
  retile_kernel<<<1024, 256, 0, stream>>>(args);
  check(cudaGetLastError(), "retile");
}

}  // namespace eaglex::stream
