#include "bridge/nccl_library.h"

#include <dlfcn.h>

#include <fstream>
#include <set>

#include "core/error.h"

namespace eaglex::bridge {
namespace {

// Files of that library that are mapped into this process. Two copies have state of their own each, and fail in ways that
// do not say so.
std::set<std::string> copies(const std::string& stem) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> found;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path == std::string::npos) continue;
    if (line.compare(line.rfind('/') + 1, stem.size(), stem) == 0) found.insert(line.substr(path));
  }
  return found;
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  void* const symbol = dlsym(library, name);
  expect(symbol != nullptr, ErrorCode::kBridge, "libnccl", name, "a library without it");
  function = reinterpret_cast<Function>(symbol);
}

}  // namespace

NcclLibrary NcclLibrary::open(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) handle = dlopen(name.c_str(), RTLD_NOW);
  if (handle == nullptr) fail(ErrorCode::kBridge, "libnccl: expected ", name, " as torch loads it, got ", dlerror());
  const std::string stem = name.substr(name.rfind('/') + 1);
  const std::set<std::string> loaded = copies(stem.substr(0, stem.find(".so")));
  if (loaded.size() > 1) {
    fail(ErrorCode::kBridge, "libnccl: expected one copy in this process, got ", *loaded.begin(), " and ",
         *loaded.rbegin());
  }
  NcclLibrary library;
  if (!loaded.empty()) library.path = *loaded.begin();
  int (*get_version)(int*) = nullptr;
  find(handle, "ncclGetVersion", get_version);
  find(handle, "ncclGetErrorString", library.error_string);
  library.check(get_version(&library.version), "version");
  expect(library.version >= kOldestNccl, ErrorCode::kBridge, "libnccl version", concat("at least ", kOldestNccl),
         library.version);
  find(handle, "ncclGetUniqueId", library.get_unique_id);
  find(handle, "ncclCommInitRankConfig", library.comm_init);
  find(handle, "ncclCommGetAsyncError", library.comm_async_error);
  find(handle, "ncclCommAbort", library.comm_abort);
  find(handle, "ncclBroadcast", library.broadcast);
  return library;
}

void NcclLibrary::check(int result, const char* what) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  fail(ErrorCode::kBridge, "nccl ", what, ": expected success, got ", error_string(result));
}

}  // namespace eaglex::bridge
