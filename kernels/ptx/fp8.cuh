// Converts one-byte floating-point numbers to fp16 exactly, including NaN and infinity. Also rounds floats to one-byte
// numbers. Only this file, ptx.cuh and wgmma.cuh contain inline PTX.
#pragma once

#include <cstdint>

#include "kv_type.h"

namespace pat::fp8 {

// Permutes the bytes of a word. Hexadecimal digit i of kSelector is the index of the byte that becomes byte i of the
// result, or 4 for a byte of 0. If 8 is added to the index, byte i is not a copy: each of its bits is the selected
// byte's highest bit.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permuted(uint32_t bytes) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(bytes), "n"(kSelector));
  return result;
}

// Puts bytes 2 * kPair and 2 * kPair + 1 of a word into the upper bytes of the result's two 16-bit halves. The lower
// bytes are 0.
template <int kPair>
__device__ __forceinline__ uint32_t upper_bytes(uint32_t bytes) {
  return permuted < kPair == 0 ? 0x1404 : 0x3424 > (bytes);
}

// Converts pair kPair of a word's four numbers to fp16.
template <KvType kType, int kPair>
__device__ __forceinline__ uint32_t to_half(uint32_t bytes) {
  if constexpr (kType == KvType::kE5m2) {
    return upper_bytes<kPair>(bytes);  // e5m2 has the exponent of fp16
  } else {
    static_assert(kType == KvType::kE4m3);
    uint32_t halves;
#if __CUDA_ARCH__ >= 890
    const uint16_t pair = static_cast<uint16_t>(bytes >> 16 * kPair);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
#else
    const uint32_t upper = upper_bytes<kPair>(bytes);
    // Shifts exponent and mantissa to their places in fp16. The exponent bias is still e4m3's 7 instead of fp16's 15,
    // so the next instruction multiplies by 2^8. This is correct for subnormal numbers too.
    const uint32_t placed = (upper & 0x80008000) | (upper >> 1 & 0x3f803f80);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(placed), "r"(0x5c005c00));  // 2^8
    // The multiplication has turned NaN into 480. The next two lines restore NaN: of all magnitudes, only that of NaN
    // (0x7f) carries into the top bit when 1 is added. If a byte has such a carry, its exponent and mantissa bits are
    // all set.
    const uint32_t carries = (bytes & 0x7f7f7f7f) + 0x01010101;
    halves |= permuted < kPair == 0 ? 0x9988 : 0xbbaa > (carries);
#endif
    return halves;
  }
}

// Converts the four numbers of a word to fp16.
template <KvType kType>
__device__ __forceinline__ uint2 convert(uint32_t bytes) {
  return make_uint2(to_half<kType, 0>(bytes), to_half<kType, 1>(bytes));
}

#if __CUDA_ARCH__ >= 890
// Bits of the largest magnitude that round_pair() rounds correctly.
template <KvType kType>
inline constexpr uint32_t kLargestRounded =  // 464, and the largest float below 61440
    kType == KvType::kE4m3 ? 0x43e80000 : 0x476fffff;

// Rounds two numbers to nearest, `low` into the lower byte. Correct only for magnitudes up to kLargestRounded: the
// instruction turns greater magnitudes into the type's largest number, and loses the sign of NaN.
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

// Swaps the two middle bytes. ldmatrix with transposition moves pairs of bytes, so a word holds two columns of one row,
// then the same columns of the next row. The result holds one column of both rows, then the other column.
__device__ __forceinline__ uint32_t transposed(uint32_t bytes) { return permuted<0x3120>(bytes); }

}  // namespace pat::fp8
