// row-major weights -> tiles. Caller: FastChain::make, once per matrix at load. Bytes: the matrix in, the matrix out.
// Mapping: one warp per 512 or 1024 bytes of tiles; a lane reads what it will multiply, of two rows, and writes 16 or 32.
#include <algorithm>

#include "cuda/packed.cuh"
#include "cuda/stream/check.h"
#include "cuda/stream/ptx.cuh"
#include "cuda/stream/tiles.h"
#include "cuda/stream/words.h"

namespace eaglex::stream {
namespace {

using cuda::WeightSource;

struct RetileArgs {
  WeightSource part[3];
  std::int64_t begin[4];  // first row of each part in the concatenation, then the end
  int num_parts;
  TileOrder order;
  std::int64_t k;
  std::int64_t blocks;  // of 64 rows
  std::byte* tiles;
  float* row_scales;
};

// Where row `n` of the tiles comes from; part -1 where it is padding.
struct Origin {
  int part;
  std::int64_t row;
};

__device__ Origin origin_of(const RetileArgs& args, std::int64_t n) {
  const std::int64_t rows = args.begin[args.num_parts];
  if (n >= rows) return {-1, 0};
  if (args.order.rows == RowOrder::kPaired) return {n % kStripRows < 8 ? 0 : 1, n / kStripRows * 8 + n % 8};
  if (args.order.rows == RowOrder::kRotary) {
    const int row = static_cast<int>(n % args.order.head_dim);
    n += rotary_dim_at(row, args.order.rotary_dim) - row;
  }
  int part = 0;
  while (n >= args.begin[part + 1]) ++part;
  return {part, n - args.begin[part]};
}

// Eight neighbours in k as they lie in memory: `bytes` of them.
template <class Words>
__device__ Words stored(const RetileArgs& args, const Origin& at, std::int64_t k, Words padding) {
  if (at.part < 0) return padding;
  const WeightSource& from = args.part[at.part];
  const auto offset = static_cast<std::size_t>(at.row * from.in + k) * sizeof(Words) / 8;
  return *reinterpret_cast<const Words*>(static_cast<const std::byte*>(from.values) + offset);
}

__device__ uint4 rounded_to_bf16(const RetileArgs& args, const Origin& at, std::int64_t k) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  if (at.part < 0 || args.part[at.part].scales == nullptr) return stored(args, at, k, zero);
  std::uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    const float low = cuda::weight_at(args.part[at.part], at.row, k + 2 * i);
    const float high = cuda::weight_at(args.part[at.part], at.row, k + 2 * i + 1);
    words[i] = pack(low, high);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's unit: 16 rows of one block of 64, and a piece of k.
struct Unit {
  std::int64_t block;
  std::int64_t piece;
  int strip;
  __device__ Unit(std::int64_t unit, std::int64_t pieces)
      : block(unit / 4 / pieces), piece(unit / 4 % pieces), strip(static_cast<int>(unit % 4)) {}
  [[nodiscard]] __device__ std::int64_t row(int g) const { return block * kBlockRows + strip * kStripRows + g; }
};

template <class F>
__device__ void for_each_unit(const RetileArgs& args, std::int64_t pieces, F&& f) {
  const std::int64_t units = args.blocks * pieces * 4;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / 32;
  for (std::int64_t unit = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; unit < units;
       unit += warps)
    f(Unit(unit, pieces), unit);
}

// The order of k inside a piece is free as long as the activations follow it: lane q takes k 8q..8q+7 of both operands.
__global__ void retile_bf16_kernel(const __grid_constant__ RetileArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for_each_unit(args, args.k / kKBlock, [&](const Unit& unit, std::int64_t index) {
    const std::int64_t k = unit.piece * kKBlock + lane % 4 * 8;
    const uint4 a = rounded_to_bf16(args, origin_of(args, unit.row(lane / 4)), k);
    const uint4 b = rounded_to_bf16(args, origin_of(args, unit.row(lane / 4 + 8)), k);
    auto* const to = reinterpret_cast<uint4*>(args.tiles) + index * 64;
    to[bf16_unit(lane, 0)] = make_uint4(a.x, b.x, a.y, b.y);
    to[32 + bf16_unit(lane, 1)] = make_uint4(a.z, b.z, a.w, b.w);
  });
}

__device__ std::uint32_t byte_of(const uint2& bytes, int i) {
  return (i < 4 ? bytes.x : bytes.y) >> (i % 4 * 8) & 0xFFU;
}

__device__ bool has_nan(const uint2& bytes) {
  bool found = false;
  for (int i = 0; i < 8; ++i) found = found || (byte_of(bytes, i) & 0x7FU) == 0x7FU;
  return found;
}

__global__ void row_scales_kernel(const __grid_constant__ RetileArgs args) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.blocks * kBlockRows) return;
  const Origin at = origin_of(args, row);
  args.row_scales[row] = at.part < 0 ? 0.0F : static_cast<const float*>(args.part[at.part].scales)[at.row];
}

// After row_scales_kernel: moved bits know no NaN, so one becomes that of its row.
__global__ void retile_fp8_kernel(const __grid_constant__ RetileArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for_each_unit(args, args.k / kKBlock, [&](const Unit& unit, std::int64_t index) {
    const std::int64_t k = unit.piece * kKBlock + lane % 4 * 8;
    const std::int64_t row = unit.row(lane / 4);
    const uint2 a = stored(args, origin_of(args, row), k, make_uint2(0, 0));
    const uint2 b = stored(args, origin_of(args, row + 8), k, make_uint2(0, 0));
    std::uint32_t words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = fp8_word({byte_of(a, 2 * i), byte_of(a, 2 * i + 1)}, {byte_of(b, 2 * i), byte_of(b, 2 * i + 1)});
    }
    reinterpret_cast<uint4*>(args.tiles)[index * 32 + low_bit_unit(lane)] =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (has_nan(a)) args.row_scales[row] = NAN;
    if (has_nan(b)) args.row_scales[row + 8] = NAN;
  });
}

__device__ std::uint32_t scale_bits(const RetileArgs& args, const Origin& at, std::int64_t group) {
  if (at.part < 0) return 0;
  const WeightSource& from = args.part[at.part];
  return static_cast<const std::uint16_t*>(from.scales)[at.row * from.groups + group];
}

__global__ void retile_int4_kernel(const __grid_constant__ RetileArgs args) {
  constexpr std::uint32_t kZeros = 0x88888888U;
  constexpr int kUnitBytes = 512;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t k_blocks = args.k / kKBlock;
  for_each_unit(args, k_blocks / 2, [&](const Unit& unit, std::int64_t) {
    const std::int64_t k_block = unit.piece * 2;
    const std::int64_t group = k_block / kGroupBlocks;
    const std::int64_t row = unit.row(lane / 4);
    const Origin low = origin_of(args, row);
    const Origin high = origin_of(args, row + 8);
    std::uint32_t words[4];
    Int4Rows rows[2];
    for (int i = 0; i < 2; ++i) {
      const std::int64_t k = (k_block + i) * kKBlock + lane % 4 * 8;
      rows[i] = {stored(args, low, k, kZeros), stored(args, high, k, kZeros)};
    }
    for (int i = 0; i < 4; ++i) words[i] = int4_word(rows[0], rows[1], i);
    std::byte* const of_group =
        args.tiles + unit.block * k_block_bytes(4, k_blocks) + k_block_bytes(4, group * kGroupBlocks);
    std::byte* const values = of_group + k_block % kGroupBlocks / 2 * 4 * kUnitBytes + unit.strip * kUnitBytes;
    *reinterpret_cast<uint4*>(values + low_bit_unit(lane) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    if (k_block % kGroupBlocks != 0 || lane % 4 != 0) return;
    const std::int64_t blocks = k_blocks - k_block < kGroupBlocks ? k_blocks - k_block : kGroupBlocks;
    std::byte* const scales = of_group + blocks / 2 * 4 * kUnitBytes + unit.strip * 32 + lane;
    *reinterpret_cast<std::uint32_t*>(scales) = scale_bits(args, low, group) | scale_bits(args, high, group) << 16;
  });
}

void check_parts(std::span<const Matrix> parts, const TileOrder& order, Precision precision, std::int64_t k) {
  for (const Matrix& part : parts) {
    expect(part.rank == 2 && part.contiguous() && part.shape[1] == k && (part.packed() || part.dtype == DType::kBF16),
           ErrorCode::kShape, "weight", concat("contiguous [n, ", k, "] of bf16, or packed"), describe(part));
    expect(reinterpret_cast<std::uintptr_t>(part.data) % 16 == 0, ErrorCode::kShape, "weight", "16-byte alignment",
           part.data);
  }
  expect(k % kKMultiple == 0, ErrorCode::kShape, "weight", concat("columns in multiples of ", kKMultiple), k);
  expect(precision == Precision::kBf16 || precision_of(parts, 1) == precision, ErrorCode::kShape, "weight",
         concat("parts of ", bits_of(precision), " bits"), describe(parts[0]));
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
}

}  // namespace

Precision precision_of(std::span<const Matrix> parts, int segments) {
  const auto all = [&](const auto& test) { return std::all_of(parts.begin(), parts.end(), test); };
  if (all([](const Matrix& part) { return part.dtype == DType::kF8 && part.scales.shape[1] == 1; }))
    return Precision::kFp8;
  const bool whole_groups = segments == 1 || parts[0].shape[1] / segments % kScaleGroup == 0;
  if (whole_groups &&
      all([](const Matrix& part) { return part.dtype == DType::kI4 && part.scales.dtype == DType::kBF16; }))
    return Precision::kInt4;
  return Precision::kBf16;
}

Tiles retile(std::span<const Matrix> parts, const TileOrder& order, Precision precision, void* memory,
             cudaStream_t stream) {
  constexpr unsigned kBlocks = 1024;
  constexpr unsigned kThreads = 256;
  expect_range("parts", static_cast<long long>(parts.size()), 1, 3);
  RetileArgs args{};
  args.num_parts = static_cast<int>(parts.size());
  args.order = order;
  args.k = parts[0].shape[1];
  check_parts(parts, order, precision, args.k);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    args.part[i] = cuda::source_of(parts[i]);
    args.begin[i + 1] = args.begin[i] + parts[i].shape[0];
  }
  args.blocks = (args.begin[args.num_parts] + kPaddedRows - 1) / kPaddedRows * (kPaddedRows / kBlockRows);
  args.tiles = static_cast<std::byte*>(memory);
  switch (precision) {
    case Precision::kBf16:
      retile_bf16_kernel<<<kBlocks, kThreads, 0, stream>>>(args);
      break;
    case Precision::kFp8: {
      args.row_scales = reinterpret_cast<float*>(args.tiles + args.blocks * k_block_bytes(8, args.k / kKBlock));
      const auto rows = static_cast<unsigned>(args.blocks * kBlockRows);
      row_scales_kernel<<<(rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(args);
      retile_fp8_kernel<<<kBlocks, kThreads, 0, stream>>>(args);
      break;
    }
    case Precision::kInt4:
      retile_int4_kernel<<<kBlocks, kThreads, 0, stream>>>(args);
      break;
  }
  check(cudaGetLastError(), "retile");
  return {args.tiles, args.row_scales, precision};
}

}  // namespace eaglex::stream
