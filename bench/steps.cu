// Micro-benchmark of the streaming steps: correct first (against plain kernels, under delays, bit for bit), then timed.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90 -Icsrc -Ibench -o steps bench/steps.cu
// csrc/cuda/stream/*.cu
//        csrc/cuda/stream/*.cpp csrc/core/tensor.cpp
//   steps check | small | wide | time | few  [bf16 | fp8 | int4]
//
// `time`, `few` (batch 1 and 8): µs per step from CUDA events over replays of a graph of 4 steps; the weights of one step are many times the
// L2 cache.
#include "check_drafted.cuh"
#include "check_extend.cuh"
#include "timing.cuh"

namespace eaglex::bench {
namespace {

enum class Kernel { kQkv, kAttention, kOProj, kGateUp, kDown, kHead };
constexpr Kernel kChain[] = {Kernel::kQkv,    Kernel::kAttention, Kernel::kOProj,
                             Kernel::kGateUp, Kernel::kDown,      Kernel::kHead};
constexpr const char* kNames[] = {"qkv", "attention", "o_proj", "gate_up", "down", "head"};

void launch(const Model& m, Kernel kernel, int rows, cudaStream_t stream) {
  const Rows pass{Pass::kStep, 1, rows};
  switch (kernel) {
    case Kernel::kQkv:
      return stream::launch_qkv(m.plan, m.qkv_params(rows), m.context, m.batch.get(), stream);
    case Kernel::kAttention:
      return stream::launch_attention(m.plan,
                                      {pass, 0, m.q.get(), m.scratch_k.get(), m.scratch_v.get(), m.attention.get()},
                                      m.context, m.batch.get(), stream);
    case Kernel::kOProj:
      return stream::launch_projection(
          m.plan, {pass, m.o_proj.linear, m.attention.get(), m.residual.get(), m.middle.get()}, stream);
    case Kernel::kGateUp:
      return stream::launch_gate_up(
          m.plan, {pass, m.gate_up.linear, view_of(m.post_norm, 0, m.shape.hidden), m.middle.get(), m.act.get()},
          m.context, stream);
    case Kernel::kDown:
      return stream::launch_projection(m.plan, {pass, m.down.linear, m.act.get(), m.middle.get(), m.hidden.get()},
                                       stream);
    case Kernel::kHead:
      return m.launch_head(rows, stream);
  }
}

void step(const Model& m, int rows, cudaStream_t stream) {
  for (const Kernel kernel : kChain) launch(m, kernel, rows, stream);
}

// All that the chain writes, so that a read before the write shows.
void poison(const Model& m, cudaStream_t stream) {
  const auto fill = [stream](const auto& buffer) {
    stream::check(cudaMemsetAsync(buffer.get(), 0xFF, buffer.size() * sizeof(*buffer.get()), stream), "poison");
  };
  fill(m.q), fill(m.attention), fill(m.residual), fill(m.middle), fill(m.act), fill(m.hidden), fill(m.scratch_k),
      fill(m.scratch_v);
  fill(m.top_ids), fill(m.top_scores);
  if (m.offers != nullptr) fill(*m.offers);
  const auto partials = static_cast<std::size_t>(reinterpret_cast<std::byte*>(m.plan.counters) -
                                                 m.plan.partials);  // they lie in this order
  stream::check(cudaMemsetAsync(m.plan.partials, 0xFF, partials, stream), "poison");
}

struct Outputs {
  std::vector<std::byte> bytes;
  bool operator==(const Outputs&) const = default;
};

Outputs outputs_of(const Model& m, int rows) {
  Outputs out;
  const auto add = [&out](const auto& buffer, std::size_t count) {
    const auto host = buffer.host();
    const auto* const begin = reinterpret_cast<const std::byte*>(host.data());
    out.bytes.insert(out.bytes.end(), begin, begin + count * sizeof(host[0]));
  };
  const auto n = static_cast<std::size_t>(rows);
  add(m.q, n * m.shape.heads * m.shape.head_dim), add(m.attention, n * m.shape.heads * m.shape.head_dim);
  add(m.act, n * m.shape.intermediate), add(m.hidden, n * m.shape.hidden);
  add(m.top_ids, n * m.context.speculation.topk), add(m.top_scores, n * m.context.speculation.topk);
  return out;
}

// Each kernel delayed in turn, over poisoned buffers: a kernel that read or wrote before its wait would give other
// bits.
void check_delays(const Model& m, int rows, cudaStream_t stream, Verdict& verdict) {
  poison(m, stream);
  step(m, rows, stream);
  stream::check(cudaStreamSynchronize(stream), "step");
  const Outputs clean = outputs_of(m, rows);
  for (std::size_t delayed = 0; delayed < std::size(kChain); ++delayed) {
    poison(m, stream);
    for (std::size_t i = 0; i < std::size(kChain); ++i) {
      if (i == delayed) launch_delay(m.plan, 200'000, stream);
      launch(m, kChain[i], rows, stream);
    }
    stream::check(cudaStreamSynchronize(stream), "delayed step");
    if (outputs_of(m, rows) != clean) std::printf("  delay before %s\n", kNames[delayed]);
    verdict.require(outputs_of(m, rows) == clean, "same bits under a delay");
  }
}

void check_repeats(const Model& m, int rows, int repeats, cudaStream_t stream, Verdict& verdict) {
  const Graph graph(stream, [&] {
    for (int i = 0; i < 2; ++i) step(m, rows, stream);
  });
  Outputs first;
  bool same = true;
  for (int i = 0; i < repeats; ++i) {
    if (i % 8 == 0) poison(m, stream);
    graph.launch();
    stream::check(cudaStreamSynchronize(stream), "replay");
    if (i == 0) first = outputs_of(m, rows);
    same = same && outputs_of(m, rows) == first;
  }
  verdict.require(same, "same bits in every replay");
}

void check_model(Model& m, const std::vector<int>& sizes, cudaStream_t stream, Verdict& verdict) {
  const int topk = m.context.speculation.topk;
  for (const int rows : sizes) {
    if (rows % topk != 0) continue;
    m.set_lanes(rows / topk);
    for (const stream::Reduction reduction : {stream::Reduction::kOwner, stream::Reduction::kLastArriver}) {
      m.plan.reduction = reduction;
      const int before = verdict.wrong;
      poison(m, stream);
      step(m, rows, stream);
      stream::check(cudaStreamSynchronize(stream), "step");
      check_qkv(m, rows, verdict);
      check_attention(m, Pass::kStep, rows, verdict);
      check_projection("o_proj", m.o_proj, m.attention, m.residual, m.middle, rows, verdict);
      check_gate_up(m, rows, verdict);
      check_projection("down", m.down, m.act, m.middle, m.hidden, rows, verdict);
      check_head(m, rows, verdict);
      if (m.rescores) {
        m.rescores = false;
        m.launch_head(rows, stream);
        synchronize(stream);
        check_head(m, rows, verdict);
        m.rescores = true;
      }
      if (topk == 1) {
        check_fuse(m, rows, stream, verdict);
        check_extend_qkv(m, rows, stream, verdict);
        const AttentionParams params{{Pass::kExtendLast, 0, rows}, 0, m.q.get(), nullptr, nullptr, m.attention.get()};
        stream::launch_attention(m.plan, params, m.context, m.batch.get(), stream);
        synchronize(stream);
        check_attention(m, Pass::kExtendLast, rows, verdict);
      }
      check_drafted(m, rows, stream, verdict);
      check_head_switches(m, rows, stream, verdict);
      if (verdict.wrong != before) {
        std::printf("  ^ %s, %d rows, topk %d, %s\n", m.shape.name.c_str(), rows, topk,
                    reduction == stream::Reduction::kLastArriver ? "last arriver" : "owner");
      }
    }
    m.plan.reduction = stream::Reduction::kOwner;
  }
}

// fuse, and K and V, of more rows than a step has.
void check_wide(Model& m, cudaStream_t stream, Verdict& verdict) {
  for (const int rows : {65, 99, 128}) {
    if (rows > stream::most_rows(m.plan.device, stream::Precision::kBf16)) continue;
    m.set_lanes(rows);
    for (const stream::Reduction reduction : {stream::Reduction::kOwner, stream::Reduction::kLastArriver}) {
      if (rows == 99 && reduction == stream::Reduction::kLastArriver) continue;
      m.plan.reduction = reduction;
      poison(m, stream);
      check_fuse(m, rows, stream, verdict);
      if (m.qkv.tiles->precision == stream::Precision::kBf16) check_extend_qkv(m, rows, stream, verdict);
    }
    m.plan.reduction = stream::Reduction::kOwner;
  }
}

std::size_t weight_bytes(const Shape& s, int bits) {
  const auto n = [bits](std::int64_t x) {
    return static_cast<std::size_t>(x * bits / 8 + (bits == 4 ? x / 128 * 2 : 0));
  };
  return n(static_cast<std::int64_t>(s.heads + 2 * s.kv_heads) * s.head_dim * 2 * s.hidden) +
         n(static_cast<std::int64_t>(s.heads) * s.head_dim * s.hidden) + n(3LL * s.intermediate * s.hidden) +
         n(static_cast<std::int64_t>(s.draft_vocab) * s.hidden);
}

void time_model(const Shape& shape, DType type, double ceiling, const std::vector<int>& sizes, cudaStream_t stream) {
  Model m(shape, 1, type);
  const int bits = type == DType::kBF16 ? 16 : type == DType::kF8 ? 8 : 4;
  const double floor_us = static_cast<double>(weight_bytes(shape, bits)) / ceiling * 1e6;
  double first = 0;
  for (const int rows : sizes) {
    m.set_lanes(rows);
    const auto run = [&] {
      const Graph graph(stream, [&] {
        for (int i = 0; i < 4; ++i) step(m, rows, stream);
      });
      return graph.time_us() / 4;
    };
    const auto alone = [&](Kernel kernel) {
      const Graph graph(stream, [&] {
        for (int i = 0; i < 6; ++i) launch(m, kernel, rows, stream);
      });
      return graph.time_us() / 6;
    };
    const double us = run();
    m.plan.reduction = stream::Reduction::kLastArriver;
    const double last = run();
    m.plan.reduction = stream::Reduction::kOwner;
    const bool pdl = m.plan.pdl;
    m.plan.pdl = false;
    const double plain = run();
    m.plan.pdl = pdl;
    if (rows == 1) first = us;
    std::printf(
        "  %-22s batch %2d: %7.1f us (%.2fx of batch 1, %3.0f%% of ceiling, floor %.1f); last arriver %7.1f; no PDL "
        "%7.1f; alone",
        shape.name.c_str(), rows, us, us / first, 100 * floor_us / us, floor_us, last, plain);
    for (const Kernel kernel : kChain) std::printf(" %s %.1f", kNames[static_cast<int>(kernel)], alone(kernel));
    if (m.rescores) {
      m.rescores = false;
      std::printf(" scan %.1f", alone(Kernel::kHead));
      m.rescores = true;
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

int run(const std::string& what, const std::string& precision) {
  const DType type = precision == "fp8" ? DType::kF8 : precision == "int4" ? DType::kI4 : DType::kBF16;
  const Shape llama{"H4096/I14336/V32k", 4096, 14336, 32, 8, 128, 32000, 32000, 128};
  const Shape kimi{"H7168/I18432/V32k", 7168, 18432, 64, 8, 128, 32000, 32000, 128};
  const Shape oss{"H2880/I17280/V32k", 2880, 17280, 64, 8, 64, 32000, 32000, 64};
  // Small and awkward: K in halves of a chunk, a vocabulary that no tile divides, RoPE on half of each head.
  const Shape odd{"H320/I448/V1000", 320, 448, 4, 2, 64, 1000, 500, 32};
  // As small, but INT4's groups lie within the two halves of qkv's inputs.
  const Shape even{"H384/I448/V1000", 384, 448, 4, 2, 64, 1000, 500, 32};
  cudaStream_t stream = nullptr;
  stream::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Verdict verdict;
  if (what == "small" || what == "check") {
    for (const int topk : {1, 4, 16}) {
      Model m(type == DType::kI4 && topk != 4 ? even : odd, topk, type);
      check_model(m,
                  what == "small" ? std::vector<int>{1, 16, 64}
                                  : std::vector<int>{1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64},
                  stream, verdict);
      if (topk == 1) check_wide(m, stream, verdict);
      if (what == "check") {
        for (const int rows : {16, 64}) {
          m.set_lanes(rows / topk);
          check_delays(m, rows, stream, verdict);
          check_repeats(m, rows, 200, stream, verdict);
        }
      }
    }
  }
  if (what == "wide") {
    // INT4's qkv is one only where groups lie within its halves.
    for (const Shape& shape : type == DType::kI4 ? std::vector<Shape>{odd, even} : std::vector<Shape>{odd}) {
      Model m(shape, 1, type);
      check_wide(m, stream, verdict);
      std::printf("  wide alone: %d checks, %d wrong, worst %.2f\n", verdict.checks, verdict.wrong, verdict.worst);
      check_model(m, {17, 32, 33, 64}, stream, verdict);
    }
  }
  if (what == "check") {
    for (const Shape& shape : {llama, oss}) {
      Model m(shape, 1, type);
      check_model(m, {1, 8, 12, 32, 64}, stream, verdict);
      for (const int rows : {1, 8, 64}) {
        m.set_lanes(rows);
        check_delays(m, rows, stream, verdict);
        check_repeats(m, rows, 40, stream, verdict);
      }
    }
  }
  if (what == "time" || what == "few") {
    const std::vector<int> sizes = what == "few" ? std::vector<int>{1, 8} : std::vector<int>{1, 8, 16, 32, 64};
    const double ceiling = read_ceiling(stream);
    std::printf("  read ceiling %.3f TB/s\n", ceiling * 1e-12);
    for (const Shape& shape : {llama, kimi, oss}) time_model(shape, type, ceiling, sizes, stream);
  }
  if (verdict.checks > 0)
    std::printf("  %s %s: %d checks, %d wrong, worst error %.2f of PyTorch's\n", what.c_str(), precision.c_str(),
                verdict.checks, verdict.wrong, verdict.worst);
  return verdict.wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace eaglex::bench

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return eaglex::bench::run(argc > 1 ? argv[1] : "time", argc > 2 ? argv[2] : "bf16");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "steps: %s\n", error.what());
    return 2;
  }
}
