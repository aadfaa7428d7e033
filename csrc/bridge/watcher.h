// A thread that looks every 20 ms: at what a host that sits in a synchronize would not see.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace eaglex::bridge {

class Watcher {
 public:
  Watcher() = default;
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  ~Watcher() { stop(); }

  // Calls `look` until it says false, which must not throw, or until `stop`.
  void start(std::function<bool()> look) {
    thread_ = std::thread([this, look = std::move(look)] {
      std::unique_lock lock(mutex_);
      while (!wake_.wait_for(lock, std::chrono::milliseconds(20), [this] { return stopping_; })) {
        lock.unlock();
        if (!look()) return;
        lock.lock();
      }
    });
  }
  // Returns when `look` is not running and will not again.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace eaglex::bridge
