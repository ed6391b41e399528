// Rounds numbers to one-byte floating-point types as torch does. Uses plain arithmetic only, so that host tests can run
// it too.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "kv_type.h"

namespace pat {

// Rounds to nearest, ties to even. NaN stays NaN, with its sign. `overflow`: the byte for infinity and for numbers that
// are too large. For e4m3 it depends on torch's version: NaN (0x7f) or the largest number (0x7e). The GPU's conversion
// instructions cannot be used here: they turn every number that is too large into the largest number, and lose the sign
// of NaN.
template <KvType kType>
PAT_HOST_DEVICE constexpr uint32_t to_byte(float number, uint32_t overflow) {
  static_assert(kType == KvType::kE4m3 || kType == KvType::kE5m2);
  constexpr bool kIsE4m3 = kType == KvType::kE4m3;
  constexpr uint32_t kMantissa = kIsE4m3 ? 3 : 2, kDropped = 23 - kMantissa;  // mantissa bits
  constexpr uint32_t kBias = 127 - (kIsE4m3 ? 7 : 15);  // fp32's exponent bias minus the type's
  constexpr uint32_t kLeastNormal = (kBias + 1) << 23;
  constexpr uint32_t kTooLarge = kIsE4m3 ? 0x7f : 0x7c;

  const auto bits = __builtin_bit_cast(uint32_t, number);
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  uint32_t byte = 0;
  if (magnitude < kLeastNormal) {
    // In this sum, one unit in the last place is the type's smallest subnormal number, so the addition does the
    // rounding.
    constexpr uint32_t kSteps = (kBias + 1 + kDropped) << 23;
    const float sum =
        __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, uint32_t{kSteps});
    byte = __builtin_bit_cast(uint32_t, sum) - kSteps;
  } else {
    const uint32_t is_odd = magnitude >> kDropped & 1;
    const uint32_t rounded = magnitude + (1u << (kDropped - 1)) - 1 + is_odd;
    byte = (rounded >> kDropped) - (kBias << kMantissa);
  }
  return sign | (byte >= kTooLarge ? overflow : byte);
}

}  // namespace pat
