// Stands in for csrc/cuda/ptx.cuh: the same functions with the same contracts, by means of the warp's exchange.
// Copies are finished at once, so a missing wait goes unnoticed. Products are summed in fp32 in order of k; the tensor
// cores' own order and rounding are unpublished.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#define EAGLEX_DYNAMIC_SHARED(Type, name, alignment) \
  Type* const name = reinterpret_cast<Type*>(emulator::dynamic_shared)

namespace eaglex::cuda {

inline void copy_async(void* to, const void* from, bool valid) {
  if (valid) {
    std::memcpy(to, from, 16);
  } else {
    std::memset(to, 0, 16);
  }
}
inline void commit_copies() {}
template <int kPending>
void wait_copies() {}

// Lane i gets elements 2 (i % 4) and + 1 of row i / 4 of each matrix.
inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
  auto& words = emulator::exchange().words;
  const int lane = emulator::lane();
  words[lane][0] = reinterpret_cast<std::uintptr_t>(row);
  emulator::warp_barrier();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto* const from = reinterpret_cast<const std::byte*>(words[matrix * 8 + lane / 4][0]);
    std::memcpy(&r[matrix], from + lane % 4 * sizeof(std::uint32_t), sizeof(std::uint32_t));
  }
}

inline float widened(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
inline float widened(__half x) {
  return __half2float(x);
}

// Half `which` of a register.
template <typename T>
float element(std::uint64_t word, int which) {
  return widened(T{static_cast<std::uint16_t>(word >> (16 * which))});
}

// c [16, 8] += a [16, 16] b [16, 8], with the fragments of mma.m16n8k16: lane i has rows i / 4 and + 8 of a, column
// i / 4 of b, and of both k = 2 (i % 4) and + 1, each also + 8; of c rows i / 4 and + 8, columns 2 (i % 4) and + 1.
template <typename T>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  auto& words = emulator::exchange().words;
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i) words[lane][i] = a[i];
  words[lane][4] = b0;
  words[lane][5] = b1;
  emulator::warp_barrier();
  const int row = lane / 4, column = lane % 4 * 2;
  float sums[4] = {};
  for (int k = 0; k < 16; ++k) {
    const int from = k % 8 / 2, upper = k / 8;
    const auto& x = words[row * 4 + from];
    for (int j = 0; j < 2; ++j) {
      const float w = element<T>(words[(column + j) * 4 + from][4 + upper], k % 2);
      sums[j] += element<T>(x[2 * upper], k % 2) * w;
      sums[2 + j] += element<T>(x[2 * upper + 1], k % 2) * w;
    }
  }
  for (int i = 0; i < 4; ++i) c[i] += sums[i];
}

}  // namespace eaglex::cuda
