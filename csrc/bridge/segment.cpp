#include "bridge/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace eaglex::bridge {
namespace {

struct flock byte_of(int member, short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = member;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Segment Segment::create(std::size_t bytes, const std::string& label) {
  const int descriptor = memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) fail(ErrorCode::kBridge, "shared memory: expected it to be made, got ", std::strerror(errno));
  // A member that cut it short would kill the others with SIGBUS.
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 ||
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    const int error = errno;
    close(descriptor);
    fail(ErrorCode::kBridge, "shared memory: expected ", bytes, " bytes, got ", std::strerror(error));
  }
  return {descriptor, bytes};
}

Segment Segment::open(const std::string& address) {
  const int descriptor = ::open(address.c_str(), O_RDWR | O_CLOEXEC);  // NOLINT(cppcoreguidelines-pro-type-vararg)
  struct stat facts = {};
  if (descriptor < 0 || fstat(descriptor, &facts) != 0) {
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    fail(ErrorCode::kBridge, "shared memory: expected rank 0's at ", address, ", of the same user and host, got ",
         std::strerror(error));
  }
  return {descriptor, static_cast<std::size_t>(facts.st_size)};
}

Segment::Segment(int descriptor, std::size_t bytes) : descriptor_(descriptor), size_(bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    fail(ErrorCode::kBridge, "shared memory: expected ", bytes, " bytes to map, got ", std::strerror(error));
  }
  data_ = static_cast<std::byte*>(data);
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      own_(other.own_) {}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, size_);
  if (descriptor_ >= 0) close(descriptor_);
}

std::string Segment::address() const {
  return concat("/proc/", getpid(), "/fd/", descriptor_);
}

bool Segment::claim(int member) {
  struct flock lock = byte_of(member, F_WRLCK);
  if (fcntl(descriptor_, F_OFD_SETLK, &lock) != 0) {
    if (errno == EAGAIN || errno == EACCES) return false;
    fail(ErrorCode::kBridge, "shared memory: expected a lock, got ", std::strerror(errno));
  }
  own_ = member;
  return true;
}

bool Segment::taken(int member) const {
  if (member == own_) return true;
  struct flock lock = byte_of(member, F_WRLCK);
  return fcntl(descriptor_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace eaglex::bridge
