// What can be streamed, tiles and workspace, and each step as its launches.
#include "cuda/fast.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cuda/guards.h"
#include "cuda/stream/check.h"
#include "cuda/stream/steps.h"
#include "cuda/stream/switches.h"

namespace eaglex::cuda {
namespace {

using stream::kKMultiple;
using stream::kMaxTokens;

constexpr int kOldest = 90;  // bulk copies and programmatic dependent launch

bool wants_plain() {
  const char* const chain = std::getenv("EAGLEX_CHAIN");
  if (chain == nullptr || std::strcmp(chain, "fast") == 0) return false;
  expect(std::strcmp(chain, "plain") == 0, ErrorCode::kConfig, "EAGLEX_CHAIN", "plain or fast", chain);
  return true;
}

bool aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

std::int64_t rows_of(const Linear& linear) {
  std::int64_t rows = 0;
  for (int i = 0; i < linear.num_parts; ++i) rows += linear.parts[i].shape[0];
  return rows;
}

stream::Precision precision_of(const Linear& linear, const DraftConfig& config) {
  const bool is_qkv = linear.num_parts == 3;
  const auto segments = is_qkv ? static_cast<int>(linear.parts[0].shape[1] / config.hidden_size) : 1;
  return stream::precision_of({linear.parts, static_cast<std::size_t>(linear.num_parts)}, segments);
}

// The three kinds of matrix differ in how many are read together.
stream::TileOrder order_of(const Linear& linear, const DraftConfig& config) {
  return linear.num_parts == 3   ? stream::qkv_order(config)
         : linear.num_parts == 2 ? stream::kGateUpOrder
                                 : stream::kNaturalOrder;
}

stream::StreamNeeds needs_of(const FastChain::Setup& setup) {
  const DraftConfig& config = setup.context.config;
  stream::StreamNeeds needs;
  for (const Linear& linear : setup.weights) {
    needs.max_rows = std::max(needs.max_rows, static_cast<int>(rows_of(linear)));
    needs.max_k = std::max(needs.max_k, static_cast<int>(linear.parts[0].shape[1]));
  }
  needs.max_segments = std::max(2, config.num_aux);
  needs.topk = setup.context.speculation.topk;
  needs.head_dim = config.head_dim;
  return needs;
}

class StreamChain final : public FastChain {
 public:
  explicit StreamChain(const Setup& setup)
      : context_(setup.context),
        batch_(setup.batch),
        pool_k_(setup.pool_k.begin(), setup.pool_k.end()),
        pool_v_(setup.pool_v.begin(), setup.pool_v.end()),
        attends_(stream::attends(stream::current_device(), context_.config.head_dim)),
        begins_early_(begins_early(setup.context)) {
    const stream::DeviceLimits device = stream::current_device();
    const stream::StreamNeeds needs = needs_of(setup);
    for (const Linear& linear : setup.weights) {
      const bool is_fc = &linear == setup.weights.data();  // the first that a loop prepares; down_proj may be as wide
      for (int i = 0; i < linear.num_parts && !is_fc; ++i) {
        if (linear.num_parts < 3 || i == 0) only_skinny_.insert(linear.parts[i].data);
      }
      stream::Tiles& tiles = tiles_[linear.parts[0].data];
      if (tiles.data != nullptr) continue;
      const stream::Precision precision = precision_of(linear, context_.config);
      void* const memory = setup.tiles(stream::tile_bytes(rows_of(linear), linear.parts[0].shape[1], precision));
      tiles = stream::retile({linear.parts, static_cast<std::size_t>(linear.num_parts)},
                             order_of(linear, context_.config), precision, memory, nullptr);
    }
    plan_ = stream::make_plan(device, needs, setup.device(stream::workspace_bytes(device, needs)));
    plan_.failed = static_cast<std::uint32_t*>(setup.pinned(sizeof(std::uint32_t)));
    plan_.drafting = setup.drafting;
    if (setup.head_scores == HeadScores::kMadeExact) {
      const std::size_t bytes = stream::head_offer_bytes(context_.config.draft_vocab_size, needs.topk);
      plan_.head_offers = static_cast<std::uint64_t*>(setup.device(bytes));
    }
    plan_.pool_k = pool_k_.data();
    plan_.pool_v = pool_v_.data();
    live_.count = static_cast<std::int32_t*>(setup.device(sizeof(std::int32_t)));
    live_.rows = static_cast<LiveRow*>(setup.device(LiveRows::kMost * sizeof(LiveRow)));
    stream::check(cudaStreamSynchronize(nullptr), "retile");  // the originals may be freed now
  }

  [[nodiscard]] LiveRows live_rows() const noexcept override { return live_; }

  [[nodiscard]] std::size_t token_bytes() const override {
    const DraftConfig& config = context_.config;
    const bool steps = context_.speculation.num_steps > 1 && context_.speculation.topk <= kMaxTokens;
    if (!steps) return 0;
    const std::size_t bytes = static_cast<std::size_t>(config.draft_vocab_size) *
                              static_cast<std::size_t>(stream::token_product_width(config)) * sizeof(__nv_bfloat16);
    return static_cast<std::int64_t>(bytes) <= context_.limits.token_table_bytes ? bytes : 0;
  }

  void know_tokens(const DraftedTokens& tokens, void* memory) override {
    DraftedTokens known = tokens;
    known.qkv = tiled(tokens.qkv);
    auto* const products = static_cast<__nv_bfloat16*>(memory);
    stream::StreamPlan plan = plan_;
    plan.pdl = false;                                  // on the default stream
    plan.reduction = stream::Reduction::kLastArriver;  // what a wait in vain would leave stays in the table
    stream::launch_token_products(plan, known, context_.config, products, nullptr);
    stream::check(cudaStreamSynchronize(nullptr), "token products");
    plan_.token_products = products;
  }

  // With one layer a prompt is fc and the projections of K and V; the rest sees one row per request.
  [[nodiscard]] bool reads_original(const void* matrix) const override {
    const bool frontier_fits = context_.limits.max_batch * context_.speculation.topk <= kMaxTokens;
    return context_.config.num_layers > 1 || !frontier_fits || !only_skinny_.contains(matrix);
  }

  // Counters and words keep what a wait in vain has left, and graphs hold the launches as they are: behind all cycles so
  // far (they follow one another, on whatever streams) all of it is put right in the device's memory.
  void heal(cudaStream_t to) override {
    if (*static_cast<volatile std::uint32_t*>(plan_.failed) == 0) return;
    cudaStreamCaptureStatus capture{};
    stream::check(cudaStreamIsCapturing(to, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) return;
    const cuda::RelaxedCapture relaxed;
    const std::size_t counters = static_cast<std::size_t>(stream::num_counters(plan_.needs)) * sizeof(std::uint32_t);
    const std::size_t words = stream::word_count(plan_.device) * sizeof(std::uint64_t);
    stream::check(cudaMemsetAsync(plan_.counters, 0, counters, to), "clearing counters");
    for (std::uint64_t* const of : {plan_.words, plan_.early_words})
      stream::check(cudaMemsetAsync(of, 0xFF, words, to), "clearing words");
    stream::check(cudaMemsetAsync(plan_.broken, 0, sizeof(*plan_.broken), to), "clearing words");
    stream::check(cudaMemsetAsync(plan_.never_wait, 1, sizeof(*plan_.never_wait), to), "switching reductions");
    stream::check(cudaStreamSynchronize(to), "waiting for launches that are void");
    *static_cast<volatile std::uint32_t*>(plan_.failed) = 0;
    lost_ = true;
  }

  void check(cudaStream_t to) override {
    heal(to);
    if (!std::exchange(lost_, false)) return;
    fail(
        ErrorCode::kDevice, "streaming kernels: expected all blocks of a launch to run at once, got one that waited ",
        "for another in vain: drafts since the last call are void. From now on no block of this engine waits, as with ",
        "EAGLEX_STREAM_REDUCTION=last");
  }

  bool fuse(const FuseParams& params, cudaStream_t to) override {
    FuseParams launch = params;
    launch.fc = tiled(params.fc);
    return in_parts(launch.rows, launch.fc, [&](const Rows& rows, const stream::StreamPlan& plan) {
      launch.rows = rows;
      stream::launch_fuse(plan, launch, context_, batch_, to);
    });
  }

  bool qkv(const QkvParams& params, cudaStream_t to) override {
    QkvParams launch = params;
    launch.qkv = tiled(params.qkv);
    if (params.parts == QkvParts::kKeyValue) {
      rows_.reset();  // of a cycle that came to no queries
      if (joins(params.rows)) rows_ = launch;
      if (rows_) return true;
    }
    last_queries_ = params.parts == QkvParts::kQuery && rows_.has_value();
    if (last_queries_) {
      launch = *std::exchange(rows_, std::nullopt);
      launch.parts = QkvParts::kAll;
      if (launch.layer == 0) plan_.embed_tokens = launch.embed_tokens.data;
      return in_parts(launch.rows, launch.qkv, [&](const Rows& rows, stream::StreamPlan plan) {
        launch.rows = rows;
        plan.last_queries = true;
        stream::launch_qkv(plan, launch, context_, batch_, to);
      });
    }
    if (params.parts == QkvParts::kKeyValue) {
      return in_parts(params.rows, launch.qkv, [&](const Rows& rows, const stream::StreamPlan& plan) {
        launch.rows = rows;
        stream::launch_qkv(plan, launch, context_, batch_, to);
      });
    }
    if (!takes(params.rows)) return false;
    if (params.layer == 0) plan_.embed_tokens = params.embed_tokens.data;
    stream::StreamPlan plan = plan_for(params.rows);
    if (params.rows.pass == Pass::kStep) {
      // Its own flag is raised by the kernel before it; that of the step before says early that nobody drafts.
      plan.needed_late = plan.needed;
      plan.needed = plan_.drafting + params.rows.step - 1;
      plan.hidden_is_there = begins_early_;
    }
    stream::launch_qkv(plan, launch, context_, batch_, to);
    return true;
  }

  bool attention(const AttentionParams& params, cudaStream_t to) override {
    if (!takes(params.rows) || !attends_) return false;
    stream::StreamPlan plan = plan_for(params.rows);
    plan.last_queries = last_queries_ && params.rows.pass == Pass::kExtendLast;
    stream::launch_attention(plan, params, context_, batch_, to);
    return true;
  }

  bool project(const ProjectionParams& params, cudaStream_t to) override {
    if (!takes(params.rows)) return false;
    ProjectionParams launch = params;
    launch.weight = tiled(params.weight);
    stream::launch_projection(plan_for(params.rows), launch, to);
    return true;
  }

  bool gate_up(const GateUpParams& params, cudaStream_t to) override {
    if (!takes(params.rows)) return false;
    GateUpParams launch = params;
    launch.gate_up = tiled(params.gate_up);
    stream::launch_gate_up(plan_for(params.rows), launch, context_, to);
    return true;
  }

  bool head(const HeadParams& params, cudaStream_t to) override {
    pending_.reset();
    releases_ = takes(params.rows) && plan_.pdl;
    if (!takes(params.rows)) return false;
    HeadParams launch = params;
    launch.lm_head = tiled(params.lm_head);
    const int blocks = stream::launch_head(plan_for(params.rows), launch, context_, to);
    if (context_.speculation.topk == 1) {
      pending_ = Pending{launch, blocks};
    } else {
      stream::launch_head_end(plan_for(params.rows), launch, blocks, nullptr, context_, batch_, to);
    }
    return true;
  }

  bool select(const SelectParams& params, cudaStream_t to) override {
    if (!pending_) return false;
    expect(pending_->head.draft_step == params.draft_step, ErrorCode::kConfig, "select: draft_step",
           concat("that of head, ", pending_->head.draft_step), params.draft_step);
    stream::launch_head_end(plan_for(pending_->head.rows), pending_->head, pending_->blocks, &params, context_, batch_,
                            to);
    pending_.reset();
    return true;
  }

  [[nodiscard]] bool releases() const override { return releases_; }

 private:
  struct Pending {
    HeadParams head;
    int blocks = 0;
  };

  // Whether K and V of an extend's rows wait for the queries of its last ones, so that one launch reads the three matrices
  // instead of two a part of them each. Queries of all rows cost little where these are few.
  [[nodiscard]] bool joins(const Rows& rows) const {
    return rows.max_rows <= kMaxTokens && context_.speculation.num_steps > 0;
  }

  [[nodiscard]] static bool takes(const Rows& rows) { return rows.max_rows >= 1 && rows.max_rows <= kMaxTokens; }

  // Rows of the first part of a pass, the rest comes in parts of `most`. admit lists the rows that count side by side: of
  // a chain of five steps half and fewer. So up to 96 rows the first part is a little larger than half, and those behind
  // the last row that counts take a microsecond. All rows of a prompt count: it reads the matrix once more.
  [[nodiscard]] static int first_part(int rows, int most) {
    if (rows > 32 && rows <= 64) return 32;
    return rows > 64 && rows <= 96 ? 64 : most;
  }

  // The batch's own rows, which may be more than a launch takes: reading the matrix as often is faster than the plain
  // chain.
  template <class Launch>
  bool in_parts(Rows rows, const Linear& matrix, Launch&& launch) const {
    if (rows.max_rows < 1 || rows.max_rows > LiveRows::kMost) return false;
    const int most = stream::most_rows(plan_.device, static_cast<const stream::Tiles*>(matrix.prepared)->precision);
    stream::StreamPlan plan = plan_for(rows);
    plan.live = live_;
    Rows part = rows;
    for (int size = first_part(rows.max_rows, most); plan.first_row < rows.max_rows; size = most) {
      part.max_rows = std::min(size, rows.max_rows - plan.first_row);
      launch(part, plan);
      plan.first_row += part.max_rows;
    }
    return true;
  }

  [[nodiscard]] Linear tiled(const Linear& linear) const {
    Linear with_tiles = linear;
    with_tiles.prepared = &tiles_.at(linear.parts[0].data);
    return with_tiles;
  }

  [[nodiscard]] stream::StreamPlan plan_for(const Rows& rows) const {
    stream::StreamPlan plan = plan_;
    if (rows.pass == Pass::kExtendLast) plan.needed = plan.drafting;
    if (rows.pass == Pass::kStep) plan.needed = plan.drafting + rows.step;
    return plan;
  }

  // Whether a chain's qkv may multiply its hidden states before it waits for head's second kernel, which must not replace
  // them. A draft that may stop would pay for the product of the first step that nobody needs: 5 to 10 µs.
  [[nodiscard]] static bool begins_early(const EngineContext& context) {
    return context.speculation.topk == 1 && context.config.next_hidden != NextHidden::kNormed &&
           std::isinf(context.speculation.stop_score);
  }

  EngineContext context_;
  const DraftBatch* batch_;
  std::vector<void*> pool_k_, pool_v_;
  bool attends_;
  bool begins_early_;
  std::unordered_map<const void*, stream::Tiles> tiles_;  // by where the first part's original lies
  std::unordered_set<const void*> only_skinny_;           // matrices that a draft of one layer uses on few rows only
  stream::StreamPlan plan_;
  LiveRows live_;
  std::optional<QkvParams> rows_;   // an extend's K and V that kQuery will launch
  bool last_queries_ = false;       // it has
  std::optional<Pending> pending_;  // a chain's head whose second kernel select() will launch
  bool releases_ = false;
  bool lost_ = false;  // a wait was in vain, and nobody has been told
};

}  // namespace

std::string FastChain::refusal(const Setup& setup) {
  const DraftConfig& config = setup.context.config;
  const SpeculationConfig& speculation = setup.context.speculation;
  if (speculation.sampling != Sampling::kGreedy) return "rejection sampling";
  if (setup.context.kv.dtype != DType::kBF16) return concat("draft_k of ", name_of(setup.context.kv.dtype));
  for (const Linear& linear : setup.weights) {
    for (int i = 0; i < linear.num_parts; ++i) {
      const Matrix& part = linear.parts[i];
      if (part.dtype != DType::kBF16 && !part.packed()) return concat("weights of ", name_of(part.dtype));
      if (!aligned(part.data)) return "a matrix that is not aligned to 16 bytes";
      if (part.shape[1] % kKMultiple != 0) return concat("a matrix of ", part.shape[1], " columns");
    }
  }
  const auto is_aligned = [](const void* layer) { return aligned(layer); };
  if (!std::ranges::all_of(setup.pool_k, is_aligned)) return "draft_k that is not aligned to 16 bytes";
  if (!std::ranges::all_of(setup.pool_v, is_aligned)) return "draft_v that is not aligned to 16 bytes";
  for (const int k : {config.hidden_size, config.target_hidden_size}) {
    if (k % kKMultiple != 0) return concat("hidden size ", k);
  }
  if (config.intermediate_size % 8 != 0) return concat("intermediate_size ", config.intermediate_size);
  if (config.head_dim != 64 && config.head_dim != 96 && config.head_dim != 128 && config.head_dim != 256)
    return concat("head_dim ", config.head_dim);
  if (config.rotary_dim % stream::kStripRows != 0) return concat("rotary_dim ", config.rotary_dim);
  if (config.num_aux > stream::kMaxSegments) return concat(config.num_aux, " auxiliary layers");
  const int capability = stream::current_device().compute_capability;
  if (capability < kOldest) return concat("compute capability ", capability / 10, ".", capability % 10);
  // PTX that the driver has compiled for this device: there the kernels have no bodies.
  if (setup.compiled_for < kOldest) return concat("kernels compiled for compute capability ", setup.compiled_for);
  return {};
}

bool FastChain::reads(const DraftBatch& batch) noexcept {
  return batch.aux_type == DType::kBF16 && reinterpret_cast<std::uintptr_t>(batch.aux_hidden_states) % 16 == 0 &&
         batch.aux_stride % 8 == 0;
}

std::unique_ptr<FastChain> FastChain::make(const Setup& setup) {
  if (wants_plain()) return nullptr;
  stream::check_switches();
  if (!refusal(setup).empty()) return nullptr;
  return std::make_unique<StreamChain>(setup);
}

}  // namespace eaglex::cuda
