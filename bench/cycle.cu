// The whole cycle and each of its steps on the device: µs (median and p99), bytes, TB/s, share of the read bandwidth.
//
//   cmake -S . -B build/bench -G Ninja -DEAGLEX_BENCH=ON -DEAGLEX_CUDA=ON && cmake --build build/bench --target
//   bench_cycle build/bench/bench_cycle [--shape NAME] [--batch N] [--precision bf16|fp8|int4] [--head preset|bf16|fp8|scan|rescored] [--context N]
//   [--max-context N] [--token-table 0|1] [--repeats N] [--json FILE] [--commit ID]
//
// A precision means what it does for --draft-quant, the head included; --head takes another in its place.
//
// Several engines with weights of their own take turns, so that no weight is still in the L2 cache when it is read
// again. A step is what the engine launches for it, captured once per engine into one graph; the cycle is
// DraftEngine::run, of all engines one after another. Both are timed between events behind a kernel that keeps the device
// busy until the host is ahead, and divided by the number of engines.
// The read bandwidth is that of the same run. --json writes one row per line for bench/torch_ops.py.
#include <cstdio>
#include <cstring>
#include <string>

#include "subject.cuh"
#include "timing.cuh"

namespace eaglex::bench {
namespace {

const Shape kShapes[] = {
    {"llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, 32000},
    {"kimi-k2", 7168, 18432, 64, 8, 128, 163840, 32000},
    {"gpt-oss-120b", 2880, 17280, 64, 8, 64, 201088, 32000},
    {"llama-3-70b", 8192, 28672, 64, 8, 128, 128256, 32000},
    {"kimi-k2-full-head", 7168, 18432, 64, 8, 128, 163840, 163840},  // only by name
};
const Case kCases[] = {{1, 5, 1, 6},  {8, 5, 1, 6}, {32, 5, 1, 6}, {64, 5, 1, 6},
                       {1, 5, 4, 16}, {4, 5, 1, 6}, {16, 5, 1, 6}};  // the last two only by --batch

struct Options {
  std::string shape;               // empty: all
  int batch = 0;                   // 0: all
  std::string precision = "bf16";  // fp8, int4
  std::string head = "preset";     // or what it is stored as, whatever the rest
  int context = 1024;
  int max_context = 0;  // of the table: as Case
  bool token_table = true;
  int repeats = 40;
  std::string json;
  std::string commit = "unknown";
};

constexpr const char* kHeads[] = {"preset", "bf16", "fp8", "scan", "rescored"};  // by HeadKind

struct Times {
  double median = 0;
  double p99 = 0;
};

__global__ void spin_kernel(std::uint64_t ns) {
  const std::uint64_t start = stream::now_ns();
  while (stream::now_ns() - start < ns) {
  }
}

// µs of `work`, a `share` of it each: behind a spinning kernel, so that the host's own time does not show.
Times time_of(cudaStream_t stream, int repeats, double share, const std::function<void(int)>& work) {
  constexpr std::uint64_t kHead = 300'000;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  stream::check(cudaEventCreate(&begin), "event");
  stream::check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = -3; i < repeats; ++i) {  // the first three warm up
    spin_kernel<<<1, 1, 0, stream>>>(kHead);
    stream::check(cudaEventRecord(begin, stream), "event");
    work(i + 3);
    stream::check(cudaEventRecord(end, stream), "event");
    stream::check(cudaEventSynchronize(end), "work");
    float ms = 0;
    stream::check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 0) times.push_back(ms * 1e3F);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2] / share, times[times.size() * 99 / 100] / share};
}

struct Report {
  std::FILE* json = nullptr;
  double ceiling = 0;  // bytes per second

  void line(const char* name, const Times& t, double bytes) const {
    std::printf("    %-10s %9.1f %9.1f %9.1f %7.2f %6.0f%%\n", name, t.median, t.p99, bytes * 1e-6,
                bytes / t.median * 1e-6, 100 * bytes / t.median * 1e6 / ceiling);
  }
};

using Steps = std::vector<RecordedStep>;

// The steps [from, to) of every engine in turn, as one graph.
Times time_steps(cudaStream_t stream, int repeats, std::vector<std::unique_ptr<Subject>>& subjects,
                 const std::vector<Steps>& steps, std::size_t from, std::size_t to) {
  const Graph graph(stream, [&] {
    for (std::size_t s = 0; s < subjects.size(); ++s) {
      subjects[s]->aim(stream);
      for (std::size_t i = from; i < to; ++i) steps[s][i].launch();
    }
  });
  return time_of(stream, repeats, static_cast<double>(subjects.size()), [&](int) { graph.launch(); });
}

// µs of one step that is skipped because every request has stopped with the first token.
double time_skipped(const Shape& shape, Case c, int repeats, cudaStream_t stream) {
  c.stop_score = -1e-6F;
  std::vector<std::unique_ptr<Subject>> subjects;
  subjects.push_back(std::make_unique<Subject>(shape, c, 0));
  const std::vector<Steps> steps{subjects[0]->record(stream)};
  stream::check(cudaStreamSynchronize(stream), "recorded cycle");
  std::size_t first = 0;
  while (steps[0][first].name != "select") ++first;
  return time_steps(stream, repeats, subjects, steps, first + 1, steps[0].size()).median / (c.num_steps - 1);
}

void measure(const Shape& shape, const Case& c, const Options& options, const Report& report, cudaStream_t stream) {
  constexpr int kSets = 3;
  std::vector<std::unique_ptr<Subject>> subjects;
  for (std::uint32_t s = 0; s < kSets; ++s) {
    subjects.push_back(std::make_unique<Subject>(shape, c, 1000 * s));
    subjects.back()->warm_up();
  }
  std::vector<Steps> steps;
  for (const auto& subject : subjects) steps.push_back(subject->record(stream));
  stream::check(cudaStreamSynchronize(stream), "recorded cycles");
  const Subject& subject = *subjects[0];
  const char* const head = kHeads[static_cast<int>(resolved(c.head, c.weights))];
  std::printf("  %s, %s, head %s, batch %d, topk %d, %d nodes, %d steps, context %d (%s; workspace %.0f MB)\n",
              shape.name.c_str(), options.precision.c_str(), head, c.batch, c.topk, c.num_draft_tokens, c.num_steps,
              c.context, subject.backend(), static_cast<double>(subject.workspace_bytes()) * 1e-6);
  std::printf("    %-10s %9s %9s %9s %7s %7s\n", "", "us", "p99", "MB", "TB/s", "share");

  const auto in_turn = [&](auto&& work) {
    return time_of(stream, options.repeats, kSets, [&](int) {
      for (const auto& each : subjects) work(*each);
    });
  };
  const auto cycle = in_turn([stream](Subject& each) { each.run(stream); });
  const auto tree = in_turn([stream](Subject& each) { each.tree(stream); });
  // Everything to the first select is the extend; from there to the second one step.
  std::size_t first = 0;
  while (steps[0][first].name != "select") ++first;
  std::size_t second = first + 1;
  while (second < steps[0].size() && steps[0][second].name != "select") ++second;
  const auto timed = [&](std::size_t from, std::size_t to) {
    return time_steps(stream, options.repeats, subjects, steps, from, to);
  };
  const auto extend = timed(0, first + 1);
  const auto step = timed(first + 1, second + 1);
  report.line("cycle", cycle, subject.cycle_bytes());
  report.line("extend", extend, subject.extend_bytes());
  report.line("step", step, subject.step_bytes());
  std::string parts;
  for (std::size_t i = first + 1; i <= second; ++i) {
    const std::string& name = steps[0][i].name;
    const Times t = timed(i, i + 1);
    report.line(name.c_str(), t, subject.bytes(name));
    char text[64];
    std::snprintf(text, sizeof text, "%s\"%s\": %.1f", parts.empty() ? "" : ", ", name.c_str(), t.median);
    parts += text;
  }
  report.line("tree", tree, 0);
  // Last, as admit takes back what select has said: after it the steps would be skipped.
  for (const std::size_t i : {1, 0})
    report.line(steps[0][i].name.c_str(), timed(i, i + 1), subject.bytes(steps[0][i].name));
  const double skipped = time_skipped(shape, c, options.repeats, stream);
  std::printf("    %-10s %9.1f\n", "skipped", skipped);
  const std::int64_t expected = static_cast<std::int64_t>(c.batch) * (1 + options.repeats + 3);
  if (subject.drafted() < expected)
    std::printf("    WRONG: %lld of %lld requests drafted\n", static_cast<long long>(subject.drafted()),
                static_cast<long long>(expected));
  std::fflush(stdout);
  if (report.json == nullptr) return;
  std::fprintf(
      report.json,
      "{\"shape\": \"%s\", \"precision\": \"%s\", \"head\": \"%s\", \"batch\": %d, \"num_steps\": %d, \"topk\": %d, "
      "\"num_draft_tokens\": %d, \"context\": %d, \"hidden\": %d, \"intermediate\": %d, \"heads\": %d, "
      "\"kv_heads\": %d, \"head_dim\": %d, \"draft_vocab\": %d, \"cycle_us\": %.1f, \"cycle_p99_us\": %.1f, "
      "\"step_us\": %.1f, \"extend_us\": %.1f, \"tree_us\": %.1f, \"skipped_us\": %.1f, \"steps\": {%s}, "
      "\"bytes\": %.0f, "
      "\"ceiling_tbps\": %.3f, \"share\": %.3f, \"workspace_bytes\": %zu, \"commit\": \"%s\"}\n",
      shape.name.c_str(), options.precision.c_str(), head, c.batch, c.num_steps, c.topk, c.num_draft_tokens, c.context,
      shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim, shape.draft_vocab, cycle.median,
      cycle.p99, step.median, extend.median, tree.median, skipped, parts.c_str(), subject.cycle_bytes(),
      report.ceiling * 1e-12, subject.cycle_bytes() / cycle.median * 1e6 / report.ceiling, subject.workspace_bytes(),
      options.commit.c_str());
  std::fflush(report.json);
}

int run(const Options& options) {
  cudaStream_t stream = nullptr;
  stream::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Report report;
  report.ceiling = read_ceiling(stream);
  std::printf("  read bandwidth %.3f TB/s; two events with nothing between them %.1f us\n", report.ceiling * 1e-12,
              time_of(stream, options.repeats, 1, [](int) {}).median);
  if (!options.json.empty()) report.json = std::fopen(options.json.c_str(), "w");
  if (!options.json.empty() && report.json == nullptr) {
    std::fprintf(stderr, "cycle: --json: expected a file that can be written, got %s\n", options.json.c_str());
    return 2;
  }
  int measured = 0;
  for (const Shape& shape : kShapes) {
    if (options.shape.empty() && shape.vocab == shape.draft_vocab) continue;
    for (Case c : kCases) {
      if (options.batch == 0 && (c.batch == 4 || c.batch == 16)) continue;
      c.weights = options.precision == "fp8" ? DType::kF8 : options.precision == "int4" ? DType::kI4 : DType::kBF16;
      if ((!options.shape.empty() && options.shape != shape.name) || (options.batch != 0 && options.batch != c.batch))
        continue;
      while (options.head != kHeads[static_cast<int>(c.head)])
        c.head = static_cast<HeadKind>(static_cast<int>(c.head) + 1);
      c.context = options.context;
      c.max_context = options.max_context;
      c.token_table = options.token_table;
      measure(shape, c, options, report, stream);
      ++measured;
    }
  }
  if (report.json != nullptr) std::fclose(report.json);
  if (measured > 0) return 0;
  std::fprintf(stderr, "cycle: no case has --shape '%s' and --batch %d\n", options.shape.c_str(), options.batch);
  return 2;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) fail(ErrorCode::kConfig, name, ": expected a value, got nothing");
    const char* const value = argv[i + 1];
    if (name == "--shape") {
      options.shape = value;
    } else if (name == "--batch") {
      options.batch = std::atoi(value);
    } else if (name == "--precision") {
      options.precision = value;
      expect(options.precision == "bf16" || options.precision == "fp8" || options.precision == "int4",
             ErrorCode::kConfig, "--precision", "bf16, fp8 or int4", value);
    } else if (name == "--head") {
      options.head = value;
      expect(std::ranges::find(kHeads, options.head) != std::end(kHeads), ErrorCode::kConfig, "--head",
             "preset, bf16, fp8, scan or rescored", value);
    } else if (name == "--context") {
      options.context = std::max(1, std::atoi(value));
    } else if (name == "--max-context") {
      options.max_context = std::atoi(value);
    } else if (name == "--token-table") {
      options.token_table = std::atoi(value) != 0;
    } else if (name == "--repeats") {
      options.repeats = std::max(1, std::atoi(value));
    } else if (name == "--json") {
      options.json = value;
    } else if (name == "--commit") {
      options.commit = value;
    } else {
      fail(ErrorCode::kConfig,
           "option: expected --shape, --batch, --precision, --head, --context, --max-context, --token-table, "
           "--repeats, ",
           "--json or --commit, got ", name);
    }
  }
  return options;
}

}  // namespace
}  // namespace eaglex::bench

int main(int argc, char** argv) {
  try {
    return eaglex::bench::run(eaglex::bench::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cycle: %s\n", error.what());
    return 2;
  }
}
