// An engine of random bf16 weights on the device, with the host's side of it: KV pool, request table, one batch, and
// the verifier's buffers.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/rescore.h"
#include "cuda/factory.h"
#include "draft/engine.h"
#include "packed.cuh"
#include "random.cuh"
#include "recorder.h"

namespace eaglex::bench {

struct Shape {
  std::string name;
  int hidden = 0;
  int intermediate = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  int draft_vocab = 0;
};

// How the head is stored. What the presets of low-bit weights mean is INT4 whose best are made exact by the rows as they
// were.
enum class HeadKind { kPreset, kPlain, kFp8, kScan, kRescored };

inline HeadKind resolved(HeadKind kind, DType weights) {
  if (kind != HeadKind::kPreset) return kind;
  return weights == DType::kBF16 ? HeadKind::kPlain : HeadKind::kRescored;
}

struct Case {
  int batch = 1;
  int num_steps = 5;
  int topk = 1;
  int num_draft_tokens = 6;
  int context = 1024;
  float stop_score = -std::numeric_limits<float>::infinity();
  DType weights = DType::kBF16;  // or kF8, kI4: all matrices but fc
  int layers = 1;
  AuxNorm aux_norm = AuxNorm::kNone;
  Residual residual = Residual::kPreNorm;
  NextHidden next_hidden = NextHidden::kPreNorm;
  int max_context = 0;  // that the table has room for; 0: the context and little more
  HeadKind head = HeadKind::kPreset;
  bool token_table = true;  // as far as EngineLimits allows one
};

class Subject {
 public:
  Subject(const Shape& shape, const Case& c, std::uint32_t seed)
      : shape_(shape), case_(c), head_(resolved(c.head, c.weights)), seed_(seed) {
    constexpr int kRoom = 128;
    config_.hidden_size = config_.target_hidden_size = shape.hidden;
    config_.intermediate_size = shape.intermediate;
    config_.num_heads = shape.heads;
    config_.num_kv_heads = shape.kv_heads;
    config_.num_layers = c.layers;
    config_.aux_norm = c.aux_norm;
    config_.residual = c.residual;
    config_.next_hidden = c.next_hidden;
    config_.head_dim = config_.rotary_dim = shape.head_dim;
    config_.vocab_size = shape.vocab;
    config_.draft_vocab_size = shape.draft_vocab;
    config_.max_positions = std::max(c.context + kRoom, c.max_context);
    speculation_.num_steps = c.num_steps;
    speculation_.topk = c.topk;
    speculation_.num_draft_tokens = c.num_draft_tokens;
    speculation_.stop_score = c.stop_score;
    const std::int64_t slots = c.batch + 1, length = config_.max_positions, rows = rows_of_batch();
    auto recorder = std::make_unique<Recorder>(make_cuda_backend(0));
    recorder_ = recorder.get();

    EngineTensors tensors;
    tensors.req_to_token = ids<std::int32_t>({slots, length}, [&](std::int64_t i) {
      return i * 1000003 % (slots * length);  // a prime: each slot once, no two neighbours together
    });
    for (int layer = 0; layer < c.layers; ++layer) {
      for (std::vector<TensorView>* const pool : {&tensors.draft_k, &tensors.draft_v}) {
        pool->push_back(random({slots * length, shape.kv_heads, shape.head_dim}, 0, 1));
        written_.push_back(pool->back());
      }
    }
    const std::int64_t nodes = c.num_draft_tokens - 1;
    tensors.draft_tokens = empty(DType::kI64, {slots, nodes});
    tensors.parents = empty(DType::kI32, {slots, nodes});
    tensors.scores = empty(DType::kF32, {slots, nodes});
    tensors.num_nodes = empty(DType::kI32, {slots});
    tensors.drafted_for = empty(DType::kI64, {slots});
    tensors.counters = counters_ = empty(DType::kI64, {kNumLaneStatus});
    for (const TensorView& view :
         {tensors.draft_tokens, tensors.parents, tensors.scores, tensors.num_nodes, tensors.drafted_for})
      written_.push_back(view);
    EngineLimits limits{c.batch, static_cast<int>(rows), static_cast<int>(slots)};
    if (!c.token_table) limits.token_table_bytes = 0;
    engine_ = std::make_unique<DraftEngine>(std::move(recorder), config_, speculation_, limits, weights(), tensors);

    const std::int64_t b = c.batch, n = c.num_draft_tokens;
    const std::int64_t valid = std::min<std::int64_t>(n, 3);  // accepted of the cycle before
    batch_.aux_hidden_states = random({rows, config_.aux_width()}, 0, 1);
    batch_.input_ids = ids<std::int64_t>({rows}, [&](std::int64_t i) { return i * 7919 % shape.vocab; });
    batch_.row_start = ids<std::int32_t>({b + 1}, [&](std::int64_t i) { return i * n; });
    batch_.num_valid = ids<std::int32_t>({b}, [&](std::int64_t) { return valid; });
    batch_.draft_from = ids<std::uint8_t>({b}, [](std::int64_t) { return 1; });
    batch_.req_pool_indices = ids<std::int64_t>({b}, [](std::int64_t i) { return i + 1; });
    batch_.seq_lens = ids<std::int64_t>({b}, [&](std::int64_t) { return c.context; });

    other_ = batch_;
    other_.aux_hidden_states = random({rows, config_.aux_width()}, 0, 1);
    other_.input_ids = ids<std::int64_t>({rows}, [&](std::int64_t i) { return i * 104729 % shape.vocab; });
    other_.seq_lens = ids<std::int64_t>({b}, [&](std::int64_t i) { return c.context / 2 - i % 5; });

    verify_.mask_mode = MaskMode::kFull;
    verify_.req_pool_indices = batch_.req_pool_indices;
    verify_.seq_lens = ids<std::int64_t>({b}, [&](std::int64_t) { return c.context + valid; });
    verify_.bonus_tokens = ids<std::int64_t>({b}, [](std::int64_t i) { return i; });
    for (TensorView* const tensor : {&verify_.draft_tokens, &verify_.positions, &verify_.retrieve_index,
                                     &verify_.retrieve_next_token, &verify_.retrieve_next_sibling})
      *tensor = empty(DType::kI64, {b, n});
    verify_.mask = empty(DType::kU8, {b * n * (c.context + valid + n)});
    verified_ = {verify_.draft_tokens,          verify_.positions, verify_.retrieve_index, verify_.retrieve_next_token,
                 verify_.retrieve_next_sibling, verify_.mask};
    stream::check(cudaDeviceSynchronize(), "contents");  // they come by the default stream, others read them
  }

  void run(cudaStream_t stream) { engine_->run(batch_, stream); }
  void enqueue(cudaStream_t stream) { engine_->enqueue(batch_, stream); }
  // A cycle of as many rows with other tokens, states and lengths: it leaves other numbers wherever one puts any.
  void enqueue_other(cudaStream_t stream) { engine_->enqueue(other_, stream); }
  void tree(cudaStream_t stream) { engine_->tree(verify_, stream); }
  void warm_up() { engine_->warm_up(); }
  void aim(cudaStream_t stream) { recorder_->aim(stream); }
  // One cycle of raw launches, as the list of its steps.
  [[nodiscard]] std::vector<RecordedStep> record(cudaStream_t stream) {
    recorder_->start();
    engine_->enqueue(batch_, stream);
    return recorder_->stop();
  }

  // What a cycle writes: the pool's K and V, then the results.
  [[nodiscard]] const std::vector<TensorView>& written() const { return written_; }
  // What `tree` writes.
  [[nodiscard]] const std::vector<TensorView>& verified() const { return verified_; }
  // Whatever lies between the steps becomes NaN and -1.
  void poison(cudaStream_t stream) const { stream::check(recorder_->poison(stream), "poison"); }

  [[nodiscard]] const char* backend() const { return engine_->backend_name(); }
  // Whether steps read half of q, k and v's matrices, and a row of a table.
  [[nodiscard]] bool has_token_table() const {
    const std::int64_t width = static_cast<std::int64_t>(shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
    return case_.token_table && 2 * width * shape_.draft_vocab <= EngineLimits{}.token_table_bytes;
  }
  [[nodiscard]] std::size_t workspace_bytes() const { return engine_->workspace_bytes(); }
  // Cycles times requests that drafted to their end.
  [[nodiscard]] std::int64_t drafted() const {
    std::int64_t count = 0;
    stream::check(cudaMemcpy(&count, counters_.data, sizeof count, cudaMemcpyDeviceToHost), "counters");
    return count;
  }

  // Bytes that a step of a draft of one layer must read: its weights, and for attention K and V of the prefix.
  [[nodiscard]] double bytes(const std::string& step) const {
    const double h = shape_.hidden, i = shape_.intermediate, q = config_.q_size(), kv = config_.kv_size();
    double elements = 0;
    if (step == "fuse") elements = h * config_.aux_width();
    if (step == "qkv") elements = (q + 2 * kv) * (has_token_table() ? 1 : 2) * h;
    if (step == "attention") elements = 2 * kv * case_.context * case_.batch;
    if (step == "o_proj") elements = q * h;
    if (step == "gate_up") elements = 2 * i * h;
    if (step == "down") elements = i * h;
    if (step == "head") elements = h * shape_.draft_vocab;
    if (step == "fuse" || step == "attention") return 2 * elements;
    // FP8 has 4 bytes of scale per row besides, which is nothing; INT4 2 per 128 inputs.
    const DType type = step == "head" ? head_type() : case_.weights;
    const double few = type == DType::kF8 ? 1 : type == DType::kI4 ? 0.5 + 2.0 / kScaleGroup : 2;
    const double again = step == "head" && head_ == HeadKind::kRescored ? 2 * h * rescored(case_.topk) : 0;
    return few * elements + again * case_.batch * case_.topk;
  }
  [[nodiscard]] double step_bytes() const {
    double sum = 0;
    for (const char* const step : {"qkv", "attention", "o_proj", "gate_up", "down", "head"}) sum += bytes(step);
    return sum;
  }
  // An extend's tokens may be any.
  [[nodiscard]] double extend_bytes() const {
    return bytes("fuse") + step_bytes() + (has_token_table() ? bytes("qkv") : 0);
  }
  [[nodiscard]] double cycle_bytes() const { return extend_bytes() + (case_.num_steps - 1) * step_bytes(); }

 private:
  [[nodiscard]] std::int64_t rows_of_batch() const {
    return static_cast<std::int64_t>(case_.batch) * case_.num_draft_tokens;
  }

  TensorView empty(DType type, std::vector<std::int64_t> sizes) {
    TensorView view;
    view.dtype = type;
    view.device = {DeviceKind::kCuda, 0};
    view.rank = static_cast<int>(sizes.size());
    std::int64_t stride = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      view.shape[i] = sizes[i];
      view.stride[i] = stride;
      stride *= sizes[i];
    }
    memory_.push_back(std::make_unique<Buffer<bf16>>((static_cast<std::size_t>(stride) * size_of(type) + 1) / 2));
    view.data = memory_.back()->get();
    return view;
  }
  TensorView random(std::vector<std::int64_t> sizes, float mean, float scale) {
    TensorView view = empty(DType::kBF16, std::move(sizes));
    randomise(*memory_.back(), seed_ += 17, mean, scale);
    return view;
  }
  TensorView matrix(std::int64_t out, std::int64_t in) {
    return random({out, in}, 0, 1 / std::sqrt(static_cast<float>(in)));
  }
  eaglex::Matrix weight(std::int64_t out, std::int64_t in) {
    const TensorView plain = matrix(out, in);
    const eaglex::Matrix stored = stored_as(plain, case_.weights);
    if (stored.packed()) memory_.pop_back();
    return stored;
  }
  eaglex::Matrix stored_as(const TensorView& plain, DType type) {
    if (type == DType::kBF16) return plain;
    packed_.push_back(quantised(plain.as<const bf16>(), plain.shape[0], plain.shape[1], type));
    stream::check(cudaDeviceSynchronize(), "quantise");
    return packed_.back().matrix;
  }
  [[nodiscard]] DType head_type() const {
    return head_ == HeadKind::kPlain ? DType::kBF16 : head_ == HeadKind::kFp8 ? DType::kF8 : DType::kI4;
  }
  template <class T, class F>
  TensorView ids(std::vector<std::int64_t> sizes, F&& value) {
    const DType type = sizeof(T) == 1 ? DType::kU8 : sizeof(T) == 4 ? DType::kI32 : DType::kI64;
    TensorView view = empty(type, std::move(sizes));
    std::vector<T> values(static_cast<std::size_t>(view.numel()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(value(static_cast<std::int64_t>(i)));
    stream::check(cudaMemcpy(view.data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "ids");
    return view;
  }
  DraftWeights weights() {
    const std::int64_t h = shape_.hidden, i = shape_.intermediate, q = config_.q_size(), kv = config_.kv_size();
    DraftWeights w;
    w.embed_tokens = random({shape_.vocab, h}, 0, 0.02F);
    w.fc = matrix(h, config_.aux_width());
    if (case_.aux_norm == AuxNorm::kWhole) w.aux_norms = {random({config_.aux_width()}, 1, 0.1F)};
    for (int n = 0; n < config_.num_aux && case_.aux_norm == AuxNorm::kEach; ++n)
      w.aux_norms.push_back(random({h}, 1, 0.1F));
    for (int layer = 0; layer < case_.layers; ++layer) {
      const std::int64_t in = layer == 0 ? 2 * h : h;
      w.layers.push_back({random({h}, 1, 0.1F), layer == 0 ? random({h}, 1, 0.1F) : TensorView{}, weight(q, in),
                          weight(kv, in), weight(kv, in), weight(h, q), random({h}, 1, 0.1F), weight(i, h),
                          weight(i, h), weight(h, i)});
    }
    w.norm = random({h}, 1, 0.1F);
    const TensorView head = matrix(shape_.draft_vocab, h);
    w.lm_head = stored_as(head, head_type());
    if (head_ == HeadKind::kRescored) w.lm_head_rows = head;
    const std::int64_t apart = shape_.vocab / shape_.draft_vocab;
    w.d2t = ids<std::int64_t>({shape_.draft_vocab}, [&](std::int64_t d) { return d * apart - d; });
    const int half = config_.rotary_dim / 2;
    w.inv_freq = empty(DType::kF32, {half});
    std::vector<float> frequencies;
    for (int f = 0; f < half; ++f) frequencies.push_back(static_cast<float>(std::pow(5e5, -1.0 * f / half)));
    stream::check(cudaMemcpy(w.inv_freq.data, frequencies.data(), frequencies.size() * 4, cudaMemcpyHostToDevice),
                  "inv_freq");
    return w;
  }

  Shape shape_;
  Case case_;
  HeadKind head_;
  std::uint32_t seed_;
  DraftConfig config_;
  SpeculationConfig speculation_;
  std::vector<std::unique_ptr<Buffer<bf16>>> memory_;  // before the engine, which borrows it
  std::vector<Packed> packed_;
  TensorView counters_;
  std::vector<TensorView> written_, verified_;
  std::unique_ptr<DraftEngine> engine_;
  Recorder* recorder_ = nullptr;
  BatchTensors batch_, other_;
  VerifyTensors verify_;
};

}  // namespace eaglex::bench
