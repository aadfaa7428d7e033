// How a lane gets its operands of two m16n8k16 out of a piece of weights: the one thing that differs between
// precisions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eaglex::stream {

// A precision gives: kBits, kPieceBytes (16 rows x 32 k), and `load`, from a piece in shared memory to the A operands
// of the two m16n8k16 that cover its 32 k. Scales per row belong to the epilogue.
struct Bf16Weights {
  static constexpr int kBits = 16;
  static constexpr int kPieceBytes = 1024;

  __device__ static __forceinline__ void load(const std::byte* piece, int lane, std::uint32_t (&a)[2][4]) {
    const uint4 first = *reinterpret_cast<const uint4*>(piece + lane * 16);
    const uint4 second = *reinterpret_cast<const uint4*>(piece + 512 + lane * 16);
    a[0][0] = first.x, a[0][1] = first.y, a[0][2] = first.z, a[0][3] = first.w;
    a[1][0] = second.x, a[1][1] = second.y, a[1][2] = second.z, a[1][3] = second.w;
  }
};

}  // namespace eaglex::stream
