// Graphs, their time, the device's read ceiling, and a kernel that only delays.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "cuda/stream/launch.cuh"
#include "random.cuh"

namespace eaglex::bench {

class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& body) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    stream::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    body();
    stream::check(cudaStreamEndCapture(stream, &graph), "capture");
    stream::check(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    stream::check(cudaGraphDestroy(graph), "graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(exec_); }
  void launch() const { stream::check(cudaGraphLaunch(exec_, stream_), "graph launch"); }

  // Median of `repeats` replays, each between two events.
  [[nodiscard]] double time_us(int repeats = 25) const {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    stream::check(cudaEventCreate(&begin), "event");
    stream::check(cudaEventCreate(&end), "event");
    for (int i = 0; i < 5; ++i) launch();
    std::vector<float> times;
    for (int i = 0; i < repeats; ++i) {
      stream::check(cudaEventRecord(begin, stream_), "event");
      launch();
      stream::check(cudaEventRecord(end, stream_), "event");
      stream::check(cudaEventSynchronize(end), "event");
      float ms = 0;
      stream::check(cudaEventElapsedTime(&ms, begin, end), "event");
      times.push_back(ms * 1e3F);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    return times[static_cast<std::size_t>(repeats / 2)];
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

static __global__ void delay_kernel(std::uint64_t ns) {
  stream::release_dependents();
  stream::wait_for_producers();
  const std::uint64_t start = stream::now_ns();
  while (stream::now_ns() - start < ns) {
  }
}

inline void launch_delay(const stream::StreamPlan& plan, std::uint64_t ns, cudaStream_t stream) {
  stream::launch_chained(plan, delay_kernel, dim3(1), 32, 0, stream, ns);
}

static __global__ void __launch_bounds__(256) read_kernel(const uint4* from, std::int64_t count, std::uint32_t* sink) {
  std::uint32_t sum = 0;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 15 * threads < count; i += 16 * threads) {
    uint4 v[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) v[j] = __ldcs(from + i + j * threads);
#pragma unroll
    for (int j = 0; j < 16; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345679U) *sink = sum;
}

// Bytes per second of reading 2 GiB, the best of a few grids.
inline double read_ceiling(cudaStream_t stream) {
  const std::int64_t bytes = std::int64_t{2} << 30;
  const Buffer<bf16> data(static_cast<std::size_t>(bytes / 2));
  randomise(data, 99, 0, 1);
  const Buffer<std::uint32_t> sink(1);
  stream::check(cudaDeviceSynchronize(), "fill");
  const int sms = stream::current_device().num_sms;
  double best = 0;
  for (const int per_sm : {1, 2, 4}) {
    const Graph graph(stream, [&] {
      read_kernel<<<sms * per_sm, 256, 0, stream>>>(reinterpret_cast<const uint4*>(data.get()), bytes / 16, sink.get());
    });
    best = std::max(best, static_cast<double>(bytes) / graph.time_us(9) * 1e6);
  }
  return best;
}

}  // namespace eaglex::bench
