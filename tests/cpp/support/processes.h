// What the bridge's tests share: results that tell which cycle they are of, and processes to be killed.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/batch.h"
#include "core/error.h"

namespace support {

// Results of four slots.
struct Results {
  std::vector<std::int64_t> tokens = std::vector<std::int64_t>(12);
  std::vector<std::int64_t> lens = std::vector<std::int64_t>(4, -1);
  std::vector<std::int32_t> parents = std::vector<std::int32_t>(12);
  std::vector<std::int32_t> nodes = std::vector<std::int32_t>(4);

  [[nodiscard]] eaglex::DraftResults view() {
    return {tokens.data(), parents.data(), nullptr, nodes.data(), lens.data(), nullptr, nullptr};
  }
  // A draft for `length` that tells which cycle it is of.
  void draft(std::int64_t slot, std::int64_t length, std::int64_t cycle) {
    const auto at = static_cast<std::size_t>(slot);
    nodes[at] = static_cast<std::int32_t>(1 + cycle % 3);
    lens[at] = length;
    for (std::size_t i = 0; i < 3; ++i) {
      tokens[at * 3 + i] = (cycle * 7 + slot * 3 + static_cast<std::int64_t>(i)) % 100000;
      parents[at * 3 + i] = static_cast<std::int32_t>(cycle % 2 == 0 ? 0 : i);
    }
  }
  [[nodiscard]] bool has(std::int64_t slot, std::int64_t length, std::int64_t cycle) const {
    Results expected;
    expected.draft(slot, length, cycle);
    const auto at = static_cast<std::size_t>(slot);
    if (nodes[at] != expected.nodes[at] || lens[at] != length) return false;
    for (std::size_t i = at * 3; i < at * 3 + static_cast<std::size_t>(nodes[at]); ++i) {
      if (tokens[i] != expected.tokens[i] || parents[i] != expected.parents[i]) return false;
    }
    return true;
  }
};

// A process that runs `body`; its exit code is 0 where that returned true.
class Child {
 public:
  explicit Child(const std::function<bool()>& body) : id_(fork()) {
    if (id_ == 0) {
      bool good = false;
      try {
        good = body();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
      }
      _exit(good ? 0 : 1);
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (id_ > 0) {
      kill(id_, SIGKILL);
      wait();
    }
  }
  void signal(int number) const { kill(id_, number); }
  int wait() {
    int status = 0;
    waitpid(id_, &status, 0);
    id_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t id_;
};

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const eaglex::Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void wait_until(const std::function<bool()>& done) {
  for (int i = 0; i < 1000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  REQUIRE(done());
}

}  // namespace support
