// One block at a time, its threads as fibers that switch only where they wait or ask for the time.
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// The linker's names for the section of __shared__ variables.
extern unsigned char __start_emulated_shared[], __stop_emulated_shared[];

namespace emulator {

unsigned char* dynamic_shared = nullptr;

namespace {

constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::size_t kMaxShared = 227 << 10;
constexpr int kMaxWarps = kMaxThreads / kWarp;

struct Barrier {
  int expected = 0;  // threads that have not returned
  int arrived = 0;
  unsigned generation = 0;

  bool release_if_complete() {
    if (expected == 0 || arrived < expected) return false;
    arrived = 0;
    ++generation;
    return true;
  }
};

// setcontext enters a fiber once; from then on longjmp switches, which makes no system call. A fiber outlives its
// block: it runs the body of block after block.
struct Fiber {
  ucontext_t entry;
  jmp_buf resume;
  std::unique_ptr<unsigned char[]> stack;
  bool entered = false;
  bool returned = true;
  const Barrier* waits_at = nullptr;
  unsigned waits_since = 0;  // generation

  [[nodiscard]] bool ready() const { return !returned && (waits_at == nullptr || waits_at->generation != waits_since); }
};

struct Votes {
  int all = 1;
  int any = 0;
};

Fiber fibers[kMaxThreads];
int current = 0;
int order[kMaxThreads], num_threads = 0, position = 0;
jmp_buf scheduler;
const std::function<void()>* body = nullptr;
Barrier block, warps[kMaxWarps];
Votes votes, result;
Exchange exchanges[kMaxWarps][2];
std::minstd_rand shuffle_order;  // default seed: every run of a test is the same

Barrier& warp_of(int thread) {
  return warps[thread / kWarp];
}

void release_block() {
  if (block.release_if_complete()) result = std::exchange(votes, Votes{});
}

// Enters the next thread that can go on, in shuffled order; back to run_block where there is none.
[[noreturn]] void go_on() {
  for (int i = 0; i < num_threads; ++i) {
    position = position + 1 == num_threads ? 0 : position + 1;
    Fiber& fiber = fibers[order[position]];
    if (!fiber.ready()) continue;
    current = order[position];
    threadIdx = {static_cast<unsigned>(current), 0, 0};
    if (fiber.entered) _longjmp(fiber.resume, 1);
    fiber.entered = true;
    setcontext(&fiber.entry);
  }
  _longjmp(scheduler, 1);
}

void leave() {
  if (_setjmp(fibers[current].resume) == 0) go_on();
}

void wait(const Barrier& barrier, unsigned since) {
  Fiber& fiber = fibers[current];
  fiber.waits_at = &barrier;
  fiber.waits_since = since;
  if (barrier.generation == since) leave();
}

void run_fiber() {
  while (true) {
    (*body)();
    fibers[current].returned = true;
    --block.expected;
    --warp_of(current).expected;
    release_block();
    warp_of(current).release_if_complete();
    leave();
  }
}

void renew(Fiber& fiber) {
  if (!fiber.stack) fiber.stack = std::make_unique<unsigned char[]>(kStackBytes);
  getcontext(&fiber.entry);
  fiber.entry.uc_stack.ss_sp = fiber.stack.get();
  fiber.entry.uc_stack.ss_size = kStackBytes;
  fiber.entry.uc_link = nullptr;
  makecontext(&fiber.entry, run_fiber, 0);
  fiber.entered = false;
}

// False where threads wait for others that never come.
bool run_block(int threads) {
  num_threads = threads;
  position = 0;
  std::iota(order, order + threads, 0);
  std::shuffle(order, order + threads, shuffle_order);
  block.expected = threads;
  for (int w = 0; w * kWarp < threads; ++w) warps[w].expected = std::min(kWarp, threads - w * kWarp);
  for (int t = 0; t < threads; ++t) {
    if (!fibers[t].stack) renew(fibers[t]);
    fibers[t].returned = false;
    fibers[t].waits_at = nullptr;
  }
  if (_setjmp(scheduler) == 0) go_on();
  if (block.expected == 0) return true;
  for (int t = 0; t < threads; ++t) renew(fibers[t]);  // abandoned where they stand
  block = {};
  std::fill(warps, warps + kMaxWarps, Barrier{});
  votes = {};
  return false;
}

}  // namespace

void block_barrier() {
  const unsigned since = block.generation;
  ++block.arrived;
  release_block();
  wait(block, since);
}

void warp_barrier() {
  Barrier& warp = warp_of(current);
  const unsigned since = warp.generation;
  ++warp.arrived;
  warp.release_if_complete();
  wait(warp, since);
}

int block_vote(int value, Vote vote) {
  votes.all = votes.all != 0 && value != 0;
  votes.any = votes.any != 0 || value != 0;
  block_barrier();
  return vote == Vote::kAll ? result.all : result.any;
}

void pause() {
  static unsigned pauses = 0;
  if (++pauses % kWarp == 0) std::this_thread::sleep_for(std::chrono::microseconds(10));
  leave();
}

Exchange& exchange() {
  return exchanges[current / kWarp][warp_of(current).generation % 2];
}

cudaError_t run_grid(dim3 grid, unsigned threads, std::size_t shared_bytes, const std::function<void()>& thread) {
  alignas(128) static unsigned char shared[kMaxShared];
  dynamic_shared = shared;
  body = &thread;
  gridDim = grid;
  blockDim = dim3(threads);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        // Nobody may read what he has not written: NaN as float, -1 as index.
        std::fill(__start_emulated_shared, __stop_emulated_shared, static_cast<unsigned char>(0xFF));
        std::fill(shared, shared + shared_bytes, static_cast<unsigned char>(0xFF));
        blockIdx = {x, y, z};
        if (!run_block(static_cast<int>(threads))) return cudaErrorLaunchFailure;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace emulator
