// Whole cycles of small drafts, raw, by graph and with their tree: every kernel of both chains in each of its widths, in
// so few blocks that compute-sanitizer comes to a verdict within a minute (`make sanitize`).
//
//   build/bench/bench_small_cycles [bf16 | fp8 | int4 | plain]      (ends with 1 where a draft is missing or differs)
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "subject.cuh"

namespace eaglex::bench {
namespace {

std::vector<std::byte> results(const Subject& subject) {
  std::vector<std::byte> all;
  for (const std::vector<TensorView>* views : {&subject.written(), &subject.verified()}) {
    for (const TensorView& view : *views) {
      const std::size_t bytes = static_cast<std::size_t>(view.numel()) * size_of(view.dtype);
      all.resize(all.size() + bytes);
      stream::check(cudaMemcpy(all.data() + all.size() - bytes, view.data, bytes, cudaMemcpyDeviceToHost), "results");
    }
  }
  return all;
}

// Graphs hold the same kernels but for the one that fetches the parameters, so one of them is enough.
enum class By { kLaunches, kLaunchesAndGraph };

int check(const Shape& shape, const Case& c, bool streams, By by, cudaStream_t stream) {
  Subject subject(shape, c, 0);
  int wrong = (std::string(subject.backend()) == "cuda") == streams ? 0 : 1;
  subject.enqueue(stream);
  subject.tree(stream);
  stream::check(cudaStreamSynchronize(stream), "raw");
  std::int64_t cycles = 1;
  if (by == By::kLaunchesAndGraph) {
    const std::vector<std::byte> raw = results(subject);
    subject.run(stream);
    subject.tree(stream);
    stream::check(cudaStreamSynchronize(stream), "graph");
    wrong += results(subject) == raw ? 0 : 1;  // a cycle writes the same again
    ++cycles;
  }
  wrong += subject.drafted() == cycles * c.batch ? 0 : 1;
  std::printf("  %-18s %s, batch %2d, topk %d, %3d rows, head_dim %3d: %s\n", shape.name.c_str(), subject.backend(),
              c.batch, c.topk, c.batch * c.num_draft_tokens, shape.head_dim, wrong == 0 ? "right" : "WRONG");
  std::fflush(stdout);
  return wrong;
}

int run(const std::string& what) {
  cudaStream_t stream = nullptr;
  stream::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const Shape narrow{"H256/I512/V1000", 256, 512, 4, 2, 64, 1000, 500};
  const Shape wide{"H384/I448/V1000", 384, 448, 4, 1, 128, 1000, 500};
  const Shape odd{"H256/I320/V700", 256, 320, 2, 2, 96, 700, 700};
  const Shape widest{"H256/I320/V700", 256, 320, 2, 1, 256, 700, 700};
  struct Run {
    const Shape* shape;
    Case c;
  };
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  // Rows of a step: 1 to 8, 16, 32 and 64, as the kernels are made for, and 80, which are the plain chain's; of an
  // extend: to 64, in 2 parts, and more than are taken in parts. The last has two layers and
  // every switch.
  const Run runs[] = {
      {&narrow, {1, 2, 1, 3, 40}},
      {&wide, {12, 2, 1, 3, 20}},
      {&odd, {24, 2, 1, 3, 20}},
      {&narrow, {40, 2, 1, 3, 20}},
      {&narrow, {10, 2, 8, 40, 20}},
      {&widest, {2, 2, 4, 8, 40}},
      {&odd, {4, 2, 8, 12, 40}},
      {&odd, {5, 2, 2, 4, 20, kNever, DType::kBF16, 2, AuxNorm::kEach, Residual::kNormed, NextHidden::kNormed}},
  };
  int wrong = 0;
  for (const std::string precision : {"bf16", "fp8", "int4", "plain"}) {
    if (!what.empty() && what != precision) continue;
    const bool streams = precision != "plain";
    setenv("EAGLEX_CHAIN", streams ? "fast" : "plain", 1);
    for (const Run& each : runs) {
      Case c = each.c;
      c.weights = precision == "fp8" ? DType::kF8 : precision == "int4" ? DType::kI4 : DType::kBF16;
      wrong += check(*each.shape, c, streams, &each == runs ? By::kLaunchesAndGraph : By::kLaunches, stream);
    }
    // Heads that no preset has: FP8, and INT4 whose rows are gone.
    if (precision != "fp8" && precision != "int4") continue;
    for (const Run& each : {runs[0], runs[2], runs[4]}) {
      Case c = each.c;
      c.weights = precision == "fp8" ? DType::kF8 : DType::kI4;
      c.head = precision == "fp8" ? HeadKind::kFp8 : HeadKind::kScan;
      wrong += check(*each.shape, c, streams, By::kLaunches, stream);
    }
  }
  std::printf("small cycles %s: %d wrong\n", what.c_str(), wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace eaglex::bench

int main(int argc, char** argv) {
  try {
    return eaglex::bench::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "small_cycles: %s\n", error.what());
    return 2;
  }
}
