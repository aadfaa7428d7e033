// How a lane gets its operands of m16n8k16 out of the weights in shared memory: the one thing that differs between
// precisions.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/stream/ptx.cuh"
#include "cuda/stream/words.h"

namespace eaglex::stream {

// A precision gives: kBits; kSpan, the K blocks of one `load`; `offset`, of a K block from the first of its chunk; and
// `load`, from there and the strip to the A operands of the two m16n8k16 of each block. Then what scales there are:
// kRowScales for the epilogue, kGroupScales behind each group's values. kLift: the operands are 2^-120 of the weights.
struct Bf16Weights {
  static constexpr bool kKeepsX = false;
  static constexpr int kBits = 16;
  static constexpr int kSpan = 1;
  static constexpr bool kRowScales = false;
  static constexpr bool kGroupScales = false;
  static constexpr bool kLift = false;

  __device__ static __forceinline__ constexpr int offset(int k_block) { return k_block * 4096; }

  __device__ static __forceinline__ void load(const std::byte* at, int strip, int lane, std::uint32_t (&a)[1][2][4]) {
    const std::byte* const piece = at + strip * 1024;
    const int unit = bf16_unit(lane, 0);
    const uint4 first = *reinterpret_cast<const uint4*>(piece + unit * 16);
    const uint4 second = *reinterpret_cast<const uint4*>(piece + 512 + (unit ^ 2) * 16);
    a[0][0][0] = first.x, a[0][0][1] = first.y, a[0][0][2] = first.z, a[0][0][3] = first.w;
    a[0][1][0] = second.x, a[0][1][1] = second.y, a[0][1][2] = second.z, a[0][1][3] = second.w;
  }
};

// Operands that are 2^-120 of the weights (words.h).
struct Fp8Weights {
  static constexpr bool kKeepsX = false;
  static constexpr int kBits = 8;
  static constexpr int kSpan = 1;
  static constexpr bool kRowScales = true;
  static constexpr bool kGroupScales = false;
  static constexpr bool kLift = true;

  __device__ static __forceinline__ constexpr int offset(int k_block) { return k_block * 2048; }

  __device__ static __forceinline__ void load(const std::byte* at, int strip, int lane, std::uint32_t (&a)[1][2][4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(at + strip * 512 + low_bit_unit(lane) * 16);
    spread(words.x, a[0][0][0], a[0][0][1]);
    spread(words.y, a[0][0][2], a[0][0][3]);
    spread(words.z, a[0][1][0], a[0][1][1]);
    spread(words.w, a[0][1][2], a[0][1][3]);
  }

  // Two K blocks, from the lane's words of the strip in the first on.
  __device__ static __forceinline__ void load_two(const std::byte* at, std::uint32_t (&a)[2][2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 words = *reinterpret_cast<const uint4*>(at + offset(i));
      spread(words.x, a[i][0][0], a[i][0][1]);
      spread(words.y, a[i][0][2], a[i][0][3]);
      spread(words.z, a[i][1][0], a[i][1][1]);
      spread(words.w, a[i][1][2], a[i][1][3]);
    }
  }

  __device__ static __forceinline__ void spread(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) {
    first = fp8_first(word);
    second = fp8_second(word);
  }
};

// A lane's weights of two K blocks lie together.
struct Int4Weights {
  static constexpr bool kKeepsX = false;
  static constexpr int kBits = 4;
  static constexpr int kSpan = 2;
  static constexpr bool kRowScales = false;
  static constexpr bool kGroupScales = true;
  static constexpr bool kLift = false;
  static constexpr int kGroupValues = kGroupBlocks * kBlockRows * kKBlock / 2;
  static constexpr int kGroupBytes = kGroupValues + kBlockRows * 2;

  __device__ static __forceinline__ constexpr int offset(int k_block) {
    return k_block / kGroupBlocks * kGroupBytes + k_block % kGroupBlocks / kSpan * 2048;
  }

  __device__ static __forceinline__ void load(const std::byte* at, int strip, int lane, std::uint32_t (&a)[2][2][4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(at + strip * 512 + low_bit_unit(lane) * 16);
    spread(words.x, a, 0, 0);
    spread(words.y, a, 0, 2);
    spread(words.z, a, 1, 0);
    spread(words.w, a, 1, 2);
  }

  // The same for a lane whose words begin at `at`, but joint (words.h): 2^-133 of the number plus 8 in rows g, in rows
  // g + 8 as much of row g and 2^-129 of their own.
  __device__ static __forceinline__ void load_two(const std::byte* at, std::uint32_t (&a)[2][2][4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(at);
    join(words.x, a, 0, 0);
    join(words.y, a, 0, 2);
    join(words.z, a, 1, 0);
    join(words.w, a, 1, 2);
  }
  // A word's pairs go into operand `half` of both K blocks, registers `at` and at + 1.
  __device__ static __forceinline__ void join(std::uint32_t word, std::uint32_t (&a)[2][2][4], int half, int at) {
    const std::uint32_t both[2] = {int4_joint(word, 0), __byte_perm(word, 0, 0x4341)};  // int4_joint(word, 1)
#pragma unroll
    for (int i = 0; i < 2; ++i) a[i][half][at] = both[i] & 0x000F000FU, a[i][half][at + 1] = both[i];
  }

  // Of a group that begins at `at` and is `blocks` long: the scales of rows g and g + 8 of the strip.
  __device__ static __forceinline__ float2 scales(const std::byte* at, int blocks, int strip, int lane) {
    const std::uint32_t pair = scale_pair(at, blocks, strip, lane);
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U));
  }

  __device__ static __forceinline__ std::uint32_t scale_pair(const std::byte* at, int blocks, int strip, int lane) {
    const std::byte* const from = at + blocks * (kGroupValues / kGroupBlocks) + strip * 32 + lane / 4 * 4;
    return *reinterpret_cast<const std::uint32_t*>(from);
  }

  // int4_lifted in one instruction; of two constants the compiler would make two.
  __device__ static __forceinline__ std::uint32_t lifted(std::uint32_t word) {
    std::uint32_t pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word), "r"(0x000F000FU), "r"(0x43004300U));
    return pair;
  }

  __device__ static __forceinline__ void spread(std::uint32_t word, std::uint32_t (&a)[2][2][4], int half, int at) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i / 2][half][at + i % 2] = pack(__hsub2(unpack(lifted(word >> (4 * i))), unpack(kInt4Lift)));
  }
};

// The same weights in blocks that keep x for their whole run (kept.cuh).
template <class Weights>
struct BesideKeptX : Weights {
  static constexpr bool kKeepsX = true;
};

}  // namespace eaglex::stream
