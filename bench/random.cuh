// Device memory and random contents for the micro-benchmarks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/stream/check.h"

namespace eaglex::bench {

using bf16 = __nv_bfloat16;

// Device memory, freed with it.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count) : count_(count) {
    stream::check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMalloc");
    stream::check(cudaMemset(data_, 0, count * sizeof(T)), "cudaMemset");
    stream::check(cudaStreamSynchronize(nullptr), "cudaMemset");  // streams of the benches do not wait for this one
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::vector<T> host() const { return host(count_); }
  [[nodiscard]] std::vector<T> host(std::size_t count) const {
    std::vector<T> out(count);
    stream::check(cudaMemcpy(out.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }
  void set(const std::vector<T>& values) const {
    stream::check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    stream::check(cudaStreamSynchronize(nullptr), "cudaMemcpy");  // of pageable memory it may return sooner
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

// At least `count` of them, the same memory for each caller with this name: taking and freeing waits for the device, and
// where other processes use it too, for them.
template <class T, int kName>
const Buffer<T>& reused(std::size_t count) {
  static std::unique_ptr<Buffer<T>> buffer;
  if (buffer == nullptr || buffer->size() < count) {
    buffer.reset();
    buffer = std::make_unique<Buffer<T>>(count + count / 2);
  }
  return *buffer;
}

__device__ __forceinline__ std::uint32_t mix(std::uint32_t seed, std::uint64_t i) {
  std::uint64_t x = i * 0x9E3779B97F4A7C15ULL ^ (static_cast<std::uint64_t>(seed) << 32 | seed) * 0xC2B2AE3D27D4EB4FULL;
  x ^= x >> 31, x *= 0xBF58476D1CE4E5B9ULL, x ^= x >> 29, x *= 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(x >> 32);
}

// Mean `mean`, standard deviation `scale`, roughly normal (sum of two uniforms).
static __global__ void fill_random(bf16* out, std::int64_t count, std::uint32_t seed, float mean, float scale) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::uint32_t h = mix(seed, static_cast<std::uint64_t>(i));
    const float value =
        (static_cast<float>(h & 0xFFFF) + static_cast<float>(h >> 16) - 65535.0F) * (2.4494897F / 65536.0F);
    out[i] = __float2bfloat16(mean + scale * value);
  }
}

inline void randomise(const Buffer<bf16>& buffer, std::uint32_t seed, float mean, float scale) {
  fill_random<<<1024, 256>>>(buffer.get(), static_cast<std::int64_t>(buffer.size()), seed, mean, scale);
  stream::check(cudaGetLastError(), "fill_random");
  stream::check(cudaStreamSynchronize(nullptr), "fill_random");
}

}  // namespace eaglex::bench
