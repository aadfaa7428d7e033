// A block that never comes. Blocks that share a tile wait for one another, so each product of a cycle is launched in turn
// with one block too few: the wait must end, the draft be void, the next call say so, and the calls after it be right.
//
//   build/bench/bench_lost_block      (a wait takes 2 s; ends with 1 where something else happens)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "launches.h"
#include "subject.cuh"

namespace eaglex::bench {
namespace {

using Bytes = std::vector<std::vector<std::byte>>;

Bytes bytes_of(const Subject& subject) {
  Bytes all;
  for (const TensorView& view : subject.written()) {
    all.emplace_back(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    stream::check(cudaMemcpy(all.back().data(), view.data, all.back().size(), cudaMemcpyDeviceToHost), "results");
  }
  return all;
}

// Bit for bit, but for scores: where the last block to come sums up a tile, it is chance which blocks of the head hold
// which tiles, and so in what order Σ exp is added.
bool equal(const std::vector<std::byte>& a, const std::vector<std::byte>& b, DType type) {
  if (type != DType::kF32) return a == b;
  constexpr float kRounding = 1e-4F;
  for (std::size_t i = 0; i < a.size(); i += sizeof(float)) {
    float x = 0, y = 0;
    std::memcpy(&x, a.data() + i, sizeof x);
    std::memcpy(&y, b.data() + i, sizeof y);
    if (!(std::abs(x - y) <= kRounding)) return false;
  }
  return true;
}

void cycle(Subject& subject, cudaStream_t stream) {
  subject.enqueue(stream);
  stream::check(cudaStreamSynchronize(stream), "cycle");
}

// The names of a cycle's products, by their number among its launches.
std::vector<std::string> names_of(Subject& subject, cudaStream_t stream) {
  launches().watch(kNoLaunch, nullptr);
  cycle(subject, stream);
  std::vector<std::string> names(launches().count);
  for (std::size_t i = 0; i < names.size(); ++i) {
    launches().watch(i, [](cudaLaunchConfig_t&) {});
    cycle(subject, stream);
    names[i] = launches().name;
  }
  return names;
}

// Whatever is not finite becomes "no draft", but as K or V zero, because requests share the pool: so where the lost block
// had those, a draft may be left, a poor one.
enum class Outcome { kNoDraft, kAny };

int check(const Shape& shape, const Case& c, std::size_t launch, Outcome outcome, const Bytes& expected,
          cudaStream_t stream) {
  Subject subject(shape, c, 0);
  launches().watch(launch, [](cudaLaunchConfig_t& config) { config.gridDim.x -= 1; });
  cycle(subject, stream);
  const std::int64_t drafts = subject.drafted();
  if (launch % 2 == 0) subject.tree(stream);  // puts counters right; the error waits for the next cycle
  bool said = false;
  try {
    cycle(subject, stream);
  } catch (const Error& error) {
    said = error.code() == ErrorCode::kDevice && std::string(error.what()).find("waited") != std::string::npos;
  }
  bool right = true;
  for (int i = 0; i < 2; ++i) {
    cycle(subject, stream);
    const Bytes now = bytes_of(subject);
    for (std::size_t tensor = 0; tensor < now.size(); ++tensor) {
      if (equal(now[tensor], expected[tensor], subject.written()[tensor].dtype)) continue;
      std::printf("    tensor %zu differs\n", tensor);
      right = false;
    }
    if (subject.drafted() != drafts + (i + 1) * c.batch) {
      std::printf("    %lld drafts\n", static_cast<long long>(subject.drafted()));
      right = false;
    }
  }
  const bool good = (drafts == 0 || outcome == Outcome::kAny) && said && right;
  std::printf("  launch %2zu: %s, %s, %s\n", launch, drafts == 0 ? "no draft" : "a draft",
              said ? "then an error" : "NO ERROR", right ? "then right" : "then WRONG");
  std::fflush(stdout);
  return good ? 0 : 1;
}

int check_all(const Case& c, cudaStream_t stream) {
  const Shape shape{"H512/I1024/V3000", 512, 1024, 8, 2, 64, 3000, 2000};
  setenv("EAGLEX_STREAM_REDUCTION", "last", 1);
  Subject patient(shape, c, 0);  // no block of it ever waits
  unsetenv("EAGLEX_STREAM_REDUCTION");
  const std::vector<std::string> names = names_of(patient, stream);
  const Bytes expected = bytes_of(patient);
  int wrong = 0, products = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].find("stream_gemm") == std::string::npos) continue;
    ++products;
    const bool is_qkv = names[i].find("QkvStep") != std::string::npos;
    wrong += check(shape, c, i, is_qkv ? Outcome::kAny : Outcome::kNoDraft, expected, stream);
  }
  std::printf("lost block, %s: %d products, %d wrong\n", c.weights == DType::kBF16 ? "bf16" : "int4", products, wrong);
  return wrong + (products > 0 ? 0 : 1);
}

int run() {
  cudaStream_t stream = nullptr;
  stream::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  int wrong = 0;
  for (const DType weights : {DType::kBF16, DType::kI4}) {
    Case c{3, 2, 1, 3, 100};
    c.weights = weights;
    wrong += check_all(c, stream);
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace eaglex::bench

int main() {
  try {
    return eaglex::bench::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lost_block: %s\n", error.what());
    return 2;
  }
}
