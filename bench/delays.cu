// Each step of the cycle delayed in turn, as the engine launches it, over poisoned buffers: a kernel that reads before
// its wait what the one before has yet to write, or writes what that one still reads, gives other bits.
//
//   build/bench/bench_delays          (ends with 1 where something differs)
//
// Programmatic dependent launch lets a kernel start beside the one before. The oracle is the same engine without it.
#include <cstdio>
#include <cstdlib>

#include "subject.cuh"
#include "timing.cuh"

namespace eaglex::bench {
namespace {

constexpr std::uint64_t kDelayNs = 100'000;

using Bytes = std::vector<std::vector<std::byte>>;

Bytes read(const Subject& subject) {
  Bytes all;
  for (const TensorView& view : subject.written()) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    stream::check(cudaMemcpy(bytes.data(), view.data, bytes.size(), cudaMemcpyDeviceToHost), "read");
    all.push_back(std::move(bytes));
  }
  return all;
}

void write(const Subject& subject, const Bytes& all, cudaStream_t stream) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    const TensorView& view = subject.written()[i];
    stream::check(cudaMemcpyAsync(view.data, all[i].data(), all[i].size(), cudaMemcpyHostToDevice, stream), "write");
  }
}

// The cycle's steps with a delay in front of step `delayed`; none where there is no such step.
Bytes cycle(Subject& subject, const std::vector<RecordedStep>& steps, const Bytes& before, std::size_t delayed,
            cudaStream_t stream) {
  write(subject, before, stream);
  subject.poison(stream);
  subject.aim(stream);
  const stream::StreamPlan plan;  // with PDL
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i == delayed) launch_delay(plan, kDelayNs, stream);
    steps[i].launch();
  }
  stream::check(cudaStreamSynchronize(stream), "cycle");
  return read(subject);
}

int check(const Shape& shape, const Case& c, cudaStream_t stream) {
  setenv("EAGLEX_PDL", "0", 1);
  Subject serial(shape, c, 0);
  unsetenv("EAGLEX_PDL");
  Subject subject(shape, c, 0);
  if (std::string(subject.backend()) != "cuda") {
    std::printf("  %s is not streamed: %s\n", shape.name.c_str(), subject.backend());
    return 1;
  }
  const Bytes before = read(subject);
  const auto oracle_steps = serial.record(stream);
  const auto steps = subject.record(stream);
  stream::check(cudaStreamSynchronize(stream), "recorded cycles");
  const Bytes expected = cycle(serial, oracle_steps, before, oracle_steps.size(), stream);
  int wrong = expected == before ? 1 : 0;  // a cycle writes
  for (std::size_t i = 0; i <= steps.size(); ++i) {
    if (cycle(subject, steps, before, i, stream) == expected) continue;
    ++wrong;
    std::printf("  differs with a delay before %s (launch %zu)\n", i < steps.size() ? steps[i].name.c_str() : "nothing",
                i);
  }
  std::printf("  %s, batch %d, topk %d: %zu launches delayed in turn, %d differ\n", shape.name.c_str(), c.batch, c.topk,
              steps.size(), wrong);
  return wrong;
}

int run() {
  cudaStream_t stream = nullptr;
  stream::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  // Small enough that all of it runs in seconds, large enough that tiles are shared; the last like a real draft.
  const Shape small{"H512/I1024/V3000", 512, 1024, 8, 2, 64, 3000, 2000};
  const Shape large{"H4096/I14336/V32k", 4096, 14336, 32, 8, 128, 32000, 32000};
  int wrong = 0;
  for (const Case& c : {Case{1, 4, 1, 5, 300}, Case{8, 4, 1, 5, 300}, Case{12, 4, 1, 5, 300}, Case{40, 4, 1, 5, 300},
                        Case{1, 4, 4, 16, 300}, Case{4, 4, 8, 20, 300}})
    wrong += check(small, c, stream);
  for (const Case& c : {Case{1, 3, 1, 4, 500}, Case{16, 3, 1, 4, 500}}) wrong += check(large, c, stream);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace eaglex::bench

int main() {
  try {
    return eaglex::bench::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "delays: %s\n", error.what());
    return 2;
  }
}
