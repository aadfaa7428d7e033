// tree: a slot's draft becomes the verifier's tokens, positions, links, mask, in the new batch's order (core/tree.h).
// Caller: once at the start of the next cycle, with its block as a kernel argument: nothing on the host outlives it.
// Bytes: 60 per node; the mask N · (seq_len + N) per request with kFull, N · N or N · 1..8 else.
// Mapping: grid (requests, shares of the mask); each CTA rebuilds the ≤ 64 nodes for itself, the first one writes them.
#include "core/tree.h"

#include "cuda/kernels.h"

namespace eaglex::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

// One node's ancestors and depth, and the nodes that count.
struct Nodes {
  std::uint64_t seen[kMaxDraftTokens];
  std::int32_t depth[kMaxDraftTokens];
  int used;
};

__device__ void build_nodes(const TreeSource& source, const VerifyBatch& batch, std::int64_t slot, std::int64_t seq_len,
                            Nodes& nodes) {
  if (threadIdx.x == 0) {
    nodes.used = usable_nodes(source, slot, seq_len, batch.num_draft_tokens - 1);
    const std::int64_t in = slot * source.num_drafted - 1;  // node i of the tree is entry i - 1
    for (int node = 0; node < batch.num_draft_tokens; ++node) {
      const int parent = node > 0 && node <= nodes.used ? source.results.parents[in + node] : 0;
      nodes.seen[node] = (std::uint64_t{1} << node) | (node == 0 ? 0 : nodes.seen[parent]);
      nodes.depth[node] = node == 0 ? 0 : nodes.depth[parent] + 1;
    }
  }
  __syncthreads();
}

__device__ void write_nodes(const TreeSource& source, const VerifyBatch& batch, std::int64_t lane, std::int64_t slot,
                            std::int64_t seq_len, const Nodes& nodes) {
  const int n = batch.num_draft_tokens;
  const std::int64_t out = lane * n;
  const std::int64_t in = slot * source.num_drafted - 1;
  const int node = static_cast<int>(threadIdx.x);
  if (node >= n) return;
  const bool drafted = node > 0 && node <= nodes.used;
  batch.draft_tokens[out + node] = drafted ? source.results.draft_tokens[in + node] : batch.bonus_tokens[lane];
  batch.positions[out + node] = seq_len + nodes.depth[node];
  batch.retrieve_index[out + node] = out + node;
  // Nodes are few and parents come first: the next one with a given parent is the first behind it.
  const int parent = drafted ? source.results.parents[in + node] : -1;
  std::int64_t child = -1, sibling = -1;
  for (int other = nodes.used; other > node; --other) {
    const int parent_of_other = source.results.parents[in + other];
    if (parent_of_other == node) child = other;
    if (parent_of_other == parent) sibling = other;
  }
  batch.retrieve_next_token[out + node] = child;
  batch.retrieve_next_sibling[out + node] = sibling;
}

// This CTA's share of the lane's mask, in words of 16 bytes where whole ones lie inside.
__device__ void write_mask(const VerifyBatch& batch, std::uint8_t* mask, std::int64_t seq_len, const Nodes& nodes) {
  const int n = batch.num_draft_tokens;
  const bool packed = batch.mask_mode == MaskMode::kQlenOnlyBitpack;
  const std::int64_t prefix = batch.mask_mode == MaskMode::kFull ? seq_len : 0;
  const std::int64_t width = packed ? packed_mask_bytes(n) : prefix + n;
  const std::int64_t total = n * width;
  const auto value = [&](std::int64_t i) {
    const auto node = static_cast<int>(i / width);
    const std::int64_t column = i % width;
    if (packed) return static_cast<std::uint8_t>(nodes.seen[node] >> (8 * column));
    return static_cast<std::uint8_t>(column < prefix ? 1 : (nodes.seen[node] >> (column - prefix)) & 1U);
  };
  constexpr int kWord = 16;
  const std::int64_t misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(mask) % kWord);
  const std::int64_t words = (misaligned + total + kWord - 1) / kWord;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.y) * kThreads;
  for (std::int64_t w = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x; w < words; w += stride) {
    const std::int64_t first = w * kWord - misaligned;
    const std::int64_t column = first % width;
    if (first >= 0 && column + kWord <= prefix && first + kWord <= total) {
      *reinterpret_cast<uint4*>(mask + first) = make_uint4(0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U);
      continue;
    }
    for (std::int64_t i = first < 0 ? 0 : first; i < first + kWord && i < total; ++i) mask[i] = value(i);
  }
}

// core's mask_offset with kFull as a reduction over the lanes: -1 where a length is out of range or the mask would not
// fit.
__device__ std::int64_t full_mask_offset(const VerifyBatch& batch, std::int32_t lane, std::int64_t* sums) {
  const std::int64_t n = batch.num_draft_tokens;
  std::int64_t before = 0;
  int bad = 0;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i <= lane; i += kThreads) {
    const std::int64_t seq_len = batch.seq_lens[i];
    if (seq_len < 0 || seq_len > batch.mask_size) {
      bad = 1;
    } else if (i < lane) {
      before += n * (seq_len + n);
    }
  }
  before = block_sum(before, sums);
  if (__syncthreads_or(bad) != 0) return -1;
  return before + n * (batch.seq_lens[lane] + n) <= batch.mask_size ? before : -1;
}

__global__ void __launch_bounds__(kThreads)
    tree_kernel(const __grid_constant__ TreeSource source, const __grid_constant__ VerifyBatch batch) {
  __shared__ Nodes nodes;
  __shared__ std::int64_t sums[kWarps];
  const auto lane = static_cast<std::int32_t>(blockIdx.x);
  const std::int64_t slot = batch.req_pool_indices[lane];
  const std::int64_t seq_len = batch.seq_lens[lane];
  const std::int64_t offset =
      batch.mask_mode == MaskMode::kFull ? full_mask_offset(batch, lane, sums) : mask_offset(batch, lane);
  build_nodes(source, batch, offset < 0 ? 0 : slot, seq_len, nodes);
  if (blockIdx.y == 0) write_nodes(source, batch, lane, slot, seq_len, nodes);
  if (offset >= 0) write_mask(batch, batch.mask + offset, seq_len, nodes);
}

}  // namespace

int compiled_for() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, tree_kernel), "this build's kernels (EAGLEX_CUDA_ARCHS) on this device");
  return attributes.ptxVersion;
}

void launch_tree(const EngineContext& context, const VerifyBatch& batch, int num_sms, cudaStream_t stream) {
  const TreeSource source = tree_source(context);
  // The full mask's size is known to the device alone: enough CTAs to write a long one at memory speed.
  const int shares = batch.mask_mode == MaskMode::kFull ? ceil_div(2 * num_sms, batch.batch) : 1;
  const dim3 grid(static_cast<unsigned>(batch.batch), static_cast<unsigned>(shares));
  launch("tree", tree_kernel, {grid, kThreads, 0, stream}, source, batch);
}

}  // namespace eaglex::cuda
