// For tests/unit/test_kernel_headers.py: rounds floats from the standard input to bytes on the standard output.
#include "fp8_rounding.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

template <pat::KvType kType>
static void convert(uint32_t overflow) {
  float numbers[4096];
  while (const size_t count = std::fread(numbers, sizeof(float), std::size(numbers), stdin)) {
    uint8_t bytes[std::size(numbers)];
    for (size_t i = 0; i < count; ++i) bytes[i] = pat::to_byte<kType>(numbers[i], overflow);
    std::fwrite(bytes, 1, count, stdout);
  }
}

int main(int, char** arguments) {
  const auto overflow = static_cast<uint32_t>(std::atoi(arguments[2]));
  if (std::string_view(arguments[1]) == "e4m3") {
    convert<pat::KvType::kE4m3>(overflow);
  } else {
    convert<pat::KvType::kE5m2>(overflow);
  }
}
