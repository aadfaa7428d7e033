#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "cpu/numeric.h"

using namespace eaglex::cpu;

TEST_CASE("float16: every finite value survives the round trip, rounding is to nearest even") {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = from_f16(half);
    if ((bits & 0x7C00U) == 0x7C00U && (bits & 0x3FFU) != 0) {
      CHECK(std::isnan(value));
      CHECK(std::isnan(from_f16(to_f16(value))));
    } else {
      REQUIRE(to_f16(value) == half);
    }
  }
  CHECK(from_f16(0x3C00) == 1.0F);
  CHECK(from_f16(0x0001) == 0x1p-24F);
  CHECK(to_f16(1.0F + 0x1p-11F) == 0x3C00);             // half way, to even
  CHECK(to_f16(1.0F + 0x1p-11F + 0x1p-20F) == 0x3C01);  // just above
  CHECK(to_f16(0x1p-25F) == 0x0000);                    // half of the least subnormal, to even
  CHECK(to_f16(0x1.8p-25F) == 0x0001);
  CHECK(to_f16(65504.0F) == 0x7BFF);
  CHECK(to_f16(65519.0F) == 0x7BFF);
  CHECK(to_f16(65520.0F) == 0x7C00);
  CHECK(to_f16(-1e30F) == 0xFC00);
}

TEST_CASE("bfloat16: every finite value survives the round trip, rounding is to nearest even") {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = from_bf16(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(from_bf16(to_bf16(value))));
    } else {
      REQUIRE(to_bf16(value) == half);
    }
  }
  CHECK(to_bf16(1.0F + 0x1p-8F) == 0x3F80);
  CHECK(to_bf16(1.0F + 0x1p-8F + 0x1p-16F) == 0x3F81);
  CHECK(to_bf16(1.0F + 0x1.8p-7F) == 0x3F82);
}

TEST_CASE("dot covers the tail behind whole vectors") {
  for (const int count : {0, 1, 31, 32, 33, 100}) {
    std::vector<float> a(static_cast<std::size_t>(count)), b(static_cast<std::size_t>(count));
    float expected = 0;
    for (int i = 0; i < count; ++i) {
      a[static_cast<std::size_t>(i)] = static_cast<float>(i % 7 - 3);
      b[static_cast<std::size_t>(i)] = static_cast<float>(i % 5 - 2);
      expected += a[static_cast<std::size_t>(i)] * b[static_cast<std::size_t>(i)];
    }
    CHECK(dot(a.data(), b.data(), count) == expected);  // small integers: exact in any order
  }
}
