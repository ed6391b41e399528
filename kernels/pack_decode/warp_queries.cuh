// Loads the 16 query rows of a warp as left-hand sides of mma.m16n8k16, and converts them to the type of the
// multiplication.
#pragma once

#include <type_traits>

#include "pack_decode/work_queue.cuh"

namespace pat {

// Type in which the kernel multiplies for a model of type T. With one-byte KV it is fp16: one instruction converts
// one-byte numbers to fp16, without error, and fp16 represents probabilities eight times as exactly as bf16.
template <typename T, typename Dims>
using ComputeType = std::conditional_t<Dims::kIsFp8, __half, T>;

// True if queries are bf16, but are multiplied in fp16.
template <typename T, typename Dims>
inline constexpr bool kNarrowsQueries = !std::is_same_v<T, ComputeType<T, Dims>>;
template <typename Dims>
inline constexpr int kDepthSteps = Dims::kKey / 16;
template <typename T, typename Dims>
using WarpQueries = ptx::Fragment[kDepthSteps<Dims>];

// Converts bf16 queries to fp16. If a row has numbers of 2^15 or more, divides the row by a power of 2 and stores that
// power in query_factors. Numbers below 2^-14 become subnormal, which changes a score by less than rounding does.
// Returns true if any row of the warp was divided.
template <typename T, typename Number, int kSteps>
__device__ __forceinline__ bool narrow_queries(ptx::Fragment (&queries)[kSteps],
                                               float* query_factors, uint32_t lane) {
  uint32_t exceeds = 0;  // the top bit of a 16-bit half is set if some number is 2^15 or more
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exceeds |= (queries[step][i] & 0x7fff7fff) + 0x39003900;
  }
  const bool has_factors = __any_sync(kFullWarp, (exceeds & 0x80008000) != 0);
  float inverse[2] = {1.f, 1.f};
  if (has_factors) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t highest = 142u << 7;  // 2^15 as bf16, without its sign bit
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = h; i < 4; i += 2) {
          const uint32_t numbers = queries[step][i] & 0x7fff7fff;
          highest = max(highest, max(numbers & 0xffff, numbers >> 16));
        }
      }
      highest = max(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = max(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      const uint32_t excess = (highest >> 7) - 141;  // exponent of the divisor
      inverse[h] = __uint_as_float((127 - excess) << 23);
      if (lane % 4 == 0) query_factors[lane / 4 + 8 * h] = __uint_as_float((127 + excess) << 23);
    }
    __syncwarp();
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 numbers = ptx::unpack<T>(queries[step][i]);
      queries[step][i] = ptx::pack<Number>(numbers.x * inverse[i % 2], numbers.y * inverse[i % 2]);
    }
  }
  return has_factors;
}

// Loads the warp's 16 rows, which begin at row first_row of the tile_rows query rows at `tile`. Sets has_factors only
// if kNarrowsQueries is true.
template <typename T, typename Dims>
__device__ __forceinline__ void load_queries(WarpQueries<T, Dims>& queries, bool& has_factors,
                                             uint32_t tile, int tile_rows, int first_row,
                                             float* query_factors, uint32_t lane) {
  if constexpr (Dims::kIsFp8) {
    // Of every 16 columns, a lane has four neighbouring ones, the same four for queries and keys. This differs from
    // mma's column order, which is fine because a score is a sum over all columns.
    const uint32_t first =
        tile + swizzled_offset(tile_rows, first_row + lane / 4, lane / 2 % 2) + lane % 2 * 8;
#pragma unroll
    for (int step = 0; step < kDepthSteps<Dims>; ++step) {
      const uint32_t address = step_address(first, tile_rows, step);
      const uint2 low = ptx::load_shared_8(address);
      const uint2 high = ptx::load_shared_8(address + 8 * kPanelRowBytes);
      queries[step][0] = low.x, queries[step][1] = high.x;
      queries[step][2] = low.y, queries[step][3] = high.y;
    }
    if constexpr (kNarrowsQueries<T, Dims>) {
      has_factors = narrow_queries<T, ComputeType<T, Dims>>(queries, query_factors, lane);
    }
  } else {
    const uint32_t first = tile + swizzled_offset(tile_rows, first_row + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kDepthSteps<Dims>; ++step) {
      ptx::load_matrices(queries[step], step_address(first, tile_rows, step));
    }
  }
}

}  // namespace pat
