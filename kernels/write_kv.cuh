// write_kv: keys and values of a step's new tokens into a KV cache of one-byte numbers: scaled, rounded and scattered. The
// bytes are those of SGLang's pool, which does the same with torch and a store, in up to five kernels.
#pragma once

#include "decode_params.h"
#include "fp8_rounding.h"
#include "index_array.cuh"
#include "ptx/ptx.cuh"

namespace pat {

inline constexpr int kWriteThreads = 128;
inline constexpr int kWriteColumns = 8;  // of a thread: 16 bytes in, 8 out

// Two numbers of a register, scaled and rounded to T again, in which torch computes.
template <typename T>
__device__ __forceinline__ float2 scaled(uint32_t pair, ScaleUse use, float scale) {
  const float2 numbers = ptx::unpack<T>(pair);
  if (use == ScaleUse::kNone) return numbers;
  return ptx::unpack<T>(use == ScaleUse::kMultiply
                            ? ptx::pack<T>(numbers.x * scale, numbers.y * scale)
                            : ptx::pack<T>(numbers.x / scale, numbers.y / scale));
}

// Chunk `chunk` of a token's heads, into its slot.
template <typename T, KvType kType, int kColumns>
__device__ __forceinline__ void write_chunk(const WriteParams& params, const NewRows& rows,
                                            int token, int chunk) {
  constexpr int kChunks = kColumns / kWriteColumns;
  static_assert(kChunks * kWriteColumns == kColumns);
  // Past L1, as all that the predecessor may have written: it may still have been running when this kernel was launched.
  const int64_t slot = load_index_past_l1(params.slots, token);
  const T* const source = static_cast<const T*>(rows.source) + token * rows.token_stride +
                          chunk / kChunks * rows.head_stride + chunk % kChunks * kWriteColumns;
  const uint4 columns = __ldcg(reinterpret_cast<const uint4*>(source));
  float scale = rows.scale_use == ScaleUse::kNone ? 1.f : __ldcg(rows.scale);
  // torch rounds a divisor that is a tensor to the type of the dividend.
  if (rows.scale_use == ScaleUse::kDivide) {
    scale = ptx::unpack<T>(ptx::pack<T>(scale, 0.f)).x;
  }
  if (slot < 0 || slot >= params.num_slots) __trap();  // as SGLang's store does
  if (slot == kPaddingSlot) return;
  const uint32_t pairs[] = {columns.x, columns.y, columns.z, columns.w};
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 numbers = scaled<T>(pairs[i], rows.scale_use, scale);
    const uint32_t bytes = to_byte<kType>(numbers.x, params.overflow) |
                           to_byte<kType>(numbers.y, params.overflow) << 8;
    words[i / 2] |= bytes << 16 * (i % 2);
  }
  uint8_t* const target =
      static_cast<uint8_t*>(rows.cache) + slot * rows.slot_bytes + chunk * kWriteColumns;
  *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
}

// With kWriteThreads threads, one per chunk of a token's keys and values.
template <typename T, typename Dims>
__device__ __forceinline__ void write_kv(const WriteParams& params) {
  const int key_chunks = params.num_kv_heads * (Dims::kKey / kWriteColumns);
  const int token_chunks = key_chunks + params.num_kv_heads * (Dims::kValue / kWriteColumns);
  const int index = blockIdx.x * kWriteThreads + threadIdx.x;
  const int token = index / token_chunks, chunk = index % token_chunks;
  // Waits first: pack_decode reads its plan before it waits for this kernel, and may then begin as soon as all that came
  // before this kernel has ended.
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  if (token >= params.num_tokens) return;
  if (chunk < key_chunks) {
    write_chunk<T, Dims::kKv, Dims::kKey>(params, params.keys, token, chunk);
  } else {
    write_chunk<T, Dims::kKv, Dims::kValue>(params, params.values, token, chunk - key_chunks);
  }
}

}  // namespace pat
