// write_kv: writes the keys and values of a step's new tokens into the KV cache, either unchanged, or scaled and
// rounded to one byte. In latent attention, the "keys" are the first columns of a row, and the "values" are the others.
// write_kv writes the same bytes as SGLang's pool, which launches a store kernel after up to four torch kernels that
// scale and round.
//
// Such a small kernel spends most of its time on starting. So the common path is short: keys and values share its code
// if they have equally many columns, and a branch leads to the rare cases (numbers too large, NaN).
#pragma once

#include <type_traits>

#include "decode_params.h"
#include "fp8_rounding.h"
#include "index_array.cuh"
#include "ptx/fp8.cuh"
#include "ptx/ptx.cuh"

namespace pat {

inline constexpr int kWriteThreads = 128;
inline constexpr int kWriteColumns = 8;  // per thread, which reads 16 bytes and writes 16 or 8

// Scales numbers and rounds them to T, because torch scales in type T.
template <typename T>
__device__ __forceinline__ void apply_scale(float (&numbers)[kWriteColumns], ScaleUse use,
                                            float scale) {
  if (use == ScaleUse::kNone) return;
  if (use == ScaleUse::kDivide) {
    scale = ptx::unpack<T>(ptx::pack<T>(scale, 0.f)).x;  // torch rounds a device divisor to T
#pragma unroll
    for (float& number : numbers) number /= scale;
  } else {
#pragma unroll
    for (float& number : numbers) number *= scale;
  }
#pragma unroll
  for (int i = 0; i < kWriteColumns; i += 2) {
    const float2 pair = ptx::unpack<T>(ptx::pack<T>(numbers[i], numbers[i + 1]));
    numbers[i] = pair.x;
    numbers[i + 1] = pair.y;
  }
}

template <KvType kType>
__device__ __forceinline__ uint2 to_bytes(const float (&numbers)[kWriteColumns],
                                          uint32_t overflow) {
#if __CUDA_ARCH__ >= 890
  uint32_t largest = 0;
#pragma unroll
  for (const float number : numbers) {
    largest = max(largest, __float_as_uint(number) & 0x7fffffff);
  }
  if (largest <= fp8::kLargestRounded<kType>) {
    uint32_t pairs[kWriteColumns / 2];
#pragma unroll
    for (int i = 0; i < kWriteColumns / 2; ++i) {
      pairs[i] = fp8::round_pair<kType>(numbers[2 * i], numbers[2 * i + 1]);
    }
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
#endif
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kWriteColumns; ++i) {
    words[i / 4] |= to_byte<kType>(numbers[i], overflow) << 8 * (i % 4);
  }
  return make_uint2(words[0], words[1]);
}

// Scales eight numbers, given as four pairs of T, and rounds them to bytes.
template <typename T, KvType kType>
__device__ __forceinline__ uint2 scaled_bytes(const uint4& columns, ScaleUse use, float scale,
                                              uint32_t overflow) {
  const uint32_t pairs[] = {columns.x, columns.y, columns.z, columns.w};
  float numbers[kWriteColumns];
#pragma unroll
  for (int i = 0; i < kWriteColumns; i += 2) {
    const float2 pair = ptx::unpack<T>(pairs[i / 2]);
    numbers[i] = pair.x;
    numbers[i + 1] = pair.y;
  }
  apply_scale<T>(numbers, use, scale);
  return to_bytes<kType>(numbers, overflow);
}

// Writes eight columns of a token's keys or values into the token's slot. chunk: which eight columns, counted over all
// heads.
template <typename T, KvType kType, int kColumns>
__device__ __forceinline__ void write_chunk(const WriteParams& params, const NewRows& rows,
                                            uint32_t token, uint32_t chunk) {
  constexpr int kChunks = kColumns / kWriteColumns;
  static_assert(kChunks * kWriteColumns == kColumns);
  constexpr bool kAsTheyAre = kType == KvType::kAsQueries;
  // Bypasses L1, because the preceding kernel may still write the slots while this kernel starts.
  const int64_t slot = load_index_past_l1(params.slots, token);
  const T* const source = static_cast<const T*>(rows.source) + token * rows.token_stride +
                          chunk / kChunks * rows.head_stride + chunk % kChunks * kWriteColumns;
  const uint4 columns = __ldcg(reinterpret_cast<const uint4*>(source));
  const float scale = kAsTheyAre || rows.scale_use == ScaleUse::kNone ? 1.f : __ldcg(rows.scale);
  if (slot < 0 || slot >= params.num_slots) __trap();  // SGLang's store traps too
  if (slot == kPaddingSlot) return;
  using Columns = std::conditional_t<kAsTheyAre, uint4, uint2>;
  auto* const target =
      reinterpret_cast<Columns*>(static_cast<char*>(rows.cache) + slot * rows.slot_bytes) + chunk;
  if constexpr (kAsTheyAre) {
    *target = columns;
  } else {
    *target = scaled_bytes<T, kType>(columns, rows.scale_use, scale, params.overflow);
  }
}

// Runs with kWriteThreads threads per CTA, and one thread for each chunk of a token's keys and values. The grid's x
// index is the token, so a thread finds its token without a division.
template <typename T, typename Dims>
__device__ __forceinline__ void write_kv(const WriteParams& params) {
  // Lets pack_decode start only after the preceding kernels have ended: they may write the plan, and pack_decode reads
  // the plan without waiting for this kernel.
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  const uint32_t token = blockIdx.x, index = blockIdx.y * kWriteThreads + threadIdx.x;
  constexpr int kFirst = Dims::kIsLatent ? Dims::kValue : Dims::kKey;
  constexpr int kSecond = Dims::kIsLatent ? Dims::kKey - Dims::kValue : Dims::kValue;
  const uint32_t first_chunks = params.num_kv_heads * (kFirst / kWriteColumns);
  const uint32_t second_chunks = params.num_kv_heads * (kSecond / kWriteColumns);
  if (index >= first_chunks + second_chunks) return;
  const bool is_second = index >= first_chunks;
  const uint32_t chunk = is_second ? index - first_chunks : index;
  const NewRows& rows = params.rows[is_second];
  if (kFirst == kSecond || !is_second) {
    write_chunk<T, Dims::kKv, kFirst>(params, rows, token, chunk);
  } else {
    write_chunk<T, Dims::kKv, kSecond>(params, rows, token, chunk);
  }
}

}  // namespace pat
