// The one exception type of the C++ side and the checks that throw it. A message names the field, the expected and the
// actual value.
#pragma once

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace eaglex {

enum class ErrorCode {
  kConfig,  // a field out of range, or two that contradict each other
  kShape,   // a tensor that is not what its field requires
  kDevice,  // the device or its runtime failed, or this build lacks it
  kBridge,  // a peer is late, gone or configured differently
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void fail(ErrorCode code, const Parts&... parts) {
  throw Error(code, concat(parts...));
}

// "field: expected …, got …", thrown unless the condition holds.
template <typename Expected, typename Actual>
void expect(bool condition, ErrorCode code, const char* field, const Expected& expected, const Actual& actual) {
  if (!condition) fail(code, field, ": expected ", expected, ", got ", actual);
}

inline void expect_range(const char* field, long long value, long long low, long long high) {
  if (value < low || high < value) fail(ErrorCode::kConfig, field, ": expected in ", low, "..", high, ", got ", value);
}

}  // namespace eaglex
