// How low-bit weights lie in the words of tiles and what becomes of them, and of x beside them: plain arithmetic.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/stream/words.h"

using namespace eaglex;
using namespace eaglex::stream;

namespace {

void require(bool condition, const std::string& what) {
  CHECK_MESSAGE(condition, what);
}

// Lanes that read shared memory together: a quarter of a warp 16 bytes each, a half 8 bytes.
TEST_CASE("bf16_unit: each unit once, and no bank twice") {
  for (int half = 0; half < 2; ++half) {
    std::vector<int> units;
    for (int lane = 0; lane < 32; ++lane) {
      units.push_back(bf16_unit(lane, half));
      require(units.back() / 8 == lane / 8, "a quarter's 16-byte units are 128 bytes in a row");
    }
    std::sort(units.begin(), units.end());
    for (int i = 0; i < 32; ++i) require(units[static_cast<std::size_t>(i)] == i, "each unit once");
  }
  for (int octet = 0; octet < 4; ++octet) {
    for (int group = 0; group < 2; ++group) {
      std::vector<int> banks;
      for (int lane = 16 * group; lane < 16 * (group + 1); ++lane) {
        const int q = lane % 4;
        banks.push_back((bf16_unit(lane / 4 * 4 + octet, q / 2) * 16 + q % 2 * 8) % 128);
      }
      std::sort(banks.begin(), banks.end());
      for (int i = 0; i < 16; ++i) require(banks[static_cast<std::size_t>(i)] == 8 * i, "16 lanes, 16 pairs of banks");
    }
  }
}

// Bits of bf16 for 2^-120 of the number that `byte` is in e4m3; what fp8_first and fp8_second must give.
std::uint32_t scaled_bf16(std::uint32_t byte) {
  const std::uint32_t sign = byte >> 7;
  const std::uint32_t exponent = byte >> 3 & 15;
  const std::uint32_t mantissa = byte & 7;
  // exponent 0 is subnormal in both; else 2^(exponent - 7) · 2^-120 has bf16's exponent field at `exponent`.
  return sign << 15 | exponent << 7 | mantissa << 4;
}

TEST_CASE("low_bit_unit: each unit once, and no bank twice for either way of reading") {
  std::vector<int> units;
  for (int lane = 0; lane < 32; ++lane) {
    units.push_back(low_bit_unit(lane));
    require(units.back() / 8 == lane / 8, "a quarter's 16-byte units are 128 bytes in a row");
  }
  std::sort(units.begin(), units.end());
  for (int i = 0; i < 32; ++i) require(units[static_cast<std::size_t>(i)] == i, "each unit once");
  for (int q = 0; q < 4; ++q) {
    std::vector<int> places;
    for (int g = 0; g < 8; ++g) places.push_back(low_bit_unit(g * 4 + q) % 8);
    std::sort(places.begin(), places.end());
    for (int i = 0; i < 8; ++i) require(places[static_cast<std::size_t>(i)] == i, "eight rows of a matrix, all banks");
  }
}

// A strip's numbers in an operand's registers by wgmma_bits.cuh's way: ldmatrix over units, words, then pairs. m64n64k16's
// lane (g, q) needs, in register 2·(octet of two) + row half, the k 2q and 2q + 1 of its octet.
TEST_CASE("words: ldmatrix gives each lane of wgmma its own numbers of a panel") {
  const auto number = [](int row, int k) { return static_cast<std::uint32_t>(row * 37 + k * 11 + row * k); };
  // As tiles.cu writes them, in FP8: two K blocks of 16 rows, and in INT4, whose unit has both.
  std::vector<std::uint32_t> fp8(256);
  std::vector<std::uint32_t> int4(128);
  const auto byte_at = [&](int row, int k) { return number(row, k) & 0xFFU; };
  const auto nibble_at = [&](int row, int k) { return number(row, k) & 15U; };
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    Int4Rows rows[2] = {};
    for (int block = 0; block < 2; ++block) {
      const int k = block * kKBlock + lane % 4 * 8;
      for (int i = 0; i < 4; ++i) {
        fp8[static_cast<std::size_t>(block * 128 + low_bit_unit(lane) * 4 + i)] =
            fp8_word({byte_at(g, k + 2 * i), byte_at(g, k + 2 * i + 1)},
                     {byte_at(g + 8, k + 2 * i), byte_at(g + 8, k + 2 * i + 1)});
      }
      for (int i = 0; i < 8; ++i) {
        rows[block].low |= nibble_at(g, k + i) << (4 * i);
        rows[block].high |= nibble_at(g + 8, k + i) << (4 * i);
      }
    }
    for (int i = 0; i < 4; ++i)
      int4[static_cast<std::size_t>(low_bit_unit(lane) * 4 + i)] = int4_word(rows[0], rows[1], i);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    const int q = lane % 4;
    for (int octet = 0; octet < 4; ++octet) {
      const int giver = octet * 8 + g;  // the lane whose address is that of row g of matrix `octet`
      const int unit = low_bit_unit(giver % 8 * 4 + giver / 8);
      for (int block = 0; block < 2; ++block) {
        const int k = block * kKBlock + octet * 8 + 2 * q;
        const std::uint32_t word = fp8[static_cast<std::size_t>(block * 128 + unit * 4 + q)];
        require(fp8_first(word) == (scaled_bf16(byte_at(g, k)) | scaled_bf16(byte_at(g, k + 1)) << 16), "FP8, row g");
        require(fp8_second(word) == (scaled_bf16(byte_at(g + 8, k)) | scaled_bf16(byte_at(g + 8, k + 1)) << 16),
                "FP8, row g + 8");
        const std::uint32_t eight = int4[static_cast<std::size_t>(unit * 4 + q)];
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t expected = nibble_at(g + 8 * half, k) | nibble_at(g + 8 * half, k + 1) << 16;
          require((int4_lifted(eight, 2 * block + half) & 0x000F000FU) == expected, "INT4");
        }
      }
    }
  }
}

TEST_CASE("words: every FP8 byte comes out of every place of its word, bit for bit") {
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    for (const std::uint32_t other : {0x00U, 0xFFU, 0x5AU, 0xA5U, byte ^ 0xFFU}) {
      const std::uint32_t left = fp8_word({byte, other}, {other, byte});
      const std::uint32_t right = fp8_word({other, byte}, {byte, other});
      require(fp8_first(left) == (scaled_bf16(byte) | scaled_bf16(other) << 16), concat("first pair of ", byte));
      require(fp8_second(left) == (scaled_bf16(other) | scaled_bf16(byte) << 16), concat("second pair of ", byte));
      require(fp8_first(right) == (scaled_bf16(other) | scaled_bf16(byte) << 16), concat("first pair of ", byte));
      require(fp8_second(right) == (scaled_bf16(byte) | scaled_bf16(other) << 16), concat("second pair of ", byte));
    }
  }
}

TEST_CASE("words: INT4 pairs in the order of an operand, 136 above the number") {
  constexpr Int4Rows kFirst{0x76543210U, 0xFEDCBA98U};  // number i of the row is i, or 8 + i
  constexpr Int4Rows kSecond{~0x76543210U, ~0xFEDCBA98U};
  for (int at = 0; at < 4; ++at) {
    const std::uint32_t word = int4_word(kFirst, kSecond, at);
    for (int pair = 0; pair < 4; ++pair) {
      std::uint32_t expected = 0;  // 128 + number in bf16
      for (int i = 0; i < 2; ++i) {
        std::uint32_t number = static_cast<std::uint32_t>(2 * at + i) + (pair % 2 == 0 ? 0 : 8);
        if (pair >= 2) number = 15 - number;
        expected |= (0x4300U | number) << (16 * i);
      }
      require(int4_lifted(word, pair) == expected, concat("word ", at, ", pair ", pair));
    }
  }
}

// What the bits of a bf16 are, in units of 2^-133: exact as long as the exponent's field is 0 or 1.
int units_of(std::uint32_t bf16) {
  const std::uint32_t exponent = bf16 >> 7 & 255;
  require(exponent <= 1, "evenly spaced");
  const auto units = static_cast<int>(exponent == 0 ? bf16 & 127U : 128U | (bf16 & 127U));
  return (bf16 & 0x8000U) != 0 ? -units : units;
}

TEST_CASE("words: INT4 pairs bare, 8 above the number, rows g + 8 in sixteenfold") {
  for (const std::uint32_t low : {0x76543210U, 0xFEDCBA98U, 0x08F7A5C3U}) {
    const Int4Rows first{low, ~low};
    const Int4Rows second{low * 2654435761U, low ^ 0x5A3C96E1U};
    for (int word_of = 0; word_of < 4; ++word_of) {
      const std::uint32_t word = int4_word(first, second, word_of);
      for (int pair = 0; pair < 4; ++pair) {
        const Int4Rows& rows = pair < 2 ? first : second;
        const std::uint32_t row = pair % 2 == 0 ? rows.low : rows.high;
        const int scale = pair % 2 == 0 ? 1 : 16;
        for (int i = 0; i < 2; ++i) {
          const auto number = static_cast<int>(row >> (4 * (2 * word_of + i)) & 15U);
          require(units_of(int4_bare(word, pair) >> (16 * i) & 0xFFFFU) == scale * number,
                  concat("word ", word_of, ", pair ", pair, ", ", i));
        }
      }
    }
  }
}

TEST_CASE("words: INT4 rows g and g + 8 joint, with the products of -8 that take their 8 back") {
  const Int4Rows first{0x76543210U, 0x08F7A5C3U};
  const Int4Rows second{0xFEDCBA98U, 0x5A3C96E1U};
  for (int word_of = 0; word_of < 4; ++word_of) {
    const std::uint32_t word = int4_word(first, second, word_of);
    for (int block = 0; block < 2; ++block) {
      const Int4Rows& rows = block == 0 ? first : second;
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * (2 * word_of + i);
        const auto low = static_cast<int>(rows.low >> at & 15U);
        const auto high = static_cast<int>(rows.high >> at & 15U);
        require(units_of(int4_joint(word, block) >> (16 * i) & 0xFFFFU) == low + 16 * high,
                concat("word ", word_of, ", block ", block, ", ", i));
      }
    }
  }
  for (const int half : {0, 16}) {
    require(units_of(kInt4BareOffset >> half & 0xFFFFU) == -8, "rows g");
    require(units_of(kInt4JointOffset >> half & 0xFFFFU) == -8 * 17, "rows g + 8 with them");
  }
}

TEST_CASE("words: INT4's bytes for whole-number products, of rows g alone and joint") {
  const Int4Rows first{0x76543210U, 0x08F7A5C3U};
  const Int4Rows second{0xFEDCBA98U, 0x5A3C96E1U};
  for (int word_of = 0; word_of < 4; ++word_of) {
    const std::uint32_t word = int4_word(first, second, word_of);
    for (int byte = 0; byte < 4; ++byte) {  // numbers 2 · word_of and the next, of either block
      const Int4Rows& rows = byte % 2 == 0 ? first : second;
      const int at = 4 * (2 * word_of + byte / 2);
      const auto low = rows.low >> at & 15U;
      const auto high = rows.high >> at & 15U;
      require((int4_low(word) >> (8 * byte) & 255U) == low, concat("word ", word_of, ", byte ", byte));
      require((word >> (8 * byte) & 255U) == low + 16 * high, concat("word ", word_of, ", byte ", byte, ", joint"));
    }
  }
}

float bf16_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}

// x by its two digits, in the units of what it was made with.
int whole_of(float x, float by) {
  const auto bits = std::bit_cast<std::uint32_t>(std::fma(x, by, kKeptBias));
  require(bits >> 16 == 0x4B40, concat("digits of ", x, " fit"));
  const int low = static_cast<int>(bits & 255U) - 128;
  const int high = static_cast<int>(bits >> 8 & 255U) - 128;
  return 256 * high + low;
}

TEST_CASE("words: two digits hold x to half a unit, whose largest lies beside it") {
  for (std::uint32_t peak = 0; peak < 0x7F7FU; ++peak) {
    const auto by = std::bit_cast<float>(kept_multiplier_bits(peak));
    const float low_unit = bf16_of(kept_factor(peak, 0) & 0xFFFFU);
    require(kept_factor(peak, 0) >> 16 == (kept_factor(peak, 0) & 0xFFFFU), "a pair");
    require(low_unit * by == 1 && bf16_of(kept_factor(peak, 1) & 0xFFFFU) == 256 * low_unit, concat("units of ", peak));
    for (const std::uint32_t size : {peak, peak - peak / 300, peak / 2, peak > 1000 ? peak - 1000 : 0U, 0U}) {
      for (const std::uint32_t sign : {0U, 0x8000U}) {
        const float x = bf16_of(size | sign);
        const float kept = static_cast<float>(whole_of(x, by)) * low_unit;
        require(std::fabs(kept - x) <= low_unit / 2, concat(x, " is kept as ", kept));
        if (size == peak && peak >= 40 * 128) require(kept == x, concat(x, " is exact, kept as ", kept));
      }
    }
    if (peak >= 40 * 128) require(low_unit <= bf16_of(peak) * 0x1p-13F, concat("fine enough for ", peak));
  }
  for (const std::uint32_t peak : {0x7F80U, 0x7FC0U, 0x7FFFU}) {
    for (const int digit : {0, 1}) require(std::isnan(bf16_of(kept_factor(peak, digit) & 0xFFFFU)), "not finite");
  }
}

}  // namespace
