// What the bridge calls of NCCL, between processes on one host, for the emulated device. A broadcast that waits for
// another rank holds the driver, as a launch onto a full queue does, and waits for ever unless it is aborted. A call that
// NCCL does not allow ends the process: two at once, or one with a communicator that is gone.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr int kSuccess = 0, kInProgress = 7;
constexpr int kMaxRanks = 8;
constexpr std::size_t kMaxBytes = 1 << 20;

struct Meeting {
  std::atomic<int> ranks;
  std::atomic<std::uint64_t> sent;
  std::atomic<std::uint64_t> taken[kMaxRanks];
  char bytes[kMaxBytes];
};

struct Comm {
  Meeting* meeting;
  int num_ranks, rank;
  std::uint64_t count = 0;
  std::atomic<bool> aborted = false, gone = false;
  std::atomic<int> callers = 0;
};

struct UniqueId {
  char path[128];
};

void (*enter_driver)() = nullptr;
void (*leave_driver)() = nullptr;

class Call {
 public:
  explicit Call(Comm* comm) : comm_(comm) {
    if (comm->callers++ == 0 && !comm->gone) return;
    std::fputs("fake nccl: a call that must not be\n", stderr);
    std::abort();
  }
  ~Call() { --comm_->callers; }

 private:
  Comm* comm_;
};

template <typename Ready>
bool await(const Comm& comm, Ready ready) {
  while (!ready()) {
    if (comm.aborted) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

bool all_took(const Comm& comm, std::uint64_t count) {
  for (int rank = 1; rank < comm.num_ranks; ++rank) {
    if (comm.meeting->taken[rank] < count) return false;
  }
  return true;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fake_nccl_driver(void (*enter)(), void (*leave)()) {
  enter_driver = enter;
  leave_driver = leave;
}
EXPORT int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(int) {
  return "fake";
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  const int descriptor = memfd_create("fake-nccl", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, sizeof(Meeting)) != 0) return 2;
  *id = {};
  std::snprintf(id->path, sizeof id->path, "/proc/%d/fd/%d", getpid(), descriptor);
  return kSuccess;
}
EXPORT int ncclCommInitRankConfig(Comm** comm, int num_ranks, UniqueId id, int rank, void*) {
  const int descriptor = open(id.path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return 2;
  void* const memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  *comm = new Comm{static_cast<Meeting*>(memory), num_ranks, rank};
  ++(*comm)->meeting->ranks;
  return kInProgress;
}
EXPORT int ncclCommGetAsyncError(Comm* comm, int* error) {
  const Call call(comm);
  *error = comm->meeting->ranks < comm->num_ranks ? kInProgress : kSuccess;
  return kSuccess;
}
EXPORT int ncclBroadcast(const void* from, void* to, std::size_t bytes, int, int, Comm* comm, void*) {
  const Call call(comm);
  enter_driver();
  Meeting& meeting = *comm->meeting;
  const std::uint64_t number = ++comm->count;
  if (comm->rank == 0) {
    if (await(*comm, [&] { return all_took(*comm, number - 1); })) {
      std::memcpy(meeting.bytes, from, bytes);
      meeting.sent = number;
    }
  } else if (await(*comm, [&] { return meeting.sent >= number; })) {
    std::memcpy(to, meeting.bytes, bytes);
    meeting.taken[comm->rank] = number;
  }
  leave_driver();
  return kSuccess;
}
// The communicator's memory stays: whoever uses it afterwards shall be found.
EXPORT int ncclCommAbort(Comm* comm) {
  comm->aborted = true;
  comm->gone = true;
  return kSuccess;
}
