// Rounding to one-byte floating-point numbers as torch does it. Plain arithmetic, so that a host compiler can check it.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "kv_type.h"

namespace pat {

// Rounds to nearest, ties to even. NaN stays NaN, with its sign. `overflow`: what infinity and numbers that are too
// large become. For e4m3 it differs between versions of torch: NaN (0x7f) or the largest number (0x7e). The
// instructions of the GPU know the largest number only, and lose the sign of NaN.
template <KvType kType>
PAT_HOST_DEVICE constexpr uint32_t to_byte(float number, uint32_t overflow) {
  static_assert(kType == KvType::kE4m3 || kType == KvType::kE5m2);
  constexpr bool kIsE4m3 = kType == KvType::kE4m3;
  constexpr uint32_t kMantissa = kIsE4m3 ? 3 : 2, kDropped = 23 - kMantissa;  // bits
  constexpr uint32_t kBias = 127 - (kIsE4m3 ? 7 : 15);                        // of the exponents
  constexpr uint32_t kLeastNormal = (kBias + 1) << 23;
  constexpr uint32_t kTooLarge = kIsE4m3 ? 0x7f : 0x7c;

  const auto bits = __builtin_bit_cast(uint32_t, number);
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  uint32_t byte = 0;
  if (magnitude < kLeastNormal) {
    // One step of the sum is one step of the type's subnormal numbers, so the addition rounds.
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
