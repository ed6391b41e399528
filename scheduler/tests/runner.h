// A small test runner. It needs no package, so the tests build wherever the scheduler builds.
//
//   TEST(batches_that_are_alike) { CHECK(a == b); CHECK_EQ(size, 3); CHECK_THROWS(call(), "part of the message"); }
#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pat::testing {

using TestFn = void (*)();
bool add_test(const char* name, TestFn function);

// Thrown when a check fails. Ends the test or the fuzzing run.
struct Failure : std::logic_error {
  using std::logic_error::logic_error;
};

template <typename... Parts>
[[noreturn]] void fail(const char* file, int line, const Parts&... parts) {
  std::ostringstream message;
  message << file << ':' << line << ": ";
  (message << ... << parts);
  throw Failure(message.str());
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Failure&) {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

}  // namespace pat::testing

#define TEST(name)                                                         \
  static void name();                                                      \
  static const bool name##_added = ::pat::testing::add_test(#name, &name); \
  static void name()

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) ::pat::testing::fail(__FILE__, __LINE__, #condition " is false"); \
  } while (false)

#define CHECK_EQ(left, right)                                                               \
  do {                                                                                      \
    const auto& left_ = (left);                                                             \
    const auto& right_ = (right);                                                           \
    if (!(left_ == right_)) {                                                               \
      ::pat::testing::fail(__FILE__, __LINE__, #left " is ", left_, ", expected ", right_); \
    }                                                                                       \
  } while (false)

#define CHECK_THROWS(call, part)                                                          \
  do {                                                                                    \
    const std::string message_ = ::pat::testing::message_of([&] { call; });               \
    if (message_.find(part) == std::string::npos) {                                       \
      ::pat::testing::fail(__FILE__, __LINE__, #call ": \"", part, "\" expected, got \"", \
                           message_, "\"");                                               \
    }                                                                                     \
  } while (false)
