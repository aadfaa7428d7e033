// What the draft model is, how far one cycle drafts, how large the engine may grow. Same names as eaglex/config.py.
#pragma once

#include <cstdint>
#include <limits>

namespace eaglex {

enum class AuxNorm : std::uint8_t { kNone, kWhole, kEach };
enum class Residual : std::uint8_t { kPreNorm, kNormed };
enum class NextHidden : std::uint8_t { kPreNorm, kNormed };
enum class EmbeddingNorm : std::uint8_t { kNormed, kNone };

struct DraftConfig {
  int hidden_size = 0;
  int target_hidden_size = 0;
  int intermediate_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  int draft_vocab_size = 0;
  int max_positions = 0;  // the target's context
  int num_layers = 1;
  int num_aux = 3;
  int rotary_dim = 0;
  float rms_norm_eps = 1e-5F;
  float rope_factor = 1.0F;  // on cosine and sine (yarn); the frequencies themselves are a tensor of DraftWeights
  AuxNorm aux_norm = AuxNorm::kNone;
  Residual residual = Residual::kPreNorm;
  NextHidden next_hidden = NextHidden::kPreNorm;
  EmbeddingNorm embedding_norm = EmbeddingNorm::kNormed;

  [[nodiscard]] constexpr int aux_width() const noexcept { return num_aux * target_hidden_size; }
  [[nodiscard]] constexpr int q_size() const noexcept { return num_heads * head_dim; }
  [[nodiscard]] constexpr int kv_size() const noexcept { return num_kv_heads * head_dim; }
  [[nodiscard]] constexpr int layer_input(int layer) const noexcept {
    return layer == 0 ? 2 * hidden_size : hidden_size;
  }
  void check() const;
};

inline constexpr int kMaxSteps = 16;
inline constexpr int kMaxTopk = 16;
inline constexpr int kMaxDraftTokens = 64;

enum class Sampling : std::uint8_t {
  kGreedy,     // top-k by probability; the verifier needs no draft probabilities
  kRejection,  // a chain drawn at the request's temperature; draft_probs are exported
};

// K = num_steps, k = topk, N = num_draft_tokens (root included). K = 0 keeps K and V up to date and drafts nothing.
struct SpeculationConfig {
  int num_steps = 0;
  int topk = 1;
  int num_draft_tokens = 1;
  Sampling sampling = Sampling::kGreedy;
  // A draft ends after the step whose best node has a cumulative log-probability below this; -infinity: never. It is
  // the logarithm of eaglex/config.py's stop_below.
  float stop_score = -std::numeric_limits<float>::infinity();

  // Candidates of one cycle before re-ranking: k, then k² per later step.
  [[nodiscard]] constexpr int num_candidates() const noexcept {
    return num_steps == 0 ? 0 : topk + (num_steps - 1) * topk * topk;
  }
  // Drafted nodes that pass through the model, and so have K and V: the frontier of all steps but the last.
  [[nodiscard]] constexpr int num_scratch_nodes() const noexcept { return num_steps <= 1 ? 0 : (num_steps - 1) * topk; }
  void check(const DraftConfig& config) const;
};

struct EngineLimits {
  int max_batch = 0;  // requests in one cycle, padded lanes included
  int max_rows = 0;   // rows of aux_hidden_states in one cycle
  int num_slots = 0;  // request slots; slot 0 is reserved for padded lanes
  // Most that a backend may keep of what follows from a drafted token alone (Backend::know_tokens).
  std::int64_t token_table_bytes = std::int64_t{1} << 30;
  void check() const;
};

}  // namespace eaglex
