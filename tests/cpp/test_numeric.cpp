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

TEST_CASE("e4m3: bias 7, subnormals of 2^-9, NaN at the top and no infinity") {
  CHECK(from_e4m3(0x00) == 0.0F);
  CHECK(std::signbit(from_e4m3(0x80)));
  CHECK(from_e4m3(0x01) == 0x1p-9F);
  CHECK(from_e4m3(0x07) == 0x7p-9F);
  CHECK(from_e4m3(0x08) == 0x1p-6F);
  CHECK(from_e4m3(0x38) == 1.0F);
  CHECK(from_e4m3(0xB9) == -1.125F);
  CHECK(from_e4m3(0x7E) == 448.0F);
  CHECK(std::isnan(from_e4m3(0x7F)));
  CHECK(std::isnan(from_e4m3(0xFF)));
}

TEST_CASE("int4: a scale per 128 inputs, the last group shorter") {
  constexpr std::int64_t kIn = 132;
  std::vector<std::uint8_t> values(2 * kIn / 2, 0x88);  // all 0
  values[0] = 0xF1;                                     // row 0: q[0] = -7, q[1] = 7
  values[65] = 0x0A;                                    // row 0: q[130] = 2, q[131] = -8
  values[66 + 64] = 0x89;                               // row 1: q[128] = 1
  const std::vector<float> scales{0.5F, 2.0F, 3.0F, -4.0F};
  eaglex::Matrix matrix;
  matrix.data = values.data();
  matrix.dtype = eaglex::DType::kI4;
  matrix.rank = matrix.scales.rank = 2;
  matrix.shape = {2, kIn};
  matrix.stride = {kIn, 1};
  matrix.scales.data = const_cast<float*>(scales.data());
  matrix.scales.shape = {2, 2};
  matrix.scales.stride = {2, 1};
  matrix.expect("w", {}, eaglex::DType::kBF16, 2, kIn);
  std::vector<float> x(kIn, 0.0F);
  x[0] = 1.0F;
  x[1] = 3.0F;
  x[128] = 5.0F;
  x[130] = 10.0F;
  x[131] = 100.0F;
  float out[2] = {};
  linear({nullptr, 1, x.data(), kIn}, matrix, out, 2);
  CHECK(out[0] == 0.5F * (-7 + 21) + 2.0F * (20 - 800));
  CHECK(out[1] == -4.0F * 5);
}
