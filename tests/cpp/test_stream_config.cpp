// How the streaming kernels are cut for a device: arithmetic of the host, so it is checked without a GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/stream/attention.h"
#include "cuda/stream/config.h"

using namespace eaglex;
using namespace eaglex::stream;

namespace {

void require(bool condition, const std::string& what) {
  CHECK_MESSAGE(condition, what);
}

struct NamedDevice {
  const char* name;
  DeviceLimits limits;
};
const NamedDevice kDevices[] = {{"A100", {108, 164 << 10, 163 << 10, 80}},
                                {"L40", {142, 100 << 10, 99 << 10, 89}},
                                {"H200", {132, 228 << 10, 227 << 10, 90}},
                                {"B200", {148, 228 << 10, 227 << 10, 100}},
                                {"RTX PRO 6000", {188, 100 << 10, 99 << 10, 120}}};

TEST_CASE("split_of: even, without gaps") {
  for (const int grid : {1, 3, 108, 132, 188}) {
    for (const int units : {188, 189, 500, 16000, 286720}) {
      const Split split = split_of(units, grid);
      int covered = 0;
      for (int block = 0; block < grid; ++block) {
        const int begin = split.first(block);
        const int end = split.first(block + 1);
        require(begin == covered && end - begin <= units / grid + 1, "the split is even and without gaps");
        covered = end;
        for (int unit = begin; unit < end; ++unit) {
          if (split.block_of(unit) != block) FAIL("block_of is the inverse of first");
        }
      }
      require(covered == units, "the split covers all units");
    }
  }
}

TEST_CASE("slots: two blocks and a small kernel per SM, never three") {
  for (const NamedDevice& device : kDevices) {
    const int block = slot_bytes(device.limits) + kReservedPerBlock;
    const int all = device.limits.shared_per_sm;
    require(kBlocksPerSm * block + kSmallKernelBytes + kReservedPerBlock <= all,
            concat(device.name, ": two blocks and a small kernel must fit"));
    require((kBlocksPerSm + 1) * block > all, concat(device.name, ": a third block must not fit"));
  }
}

TEST_CASE("configure: tiles, stages and slots on every device") {
  for (const NamedDevice& device : kDevices) {
    for (const int tokens : {1, 8, 9, 16, 17, 32, 33, 64}) {
      for (const bool is_head : {true, false}) {
        for (const int bits : {16, 8, 4}) {
          const GemmProblem head{32000, 4096, 1, tokens, true, bits, 1, 1088};
          const GemmProblem qkv{6144, 4096, 2, tokens, true, bits, 24, 0};
          const GemmProblem& problem = is_head ? head : qkv;
          const GemmConfig config = configure(problem, device.limits);
          const std::string what = concat(device.name, ", ", tokens, " tokens, ", bits, " bits");
          const int chunk = chunk_bytes(bits, config.token_tiles);
          require(config.token_tiles * 8 >= tokens, what + ": all tokens have a column");
          require(config.row_tiles * config.tile_rows >= problem.rows, what + ": all rows have a tile");
          require(config.chunks_per_segment * config.chunk_k >= problem.k, what + ": all of K has a chunk");
          require(config.tile_rows * config.chunk_k * bits / 8 == chunk, what + ": a chunk is 16 or 8 KB");
          require(bits != 4 || config.chunk_k % (kGroupBlocks * kKBlock) == 0, what + ": a chunk has whole groups");
          const int halves = kConsumerWarps * kStripRows / config.tile_rows;
          require(bits != 4 || config.chunk_k / halves % (kGroupBlocks * kKBlock) == 0,
                  what + ": and so have its halves");
          require(!is_paired(bits, config.token_tiles) || config.token_tiles > 1 || config.stages % 2 == 0,
                  what + ": a stage is one team's");
          require(config.stages >= 2 && config.shared_bytes <= device.limits.shared_per_block, what + ": fits a block");
          const SharedLayout at =
              shared_layout(problem, config.token_tiles, config.chunk_k, config.stages, config.kept_chunks);
          require(at.total <= config.shared_bytes, what + ": the layout fits");
          require(!config.in_slot || config.shared_bytes == slot_bytes(device.limits), what + ": takes its whole slot");
          if (device.limits.compute_capability == 90 || device.limits.compute_capability == 100) {
            require(config.in_slot && config.stages >= 3, what + ": at least 3 stages beside the next kernel");
          }
          if (tokens <= 8) require(config.in_slot, what + ": batch 1 to 8 is prefetched everywhere");
        }
      }
    }
  }
  bool refused = false;
  try {
    static_cast<void>(configure({64, 100, 1, 1}, kDevices[2].limits));
  } catch (const Error& error) {
    refused = error.code() == ErrorCode::kConfig &&
              std::string(error.what()).find("k: expected a multiple of 64, got 100") == 0;
  }
  require(refused, "k = 100 is refused by name");
}

TEST_CASE("configure: a single token's x is kept beside INT4, as much as any block needs") {
  for (const NamedDevice& device : kDevices) {
    for (const int k : {4096, 7168, 2880 / 64 * 64}) {
      for (const int segments : {1, 2}) {
        const GemmProblem problem{6144, k, segments, 1, true, 4, 24, 0};
        const GemmConfig config = configure(problem, device.limits);
        const std::string what = concat(device.name, ", K ", k, ", ", segments, " segments");
        require(config.chunk_k == 256, what + ": a warp has 16 bytes per lane");
        const int units = config.split.share + (config.split.extra > 0 ? 1 : 0);
        const int needed = std::min(units, segments * config.chunks_per_segment);
        require(config.kept_chunks == 0 || config.kept_chunks >= needed, what + ": a place for each chunk");
        if (device.limits.compute_capability != 90) continue;
        require(config.kept_chunks > 0 && config.stages >= 8, what + ": kept, beside a deep ring");
        const SharedLayout at = shared_layout(problem, 1, 256, config.stages, config.kept_chunks);
        require(at.x_sums - at.x == config.kept_chunks * 512 &&
                    at.x_squares - at.x_sums == config.kept_chunks * 4 * kKeptScaleBytes &&
                    at.exchange - at.x_squares >= segments * config.chunks_per_segment * 4 && at.exchange == at.gamma,
                what + ": x, its sums, its squares, and no gamma in the ring");
      }
    }
    for (const int bits : {16, 8, 4}) {
      for (const int tokens : {2, 8, 16, 64}) {
        const GemmProblem problem{6144, 4096, 1, tokens, true, bits, 24, 0};
        require(configure(problem, device.limits).kept_chunks == 0, concat(bits, " bits, ", tokens, " tokens"));
      }
    }
  }
}

TEST_CASE("configure: a single token's INT4 in a few blocks fewer where those fit the tiles") {
  const DeviceLimits h200 = [] {
    for (const NamedDevice& device : kDevices) {
      if (device.limits.compute_capability == 90) return device.limits;
    }
    return DeviceLimits{};
  }();
  const auto grid = [&](int rows, int k, int segments, int tokens, int bits) {
    return configure({rows, k, segments, tokens, true, bits, 24, 0}, h200).grid;
  };
  require(slots_of(h200) == 264, "an H200");
  require(grid(4096, 4096, 1, 1, 4) == 256, "o_proj of H4096: four blocks a tile");
  require(grid(4096, 14336, 1, 1, 4) == 256, "down of H4096: four blocks a tile");
  require(grid(32000, 4096, 1, 1, 4) == 264, "head: its tiles are smaller than shares");
  require(grid(28672, 4096, 1, 1, 4) == 264, "gate_up of H4096: no grid of at least 15/16 fits");
  require(grid(4096, 4096, 1, 2, 4) == 264 && grid(4096, 4096, 1, 1, 8) == 264, "x comes with each chunk");
}

TEST_CASE("configure: FP8 and INT4 by wgmma, up to 64 tokens") {
  for (const NamedDevice& device : kDevices) {
    if (device.limits.compute_capability != 90) continue;
    for (const int bits : {8, 4}) {
      for (const int tokens : {17, 32, 33, 64}) {
        for (const int segments : {1, 2}) {
          GemmProblem problem{32000, 4096, segments, tokens, true, bits, 24, 1088};
          problem.wgmma = true;
          const GemmConfig config = configure(problem, device.limits);
          const std::string what = concat(bits, " bits, ", tokens, " tokens, ", segments, " segments");
          const SharedLayout at = shared_layout(problem, config.token_tiles, config.chunk_k, config.stages);
          const int panels = config.chunk_k / kPanelK;
          require(config.tile_rows == 128 && config.chunk_k == panels * kPanelK && panels <= 2, what + ": panels");
          require(panels == (bits == 8 && tokens > 32 ? 1 : 2), what + ": how many");
          require(config.in_slot && config.stages >= 3 && at.total <= config.shared_bytes, what + ": fits its slot");
          require(at.x % 1024 == 0 && at.x >= config.stages * stage_bytes(bits, config.token_tiles) &&
                      at.gamma - at.x == config.stages * panels * config.token_tiles * 8 * 128,
                  what + ": rows of 128 bytes, swizzled by eights");
        }
      }
      GemmProblem more{4096, 4096, 1, 65, true, bits};
      more.wgmma = true;
      require(!streamable(more), concat(bits, " bits: 65 tokens"));
    }
  }
}

TEST_CASE("configure: more than 64 tokens have an SM for one block, and need wgmma") {
  for (const NamedDevice& device : kDevices) {
    if (device.limits.compute_capability != 90) continue;
    for (const int tokens : {17, 33, 64, 65, 97, 128}) {
      GemmProblem fuse{4096, 3 * 4096, 1, tokens, true};
      fuse.wgmma = true;
      const GemmConfig config = configure(fuse, device.limits);
      const std::string what = concat(device.name, ", ", tokens, " tokens");
      const SharedLayout at = shared_layout(fuse, config.token_tiles, config.chunk_k, config.stages);
      require(config.token_tiles * 8 >= tokens && config.tile_rows == 128 && config.chunk_k == 64, what + ": tiles");
      require(config.in_slot == (tokens <= kMaxTokens), what + ": two blocks per SM, or one");
      require(config.grid == device.limits.num_sms * (tokens <= kMaxTokens ? 2 : 1), what + ": all SMs");
      require(config.stages >= (tokens <= kMaxTokens ? 4 : 5) && at.total <= config.shared_bytes, what + ": fits");
      require(at.x % 1024 == 0 && at.gamma - at.x == config.stages * config.token_tiles * 8 * 128,
              what + ": rows of 128 bytes, swizzled by eights");
    }
  }
  require(!streamable({4096, 4096, 1, 65}), "65 tokens without");
}

TEST_CASE("sums_in_slices: matrices of few tiles and many rows of x") {
  DeviceLimits h200 = kDevices[0].limits;
  for (const NamedDevice& device : kDevices) {
    if (device.limits.compute_capability == 90) h200 = device.limits;
  }
  h200.num_sms = 132;
  const auto sliced = [&](int rows, int k, int segments, int tokens) {
    GemmProblem problem{rows, k, segments, tokens, true};
    problem.wgmma = true;
    return sums_in_slices(problem, configure(problem, h200));
  };
  require(sliced(4096, 4096, 1, 64) && sliced(4096, 14336, 1, 64), "o_proj and down of 64 rows");
  require(sliced(2048, 4096, 2, 48), "K and V of an extend");
  require(sliced(4096, 12288, 1, 128) && sliced(4096, 12288, 1, 65), "fuse of more than 64");
  require(!sliced(6144, 4096, 2, 64), "qkv: too few blocks a tile for a common wait");
  require(!sliced(28672, 4096, 1, 64) && !sliced(32000, 4096, 1, 64), "gate_up and head: two");
  require(!sliced(4096, 4096, 1, 32) && !sliced(4096, 4096, 1, 1), "few rows");
}

TEST_CASE("k_block_bytes: INT4's scales behind each group, the last one short") {
  require(k_block_bytes(16, 4) == 4 * 4096 && k_block_bytes(8, 4) == 4 * 2048, "no scales between");
  require(k_block_bytes(4, 4) == 4 * 1024 + 128 && k_block_bytes(4, 6) == 6 * 1024 + 256, "64 scales of 2 bytes");
  require(stage_bytes(16, 1) == 16384 && stage_bytes(8, 4) == 16384, "16 KB");
  require(stage_bytes(8, 8) == 8192 && stage_bytes(4, 4) == 8192 + 256, "with scales");
}

TEST_CASE("rotary_dim_at: every dim once, partners in one strip") {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (int rotary = 0; rotary <= head_dim; rotary += 16) {
      std::vector<int> dims;
      for (int row = 0; row < head_dim; ++row) {
        dims.push_back(rotary_dim_at(row, rotary));
        if (row % kStripRows >= 8 || row >= rotary) continue;
        require(rotary_dim_at(row + 8, rotary) == dims.back() + rotary / 2, "rows g and g + 8 are partners");
      }
      std::sort(dims.begin(), dims.end());
      for (int i = 0; i < head_dim; ++i) require(dims[static_cast<std::size_t>(i)] == i, "every dim has one row");
    }
  }
}

TEST_CASE("attention: beside one block of a matrix where the head is not too wide") {
  for (const NamedDevice& device : kDevices) {
    for (const int head_dim : {64, 96, 128, 256}) {
      const int ring = attention_ring(device.limits, head_dim);
      const int bytes = ring_bytes(head_dim, ring) + kAttentionStaticBytes;
      const std::string what = concat(device.name, ", head_dim ", head_dim);
      require(ring >= 1 && ring <= kMaxRing && bytes <= device.limits.shared_per_block, what + ": fits a block");
      if (head_dim <= 128) require(bytes <= slot_bytes(device.limits), what + ": keeps to its slot");
      if (device.limits.compute_capability == 90 && head_dim <= 128) require(ring >= 2, what + ": fetches ahead");
    }
  }
}

TEST_CASE("attention_grid: longer contexts keep more of the device busy") {
  require(length_class(0) == 0 && length_class(1536) == 0 && length_class(1537) == 1 && length_class(3073) == 2,
          "classes are powers of two of 1,536");
  require(length_class(131072) == 7 && length_class(std::int64_t{1} << 40) == kLengths - 1, "the last has no end");
  constexpr int kSlots = 264;
  const AttentionGrid one = attention_grid(kSlots, 1, 1, 4, 8);
  require(one.splits[0] == 8, "64 blocks for a request of 1,000 keys");
  require(one.splits[kLengths - 1] * one.tasks > kSlots * 9 / 10, "nearly all for a request of 131,072");
  const AttentionGrid many = attention_grid(kSlots, 64, 1, 4, 8);
  require(many.splits[0] == 1 && many.splits[kLengths - 1] <= 2, "64 requests are enough by themselves");
}

TEST_CASE("attention_grid: every query row has a task") {
  for (const NamedDevice& device : kDevices) {
    for (int rows = 1; rows <= kMaxTokens; ++rows) {
      for (const int width : {1, 4, 16}) {
        const AttentionGrid grid = attention_grid(slots_of(device.limits), rows, width, 8, 8);
        require(grid.tasks * grid.width >= rows * grid.packs * 8 && grid.packs * kPackedRows >= width * 8,
                "every query row has a task");
        for (const int splits : grid.splits) {
          require(splits >= 1 && (splits == 1 || grid.tasks * splits <= 4 * slots_of(device.limits)),
                  "split tasks fit their counters and parts");
        }
        for (const int context : {1, 1536, 1537, 131072, 1 << 30}) {
          require(attention_blocks(device.limits, grid, context) <= slots_of(device.limits),
                  "at most two blocks per SM");
        }
      }
    }
  }
}

TEST_CASE("head_offers: room for what every group offers, rows that begin at pairs") {
  for (const int vocab : {1, 63, 64, 65, 700, 32000, 163840}) {
    for (int topk = 1; topk <= 16; ++topk) {
      const HeadOffers offers = head_offers(vocab, topk);
      require(offers.count >= rescore_offers(vocab, topk), "all of them");
      require(offers.count - rescore_offers(vocab, topk) < group_offers(topk), "and less than a group more");
      require(offers.stride >= offers.count && offers.stride % 2 == 0, "pairs are read together");
    }
  }
}

}  // namespace
