// Workspace and switches of the streaming kernels.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/workspace.h"
#include "cuda/stream/attention.h"
#include "cuda/stream/check.h"
#include "cuda/stream/steps.h"
#include "cuda/stream/switches.h"

namespace eaglex::stream {
namespace {

// What a variable holds, as its place among the names; 0 where it is not set. Anything else is a mistake that must not
// pass for the default.
int choice_of(const char* variable, std::initializer_list<const char*> names) {
  const char* const set = std::getenv(variable);
  if (set == nullptr) return 0;
  std::string expected;
  int at = 0;
  for (const char* const name : names) {
    if (std::strcmp(set, name) == 0) return at;
    expected += (at++ == 0 ? "" : " or ") + std::string(name);
  }
  fail(ErrorCode::kConfig, variable, ": expected ", expected, ", got ", set);
}

bool wants_pdl() {
  return choice_of("EAGLEX_PDL", {"1", "0"}) == 0;
}

Reduction wanted_reduction() {
  constexpr Reduction kReductions[] = {Reduction::kOwner, Reduction::kLastArriver};
  return kReductions[choice_of("EAGLEX_STREAM_REDUCTION", {"owner", "last"})];
}

// Under MPS, with a share of the card or not, other processes' kernels may hold the slots that a waiting block needs.
bool under_mps() {
  int device = 0;
  int enabled = 0;
  check(cudaGetDevice(&device), "device");
  if (cudaDeviceGetAttribute(&enabled, cudaDevAttrMpsEnabled, device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // a driver that does not know the attribute
    enabled = 0;
  }
  return enabled != 0 || std::getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") != nullptr;
}

// The most that any launch exchanges: 64 tokens, tiles of 128 rows, or as many tokens as fit one block per SM.
std::size_t most_partial_bytes(const DeviceLimits& device, const StreamNeeds& needs) {
  GemmConfig largest;
  largest.tile_rows = tile_rows_for(kMaxTokens / 8);
  largest.token_tiles = kMaxTokens / 8;
  largest.grid = slots_of(device);
  GemmConfig wide = largest;
  wide.token_tiles = most_rows(device, Precision::kBf16) / 8;
  wide.grid = device.num_sms;
  return std::max(partial_bytes(largest, needs.max_segments), partial_bytes(wide, needs.max_segments));
}

StreamPlan carve(const DeviceLimits& device, const StreamNeeds& needs, Workspace& workspace) {
  StreamPlan plan;
  plan.device = device;
  plan.needs = needs;
  const auto blocks = static_cast<std::size_t>(slots_of(device));
  plan.partials = workspace.take<std::byte>(most_partial_bytes(device, needs));
  plan.counters = workspace.take<std::uint32_t>(static_cast<std::size_t>(num_counters(needs)));
  plan.never_wait = workspace.take<std::int32_t>(1);
  plan.broken = workspace.take<std::int32_t>(1);
  plan.words = workspace.take<std::uint64_t>(word_count(device));
  plan.early_words = workspace.take<std::uint64_t>(word_count(device));
  plan.failed = workspace.take<std::uint32_t>(1);
  plan.idle_row = workspace.take<std::uint16_t>(static_cast<std::size_t>(needs.max_k));
  plan.ones = workspace.take<std::uint16_t>(static_cast<std::size_t>(needs.max_k));
  plan.head_keys = workspace.take<std::uint64_t>(blocks * kMaxTokens * static_cast<std::size_t>(needs.topk));
  plan.head_stats = workspace.take<float2>(blocks * kMaxTokens);
  plan.attention_partials = workspace.take<std::byte>(attention_partial_bytes(device, needs.head_dim));
  return plan;
}

}  // namespace

bool has_wgmma(const DeviceLimits& device) {
#if defined(EAGLEX_WITH_WGMMA)
  constexpr bool kCompiled = true;
#else
  constexpr bool kCompiled = false;
#endif
  return kCompiled && device.compute_capability == 90;
}

int most_rows(const DeviceLimits& device, Precision precision) {
  return most_tokens(has_wgmma(device), bits_of(precision));
}

void check_switches() {
  static_cast<void>(wants_pdl());
  static_cast<void>(wanted_reduction());
}

DeviceLimits current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "device");
  const auto get = [device](cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "device attribute");
    return value;
  };
  DeviceLimits limits;
  limits.num_sms = get(cudaDevAttrMultiProcessorCount);
  limits.shared_per_sm = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  limits.shared_per_block = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  limits.compute_capability = 10 * get(cudaDevAttrComputeCapabilityMajor) + get(cudaDevAttrComputeCapabilityMinor);
  return limits;
}

std::size_t workspace_bytes(const DeviceLimits& device, const StreamNeeds& needs) {
  Workspace count;
  static_cast<void>(carve(device, needs, count));
  return count.used();
}

StreamPlan make_plan(const DeviceLimits& device, const StreamNeeds& needs, void* workspace) {
  Workspace memory(workspace);
  StreamPlan plan = carve(device, needs, memory);
  for (std::uint64_t* const words : {plan.words, plan.early_words})
    check(cudaMemset(words, 0xFF, word_count(device) * sizeof(std::uint64_t)), "words");
  constexpr std::uint16_t kOne = 0x3F80;  // in bf16
  const std::vector<std::uint16_t> ones(static_cast<std::size_t>(needs.max_k), kOne);
  check(cudaMemcpy(plan.ones, ones.data(), ones.size() * sizeof(kOne), cudaMemcpyHostToDevice), "ones");
  check(cudaStreamSynchronize(nullptr), "words and ones");  // the caller's streams need not wait for the default one
  plan.pdl = wants_pdl();
  plan.reduction = wanted_reduction();
  if (under_mps()) plan.reduction = Reduction::kLastArriver;
  return plan;
}

void launch_head_end(const StreamPlan& plan, const HeadParams& params, int blocks, const SelectParams* select,
                     const EngineContext& context, const DraftBatch* batch, cudaStream_t stream) {
  const auto launch = params.rescore_rows ? launch_head_rescore : launch_head_merge;
  launch(plan, params, blocks, select, context, batch, stream);
}

TileOrder qkv_order(const DraftConfig& config) {
  return {RowOrder::kRotary, config.head_dim, config.rotary_dim};
}

}  // namespace eaglex::stream
