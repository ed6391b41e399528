#include "runner.h"

#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace pat::testing {

namespace {
std::vector<std::pair<const char*, TestFn>>& tests() {
  static std::vector<std::pair<const char*, TestFn>> all;
  return all;
}
}  // namespace

bool add_test(const char* name, TestFn function) {
  tests().emplace_back(name, function);
  return true;
}

}  // namespace pat::testing

// Runs the tests whose name contains the argument, or all tests if there is none.
int main(int argc, char** argv) {
  int num_run = 0, num_failed = 0;
  for (const auto& [name, function] : pat::testing::tests()) {
    if (argc > 1 && std::strstr(name, argv[1]) == nullptr) continue;
    ++num_run;
    try {
      function();
    } catch (const std::exception& error) {
      ++num_failed;
      std::printf("FAILED %s\n  %s\n", name, error.what());
    }
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_run == 0 || num_failed > 0;
}
