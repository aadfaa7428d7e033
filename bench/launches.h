// A hook in front of any one launch of the engine, whichever step it belongs to: the linker sends all calls of
// cudaLaunchKernelExC through the function below (CMakeLists.txt), which nothing in the engine knows of.
#pragma once

#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <string>

// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names
extern "C" cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);
extern "C" cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);
// NOLINTEND(bugprone-reserved-identifier)

namespace eaglex::bench {

inline constexpr std::size_t kNoLaunch = static_cast<std::size_t>(-1);

// Launches since `watch`, and what is done before launch `chosen`: the hook may launch as well, and change the grid.
struct Launches {
  using Hook = std::function<void(cudaLaunchConfig_t&)>;

  std::size_t count = 0;
  std::size_t chosen = kNoLaunch;
  Hook hook;
  std::string name;  // of the launch that was chosen

  void watch(std::size_t which, Hook what) {
    count = 0;
    chosen = which;
    hook = std::move(what);
    name = "nothing";
  }
};

inline Launches& launches() {
  static Launches all;
  return all;
}

inline std::string name_of_kernel(const void* kernel) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // not the engine's error
    return "?";
  }
  int status = 0;
  char* const plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  const std::string name = status == 0 ? plain : mangled;
  std::free(plain);
  return name;
}

}  // namespace eaglex::bench

// A program includes this file once.
extern "C" cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  auto& launches = eaglex::bench::launches();
  const std::size_t index = launches.count++;
  if (index != launches.chosen) return __real_cudaLaunchKernelExC(config, kernel, args);
  launches.chosen = eaglex::bench::kNoLaunch;  // the hook may launch
  launches.name = eaglex::bench::name_of_kernel(kernel);
  cudaLaunchConfig_t changed = *config;
  launches.hook(changed);
  launches.count = index + 1;
  return __real_cudaLaunchKernelExC(&changed, kernel, args);
}
