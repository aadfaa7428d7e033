// How low-bit weights lie in the words of tiles, and how they become pairs of bf16: a few instructions each, because a
// lane does it for every weight that it reads. Plain arithmetic, so that a test on any machine can check it.
#pragma once

#include <cstdint>

#include "cuda/stream/config.h"

namespace eaglex::stream {

// bf16: where in half `half` of a piece, in units of 16 bytes, lie the weights that lane (g, q) multiplies with
// m16n8k16: those of rows g and g + 8 and k 8q + 4·half + {0, 1, 2, 3}. In this order both reads are without bank
// conflicts: a lane's own 16 bytes, and for wgmma 8 bytes of each q (wgmma.cuh).
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int bf16_unit(int lane, int half) {
  return lane ^ (lane >> 3 & 1) ^ half << 1;
}

// FP8 and INT4: the same for 512 bytes, of which lane (g, q) has a unit of 16 for mma.sync. For wgmma it needs a word of
// each unit of its row: ldmatrix hands out eight units at a time, of rows g = 0..7 and one q, which in this order lie in
// different banks (wgmma_bits.cuh).
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr int low_bit_unit(int lane) {
  return lane ^ (lane >> 3 & 3);
}

// FP8: a pair of e4m3 becomes a pair of bf16 by moving bits, of each byte the sign to bit 15 and the rest to bits 10..4
// of its half. That is 2^-120 of the number, exact, subnormal numbers included. Two pairs share a word: the first lies
// where it is needed, in 0x87F087F0; the second in the bits between, so that two shifts bring it there.
struct Bytes {
  std::uint32_t low, high;  // as they will stand in the halves of a pair
};

[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t fp8_word(Bytes first, Bytes second) {
  std::uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t a = half == 0 ? first.low : first.high;
    const std::uint32_t b = half == 0 ? second.low : second.high;
    const std::uint32_t own = (a & 0x80U) << 8 | (a & 0x7FU) << 4 | (b & 0x80U) << 4 | (b >> 4 & 7U) | (b & 8U);
    const std::uint32_t others = (b & 7U) << 12;
    word |= own << (16 * half) | others << (16 - 16 * half);
  }
  return word;
}
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t fp8_first(std::uint32_t word) {
  return word & 0x87F087F0U;
}
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t fp8_second(std::uint32_t word) {
  return ((word << 8 | word >> 24) & 0x07700770U) | (word << 4 & 0x80808080U);
}

// INT4: four pairs share a word, pair i in bits 4i..4i+3 of both halves. Below 0x4300, which is 128 in bf16, a number
// plus 8 is 136 more than the number itself.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t int4_lifted(std::uint32_t word, int pair) {
  return (word >> (4 * pair) & 0x000F000FU) | 0x43004300U;
}
inline constexpr std::uint32_t kInt4Lift = 0x43084308U;  // a pair of 136

// Bare, in two and a half instructions per four: a number plus 8 in the lowest bits of a half is that many times 2^-133 in
// bf16, subnormal, and 2^-129 four bits further up, where the eighth bit is the exponent's lowest: from there on numbers
// are normal, but as far apart as the subnormal ones. So pairs 1 and 3 (rows g + 8) are 16 times as large as 0 and 2.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t int4_bare(std::uint32_t word, int pair) {
  return (pair < 2 ? word : word >> 8) & (pair % 2 == 0 ? 0x000F000FU : 0x00F000F0U);
}

// The same in two instructions per pair of rows: row g + 8 keeps row g's number below its own, which its sum loses again
// by subtraction of row g's. Block 0 has pairs 0 and 1, block 1 pairs 2 and 3.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t int4_joint(std::uint32_t word, int block) {
  return (block == 0 ? word : word >> 8) & 0x00FF00FFU;
}
inline constexpr std::uint32_t kInt4BareOffset = 0x80088008U;   // a pair of -8, of rows g
inline constexpr std::uint32_t kInt4JointOffset = 0x80888088U;  // of rows g + 8 with rows g

// Eight neighbours in k each, the first in the lowest bits: of rows g and g + 8.
struct Int4Rows {
  std::uint32_t low, high;
};

// Word `at` of a unit: pairs 0 and 1 are the numbers 2·at and 2·at + 1 of rows g and g + 8 in the first K block, pairs
// 2 and 3 those in the second.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t int4_word(Int4Rows first, Int4Rows second, int at) {
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const Int4Rows& rows = i < 2 ? first : second;
    const std::uint32_t row = i % 2 == 0 ? rows.low : rows.high;
    word |= (row >> (8 * at) & 15U) << (4 * i) | (row >> (8 * at + 4) & 15U) << (4 * i + 16);
  }
  return word;
}

// For products of whole numbers: each byte of a word has numbers plus 8 of rows g and g + 8 for one k. Rows g + 8 are
// multiplied as they stand, with rows g in them, which they lose by subtraction and so are sixteenfold.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t int4_low(std::uint32_t word) {
  return word & 0x0F0F0F0FU;
}

// x beside them: whole numbers of two digits of -128..127 each, at most 127 · 257 = 32,639. Their unit is a power of two that
// follows from the largest absolute value of those that share it, given as the bits of a bf16: the exponent of the next
// larger one, since 1.9921875 · 2^14 would be one too many.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t kept_exponent(std::uint32_t peak) {
  const std::uint32_t exponent = (peak + 1) >> 7;
  return exponent < 40 ? 40 : exponent;  // far below any x that matters, and all that follows is finite
}
// The bits of the float by which x is multiplied: a power of two.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t kept_multiplier_bits(std::uint32_t peak) {
  return (268 - kept_exponent(peak)) << 23;
}
// A pair of bf16: what one of digit 0 or 1 stands for. Where x is not finite, NaN.
[[nodiscard]] EAGLEX_HOST_DEVICE constexpr std::uint32_t kept_factor(std::uint32_t peak, int digit) {
  const std::uint32_t exponent = kept_exponent(peak);
  return exponent >= 255 ? 0x7FFF7FFFU : (exponent - 14 + 8 * static_cast<std::uint32_t>(digit)) * 0x00800080U;
}
// Added to x in those units: the two lowest bytes of the float are the digits plus 128.
inline constexpr float kKeptBias = 0x1.8p23F + 0x8080;

}  // namespace eaglex::stream
