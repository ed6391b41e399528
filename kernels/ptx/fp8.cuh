// Converts one-byte floating-point numbers to fp16 exactly, NaN and infinity included, and floats to one-byte numbers.
// Only this file, ptx.cuh and wgmma.cuh have inline PTX.
#pragma once

#include <cstdint>

#include "kv_type.h"

namespace pat::fp8 {

// Permutes bytes. Each digit of kSelector says which byte of the word becomes this byte of the result; 4 stands for a
// byte of 0. If 8 is added to the digit, all bits of the result's byte are the highest bit of the word's byte.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permuted(uint32_t bytes) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(bytes), "n"(kSelector));
  return result;
}

// Bytes 2 * kPair and 2 * kPair + 1 of a word as the upper bytes of two halves, the lower ones 0.
template <int kPair>
__device__ __forceinline__ uint32_t upper_bytes(uint32_t bytes) {
  return permuted < kPair == 0 ? 0x1404 : 0x3424 > (bytes);
}

// Pair kPair of the four numbers of a word, in fp16.
template <KvType kType, int kPair>
__device__ __forceinline__ uint32_t to_half(uint32_t bytes) {
  if constexpr (kType == KvType::kE5m2) {
    return upper_bytes<kPair>(bytes);  // fp16 has the same exponent
  } else {
    static_assert(kType == KvType::kE4m3);
    uint32_t halves;
#if __CUDA_ARCH__ >= 890
    const uint16_t pair = static_cast<uint16_t>(bytes >> 16 * kPair);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
#else
    const uint32_t upper = upper_bytes<kPair>(bytes);
    // The mantissa and the lower four bits of the exponent, in their places. The exponent is then biased by 7, not by
    // 15. The multiplication corrects this, for subnormal numbers too.
    const uint32_t placed = (upper & 0x80008000) | (upper >> 1 & 0x3f803f80);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(placed), "r"(0x5c005c00));  // 2^8
    // NaN has become 480. Only NaN carries in 0x7f + 1, and what the carry reaches is set to all ones.
    const uint32_t carries = (bytes & 0x7f7f7f7f) + 0x01010101;
    halves |= permuted < kPair == 0 ? 0x9988 : 0xbbaa > (carries);
#endif
    return halves;
  }
}

// The four numbers of a word, in fp16.
template <KvType kType>
__device__ __forceinline__ uint2 convert(uint32_t bytes) {
  return make_uint2(to_half<kType, 0>(bytes), to_half<kType, 1>(bytes));
}

#if __CUDA_ARCH__ >= 890
// Two numbers as bytes, `low` in the lower one, rounded to nearest. Correct only for magnitudes up to
// kLargestRounded: the instruction turns greater ones into the largest number, and loses the sign of NaN.
template <KvType kType>
inline constexpr uint32_t kLargestRounded =  // 464, and the last float below 61440
    kType == KvType::kE4m3 ? 0x43e80000 : 0x476fffff;

template <KvType kType>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint16_t pair;
  if constexpr (kType == KvType::kE4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(kType == KvType::kE5m2);
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}
#endif

// A word of two columns (bytes) of two rows (halves), as two rows of two columns.
__device__ __forceinline__ uint32_t transposed(uint32_t bytes) { return permuted<0x3120>(bytes); }

}  // namespace pat::fp8
