// The order of the steps, told by a backend that only writes down what it is asked.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "draft/loop.h"

using namespace eaglex;

namespace {

std::string words(const Rows& rows) {
  switch (rows.pass) {
    case Pass::kExtendAll:
      return "all";
    case Pass::kExtendLast:
      return "last";
    case Pass::kStep:
      return "step" + std::to_string(rows.step);
  }
  return "?";
}

class Recorder final : public Backend {
 public:
  std::vector<std::string> log;
  std::vector<const void*> fed, written;  // what layer 0 of each pass reads, what down writes

  const char* name() const noexcept override { return "recorder"; }
  Device device() const noexcept override { return {}; }
  DType activation_type() const noexcept override { return DType::kBF16; }
  void* allocate(std::size_t bytes) override {
    ++allocations;
    memory = std::make_unique<std::byte[]>(bytes);
    return memory.get();
  }
  Linear prepare(std::span<const Matrix> parts) override {
    Linear linear;
    linear.num_parts = static_cast<int>(parts.size());
    return linear;
  }
  void bind(const EngineContext&) override { log.emplace_back("bind"); }
  void know_tokens(const DraftedTokens& tokens) override {
    log.emplace_back(tokens.qkv.num_parts == 3 ? "know_tokens" : "know_tokens of what?");
  }
  void begin(const DraftBatch&, Stream) override {}
  void warm_up(const std::function<void(int, int)>&) override {}
  void replay(int, int, const std::function<void(int, int)>&) override {}
  void admit() override { log.emplace_back("admit"); }
  void fuse(const FuseParams& p) override { log.push_back("fuse " + words(p.rows)); }
  void qkv(const QkvParams& p) override {
    const char* const parts = p.parts == QkvParts::kAll ? "qkv" : p.parts == QkvParts::kQuery ? "q" : "kv";
    log.push_back(std::string(parts) + std::to_string(p.layer) + ' ' + words(p.rows) +
                  (p.target == KvTarget::kScratch ? " scratch" : "") + (p.gather ? " gather" : ""));
    if (p.layer == 0 && p.rows.pass == Pass::kStep) fed.push_back(p.hidden);
  }
  void attention(const AttentionParams& p) override {
    log.push_back("attention" + std::to_string(p.layer) + ' ' + words(p.rows));
  }
  void o_proj(const ProjectionParams& p) override { log.push_back("o_proj " + words(p.rows)); }
  void gate_up(const GateUpParams& p) override { log.push_back("gate_up " + words(p.rows)); }
  void down(const ProjectionParams& p) override {
    log.push_back("down " + words(p.rows));
    written.push_back(p.out);
  }
  void head(const HeadParams& p) override { log.push_back("head " + words(p.rows)); }
  void select(const SelectParams& p) override { log.push_back("select " + std::to_string(p.draft_step)); }
  void tree(const VerifyBatch&, Stream) override {}

  int allocations = 0;
  std::unique_ptr<std::byte[]> memory;
};

DraftConfig small_config(int layers) {
  DraftConfig config;
  config.hidden_size = config.target_hidden_size = 8;
  config.intermediate_size = 16;
  config.num_heads = config.num_kv_heads = 1;
  config.head_dim = config.rotary_dim = 8;
  config.vocab_size = config.draft_vocab_size = 32;
  config.max_positions = 64;
  config.num_layers = layers;
  return config;
}

Loop make_loop(Recorder& recorder, int layers, SpeculationConfig speculation) {
  DraftWeights weights;
  weights.layers.resize(static_cast<std::size_t>(layers));
  return {recorder, small_config(layers), speculation, {2, 8, 4}, weights, {}, {}, {}};
}

using Log = std::vector<std::string>;

}  // namespace

TEST_CASE("one layer: K and V for all rows, everything else for the row that is drafted from") {
  Recorder recorder;
  const Loop loop = make_loop(recorder, 1, {2, 1, 3});
  loop.cycle(2, 8);
  CHECK(recorder.log == Log{"bind", "know_tokens", "admit", "fuse all", "kv0 all", "q0 last gather", "attention0 last",
                            "o_proj last", "gate_up last", "down last", "head last", "select 0",
                            "qkv0 step1 scratch gather", "attention0 step1", "o_proj step1", "gate_up step1",
                            "down step1", "head step1", "select 1"});
  CHECK(recorder.allocations == 1);
}

TEST_CASE("two layers: every row through the first, the last row through the second; only layer 0 gathers in a step") {
  Recorder recorder;
  const Loop loop = make_loop(recorder, 2, {2, 1, 3});
  loop.cycle(2, 8);
  const Log extend = {"fuse all",    "qkv0 all", "attention0 all", "o_proj all",
                      "gate_up all", "down all", "kv1 all",        "q1 last gather"};
  CHECK(Log(recorder.log.begin() + 3, recorder.log.begin() + 11) == extend);
  const Log step = {"qkv0 step1 scratch gather", "attention0 step1", "o_proj step1", "gate_up step1", "down step1",
                    "qkv1 step1 scratch"};
  CHECK(Log(recorder.log.begin() + 17, recorder.log.begin() + 23) == step);
}

TEST_CASE("no steps: K and V are kept, nothing is drafted") {
  Recorder recorder;
  const Loop loop = make_loop(recorder, 1, {0, 1, 1});
  loop.cycle(2, 8);
  CHECK(recorder.log == Log{"bind", "know_tokens", "admit", "fuse all", "kv0 all", "select 0"});
}

TEST_CASE("each step reads what the step before wrote") {
  Recorder recorder;
  const Loop loop = make_loop(recorder, 1, {4, 2, 6});
  loop.cycle(2, 8);
  REQUIRE(recorder.fed.size() == 3);
  REQUIRE(recorder.written.size() == 4);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(recorder.fed[i] == recorder.written[i]);
    CHECK(recorder.written[i] != recorder.written[i + 1]);  // never over what is being read
  }
}

TEST_CASE("configurations that cannot work are refused by name") {
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kConfig);
      return std::string(error.what());
    }
    return std::string();
  };
  const DraftConfig config = small_config(1);
  CHECK(message([&] { SpeculationConfig{17, 1, 18}.check(config); }) == "num_steps: expected in 0..16, got 17");
  CHECK(message([&] { SpeculationConfig{3, 1, 3}.check(config); }) ==
        "num_draft_tokens: expected in 4..4 for num_steps=3, topk=1, got 3");
  CHECK(message([&] { SpeculationConfig{2, 17, 8}.check(config); }) == "topk: expected in 1..16, got 17");
  CHECK(message([&] { SpeculationConfig{2, 2, 4, Sampling::kRejection}.check(config); }) ==
        "topk: expected 1 with rejection sampling, got 2");
  DraftConfig short_context = config;
  short_context.max_positions = 4;
  CHECK(message([&] { SpeculationConfig{4, 1, 5}.check(short_context); }) == "num_steps: expected in 0..3, got 4");
  DraftConfig odd = config;
  odd.num_heads = 3;
  odd.num_kv_heads = 2;
  CHECK(message([&] { odd.check(); }) == "num_heads: expected a multiple of num_kv_heads=2, got 3");
  CHECK(message([&] { EngineLimits{4, 2, 8}.check(); }) == "max_rows: expected in 4..1073741824, got 2");
}
