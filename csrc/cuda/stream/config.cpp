// Choice of tile, stages and grid from shapes and device.
#include "cuda/stream/config.h"

#include <algorithm>

#include "core/error.h"

namespace eaglex::stream {
namespace {

constexpr int kMinStages = 2;
constexpr int kStagesBesideX = 8;  // enough, where a block keeps x

// Where two teams of warps take chunks in turn (paired.cuh) a stage must be of one team in every round: the barriers tell
// rounds apart by their parity, and a team that meets a stage every other round only could be two rounds off.
int fit_stages(const GemmProblem& problem, const GemmConfig& config, int kept_chunks, int budget) {
  const int teams = is_paired(problem.weight_bits, config.token_tiles) && config.token_tiles == 1 ? 2 : 1;
  int stages = kMaxStages;
  while (stages > 0 && shared_layout(problem, config.token_tiles, config.chunk_k, stages, kept_chunks).total > budget)
    --stages;
  return stages / teams * teams;
}

// Chunks whose x a block keeps, if that leaves a ring as deep as x in every stage would, or deep enough.
int chunks_kept(const GemmProblem& problem, const GemmConfig& config, int units, int budget) {
  if (problem.weight_bits != 4 || problem.tokens > 1) return 0;
  const int chunks = std::min(problem.segments * config.chunks_per_segment, (units + config.grid - 1) / config.grid);
  const int stages = fit_stages(problem, config, chunks, budget);
  return stages >= std::min(config.stages, kStagesBesideX) ? chunks : 0;
}

// A few blocks fewer, where each then has an equal part of one tile: two pieces and their ends, one behind the other, cost
// more than a chunk of few bits. (With whole tiles, as a head of 32,000 rows would have in 250 blocks, it does not pay.)
int even_grid(int units, int per_tile, int most) {
  for (int grid = most; grid > most * 15 / 16; --grid) {
    if (units % grid == 0 && per_tile % (units / grid) == 0) return grid;
  }
  return most;
}

}  // namespace

bool streamable(const GemmProblem& problem) {
  return problem.rows > 0 && problem.k > 0 && problem.k % kKMultiple == 0 && problem.segments >= 1 &&
         problem.segments <= kMaxSegments && problem.tokens >= 1 &&
         problem.tokens <= most_tokens(problem.wgmma, problem.weight_bits);
}

GemmConfig configure(const GemmProblem& problem, const DeviceLimits& device) {
  expect_range("rows", problem.rows, 1, 1 << 24);
  expect(problem.k > 0 && problem.k % kKMultiple == 0, ErrorCode::kConfig, "k", concat("a multiple of ", kKMultiple),
         problem.k);
  expect_range("segments", problem.segments, 1, kMaxSegments);
  expect_range("tokens", problem.tokens, 1, most_tokens(problem.wgmma, problem.weight_bits));

  GemmConfig config;
  config.token_tiles = problem.tokens <= 8    ? 1
                       : problem.tokens <= 16 ? 2
                       : problem.tokens <= 32 ? 4
                       : problem.tokens <= 64 ? 8
                                              : 16;
  config.tile_rows = tile_rows_for(config.token_tiles);
  config.chunk_k = chunk_bytes(problem.weight_bits, config.token_tiles) * 8 / problem.weight_bits / config.tile_rows;
  config.row_tiles = (problem.rows + config.tile_rows - 1) / config.tile_rows;
  config.chunks_per_segment = (problem.k + config.chunk_k - 1) / config.chunk_k;
  const int units = config.row_tiles * problem.segments * config.chunks_per_segment;

  const bool wide = problem.tokens > kMaxTokens;
  const int slot = wide ? device.shared_per_block : std::min(slot_bytes(device), device.shared_per_block);
  config.stages = fit_stages(problem, config, 0, slot);
  config.in_slot = !wide && config.stages >= kMinStages;
  if (!config.in_slot) config.stages = fit_stages(problem, config, 0, device.shared_per_block);
  expect(config.stages >= kMinStages, ErrorCode::kConfig, "shared_per_block",
         concat("at least ", shared_layout(problem, config.token_tiles, config.chunk_k, kMinStages).total, " bytes"),
         device.shared_per_block);
  const int slots = std::max(slots_of(device) - problem.spare_slots, device.num_sms);
  config.grid = std::min(config.in_slot ? slots : device.num_sms, units);
  if (problem.weight_bits == 4 && problem.tokens == 1)
    config.grid = even_grid(units, problem.segments * config.chunks_per_segment, config.grid);
  config.split = split_of(units, config.grid);
  config.kept_chunks = config.in_slot ? chunks_kept(problem, config, units, slot) : 0;
  if (config.kept_chunks > 0) config.stages = fit_stages(problem, config, config.kept_chunks, slot);
  config.shared_bytes = std::max(
      slot, shared_layout(problem, config.token_tiles, config.chunk_k, config.stages, config.kept_chunks).total);
  return config;
}

bool sums_in_slices(const GemmProblem& problem, const GemmConfig& config) {
  const int per_tile = problem.segments * config.chunks_per_segment;
  return config.token_tiles >= 8 && per_tile >= (config.token_tiles > 8 ? 2 : 7) * config.split.share;
}

std::size_t partial_bytes(const GemmConfig& config, int segments) {
  // Per block two tiles that it shares with others (its first and its last), per segment [tile_rows][8·token_tiles]
  // sums and one row more of squares.
  const std::size_t slot = static_cast<std::size_t>(config.tile_rows + 1) * 8 * config.token_tiles * sizeof(float);
  return static_cast<std::size_t>(config.grid) * 2 * segments * slot;
}

}  // namespace eaglex::stream
