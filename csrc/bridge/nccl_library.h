// NCCL as the process has it: the copy that torch has loaded, found at run time. What the bridge calls of its C interface
// is declared here, so that no header of it is needed to build; NCCL keeps these stable and only appends to its config.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

namespace eaglex::bridge {

inline constexpr int kOldestNccl = 21800;  // the first with every call and field below but graph_usage_mode
inline constexpr int kGraphUsageNccl = 22900;

enum NcclResult : int { kNcclSuccess = 0, kNcclInProgress = 7 };
inline constexpr int kNcclBytes = 1;  // its data type of one byte

struct NcclUniqueId {
  char bytes[128];
};

struct NcclConfig {
  static constexpr int kUnset = INT_MIN;

  std::size_t size = 0;
  unsigned magic = 0xcafebeef;
  unsigned version = 0;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
  int channels_per_net_peer = kUnset;
  int nvlink_centric_sched = kUnset;
  int graph_usage_mode = kUnset;  // from kGraphUsageNccl on; older ones are told a smaller size
  int padding = kUnset;
};

struct NcclLibrary {
  using Comm = void*;

  // The copy that is loaded already, else the system's. Throws ErrorCode::kBridge where there is none, more than one, or
  // one older than kOldestNccl.
  static NcclLibrary open(const std::string& name = "libnccl.so.2");

  // Success, or an error with NCCL's own words; kNcclInProgress is for the caller to wait for.
  void check(int result, const char* what) const;

  int version = 0;  // 22809 is 2.28.9
  std::string path;
  int (*get_unique_id)(NcclUniqueId*) = nullptr;
  int (*comm_init)(Comm*, int num_ranks, NcclUniqueId, int rank, NcclConfig*) = nullptr;
  int (*comm_async_error)(Comm, int*) = nullptr;
  int (*comm_abort)(Comm) = nullptr;
  int (*broadcast)(const void*, void*, std::size_t count, int type, int root, Comm, void* stream) = nullptr;
  const char* (*error_string)(int) = nullptr;
};

}  // namespace eaglex::bridge
