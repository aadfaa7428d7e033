// Each launch of a cycle delayed in turn, raw and in a captured graph, over poisoned buffers and what a cycle of another
// batch has left in those of the kernels themselves: a kernel that reads before its wait what the one before has yet to
// write, or writes what that one still reads, gives other bits.
//
//   build/bench/bench_delays [bf16 | fp8 | int4]      (ends with 1 where something differs)
//
// Programmatic dependent launch lets a kernel start beside the one before. The oracle is the same engine without it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "launches.h"
#include "subject.cuh"
#include "timing.cuh"

namespace eaglex::bench {
namespace {

constexpr std::uint64_t kDelayNs = 100'000;

enum class How { kRaw, kGraph };

using Bytes = std::vector<std::vector<std::byte>>;

Bytes read(const std::vector<TensorView>& views) {
  Bytes all;
  for (const TensorView& view : views) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    stream::check(cudaMemcpy(bytes.data(), view.data, bytes.size(), cudaMemcpyDeviceToHost), "read");
    all.push_back(std::move(bytes));
  }
  return all;
}

void write(const std::vector<TensorView>& views, const Bytes& all, cudaStream_t stream) {
  for (std::size_t i = 0; i < all.size(); ++i)
    stream::check(cudaMemcpyAsync(views[i].data, all[i].data(), all[i].size(), cudaMemcpyHostToDevice, stream),
                  "write");
}

// A cycle and its tree with a delay in front of launch `delayed`; none where there is no such launch. Returns what they
// have written.
Bytes cycle(Subject& subject, const Bytes& before, How how, std::size_t delayed, cudaStream_t stream) {
  launches().watch(kNoLaunch, nullptr);
  subject.enqueue_other(stream);
  write(subject.written(), before, stream);
  subject.poison(stream);
  const auto launch = [&] {
    const stream::StreamPlan plan;  // with PDL
    launches().watch(delayed, [=](cudaLaunchConfig_t&) { launch_delay(plan, kDelayNs, stream); });
    subject.enqueue(stream);
    subject.tree(stream);
  };
  if (how == How::kRaw) {
    launch();
  } else {
    const Graph graph(stream, launch);
    graph.launch();
    stream::check(cudaStreamSynchronize(stream), "graph");
  }
  stream::check(cudaStreamSynchronize(stream), "cycle");
  Bytes all = read(subject.written());
  for (std::vector<std::byte>& bytes : read(subject.verified())) all.push_back(std::move(bytes));
  return all;
}

int check(const Shape& shape, Case c, DType weights, cudaStream_t stream) {
  c.weights = weights;
  setenv("EAGLEX_PDL", "0", 1);
  Subject serial(shape, c, 0);
  unsetenv("EAGLEX_PDL");
  Subject subject(shape, c, 0);
  if (std::string(subject.backend()) != "cuda") {
    std::printf("  %s is not streamed: %s\n", shape.name.c_str(), subject.backend());
    return 1;
  }
  const Bytes before = read(subject.written());
  const Bytes expected = cycle(serial, before, How::kRaw, kNoLaunch, stream);
  const std::size_t count = launches().count;
  int wrong = std::equal(before.begin(), before.end(), expected.begin()) ? 1 : 0;  // a cycle writes
  for (const How how : {How::kRaw, How::kGraph}) {
    for (std::size_t i = 0; i <= count; ++i) {
      const Bytes now = cycle(subject, before, how, i, stream);
      if (now == expected && launches().count == count) continue;
      ++wrong;
      std::printf("  %s: differs with a delay before launch %zu of %zu, %s\n", how == How::kRaw ? "raw" : "graph", i,
                  launches().count, launches().name.c_str());
    }
  }
  std::printf(
      "  %s, head_dim %d, %d layers, batch %d, topk %d, %d rows, %s: %zu launches delayed in turn, raw and in a graph, "
      "%d differ\n",
      shape.name.c_str(), shape.head_dim, c.layers, c.batch, c.topk, c.batch * c.num_draft_tokens,
      std::isinf(c.stop_score) ? "all steps" : "stops", count, wrong);
  std::fflush(stdout);
  return wrong;
}

int run(const std::string& precision) {
  cudaStream_t stream = nullptr;
  stream::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  // Small enough that all of it runs in seconds, large enough that tiles are shared; the last like a real draft.
  const Shape small{"H512/I1024/V3000", 512, 1024, 8, 2, 64, 3000, 2000};
  const Shape mha{"H256/I448/V1000", 256, 448, 2, 2, 96, 1000, 500};
  const Shape wide{"H384/I320/V1000", 384, 320, 4, 1, 256, 1000, 500};
  const Shape large{"H4096/I14336/V32k", 4096, 14336, 32, 8, 128, 32000, 32000};
  const DType weights = precision == "fp8" ? DType::kF8 : precision == "int4" ? DType::kI4 : DType::kBF16;
  int wrong = 0;
  constexpr float kNever = -std::numeric_limits<float>::infinity(), kAtOnce = -1e-6F, kSomewhere = -9.6F;
  // Of 40 and 64 requests the extend runs in 4 and 6 parts; of 20 of topk 4 the steps are the plain chain's.
  for (const Case& c : {Case{1, 4, 1, 5, 300}, Case{8, 4, 1, 5, 300}, Case{12, 4, 1, 5, 300}, Case{40, 4, 1, 5, 300},
                        Case{64, 5, 1, 6, 100}, Case{1, 4, 4, 16, 300}, Case{4, 4, 8, 20, 300}, Case{20, 3, 4, 8, 100}})
    wrong += check(small, c, weights, stream);
  for (const int topk : {1, 4}) {
    const int nodes = topk == 1 ? 5 : 8;
    wrong += check(small, {6, 4, topk, nodes, 300, kNever, weights, 2}, weights, stream);
    for (const float stop : {kAtOnce, kSomewhere})  // a token's logarithm is about -4.8
      wrong += check(small, {6, 4, topk, nodes, 300, stop, weights}, weights, stream);
  }
  // Every switch, and the other dims of heads.
  wrong += check(mha, {3, 3, 1, 4, 200, kNever, weights, 2, AuxNorm::kEach, Residual::kNormed, NextHidden::kNormed},
                 weights, stream);
  wrong += check(wide, {9, 3, 2, 6, 200, kNever, weights, 2, AuxNorm::kWhole, Residual::kNormed, NextHidden::kPreNorm},
                 weights, stream);
  for (const Case& c : {Case{1, 3, 1, 4, 500}, Case{16, 3, 1, 4, 500}}) wrong += check(large, c, weights, stream);
  for (const Case& c : {Case{1, 4, 1, 5, 300}, Case{4, 4, 4, 8, 300}}) {  // steps that read all of qkv's matrices
    Case without = c;
    without.token_table = false;
    wrong += check(small, without, weights, stream);
  }
  if (weights != DType::kBF16) {  // heads that no preset has
    for (const HeadKind head : {HeadKind::kFp8, HeadKind::kScan}) {
      Case c{8, 4, 1, 5, 300};
      c.head = head;
      wrong += check(small, c, weights, stream);
    }
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace eaglex::bench

int main(int argc, char** argv) {
  try {
    return eaglex::bench::run(argc > 1 ? argv[1] : "bf16");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "delays: %s\n", error.what());
    return 2;
  }
}
