// PAT_CHECK: an input check that names the offending value. It throws std::invalid_argument (ValueError in Python).
#pragma once

#include <sstream>
#include <stdexcept>

namespace pat {

template <typename... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace pat

// The message's arguments are evaluated only if the condition is false.
#define PAT_CHECK(condition, ...)                        \
  do {                                                   \
    if (!(condition)) ::pat::throw_invalid(__VA_ARGS__); \
  } while (false)
