// Writes queries as sums of e4m3 numbers, so that one-byte keys can be multiplied without conversion.
//
// A row is scaled by a power of 2, so that its largest number is at least 2^7 and less than 2^8. A number's first term
// is the number rounded to e4m3, which has four significant bits. Each further term is the remainder, also rounded to
// e4m3. The highest bit of a further term is at least one bit below the lowest bit of the term before it. So two terms
// represent a bf16 number (eight significant bits) exactly if it is at least 2^-10 of the row's largest number. Three
// terms represent an fp16 number (eleven significant bits) exactly if it is at least 2^-7 of the row's largest number.
// For smaller numbers, the error is at most 2^-10, which is at most 2^-17 of the row's largest number.
#pragma once

#include <type_traits>

#include "pack_decode/work_queue.cuh"
#include "ptx/fp8.cuh"

namespace pat {

template <typename T>
inline constexpr int kQueryTerms = std::is_same_v<T, __half> ? 3 : 2;

template <typename T, typename Dims>
struct QueryTerms {
  static constexpr int kTerms = Dims::kTerms;
  static constexpr int kSteps = Dims::kKey / 32;
  static_assert(Dims::kKey % 32 == 0);

  ptx::Fragment terms[kTerms][kSteps];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) terms[term][step][i] = 0;
      }
    }
  }

  // Loads a warp's 16 rows and computes their terms. The rows begin at row first_row of the tile_rows query rows at
  // `tile`. factors: for each of the lane's two rows, the factor that undoes the scaling in the row's scores, or NaN if
  // the row has an infinite number.
  __device__ __forceinline__ void load(uint32_t tile, int tile_rows, int first_row,
                                       float (&factors)[2], uint32_t lane) {
    // Of every 16 columns, a lane has four neighbouring ones.
    const uint32_t first =
        tile + swizzled_offset(tile_rows, first_row + lane / 4, lane / 2 % 2) + lane % 2 * 8;
    const auto four_columns = [&](int step, int h) {
      const uint2 words =
          ptx::load_shared_8(step_address(first, tile_rows, step) + h * 8 * kPanelRowBytes);
      const float2 low = ptx::unpack<T>(words.x), high = ptx::unpack<T>(words.y);
      return make_float4(low.x, low.y, high.x, high.y);
    };
    float inverses[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0.f;
#pragma unroll
      for (int step = 0; step < Dims::kKey / 16; ++step) {
        const float4 x = four_columns(step, h);
        largest =
            fmaxf(largest, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
      // Both the scale and its inverse are powers of 2, computed from biased exponents. Rows whose largest number is
      // below 2^-119 get the largest scale, 2^126.
      const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 8);
      inverses[h] = __uint_as_float((261 - exponent) << 23);
      factors[h] = exponent == 255 ? largest - largest : __uint_as_float((exponent - 7) << 23);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2;
        const float4 x = four_columns(2 * step + i / 2, h);
        float rest[4] = {x.x * inverses[h], x.y * inverses[h], x.z * inverses[h],
                         x.w * inverses[h]};
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          const uint32_t packed = fp8::round_pair<KvType::kE4m3>(rest[0], rest[1]) |
                                  fp8::round_pair<KvType::kE4m3>(rest[2], rest[3]) << 16;
          terms[term][step][i] = packed;
          const uint2 rounded = fp8::convert<KvType::kE4m3>(packed);
          const float2 low = ptx::unpack<__half>(rounded.x), high = ptx::unpack<__half>(rounded.y);
          rest[0] -= low.x, rest[1] -= low.y, rest[2] -= high.x, rest[3] -= high.y;
        }
      }
    }
  }
};

}  // namespace pat
