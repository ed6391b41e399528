// Attention sinks. A sink is a logit per query head that counts in the softmax denominator, but has no value vector. A
// sink must be added once per row, so partials do not include it: pack_decode adds it to rows that it stores to the
// output, and merge_partials adds it to all other rows.
#pragma once

#include <cuda_fp16.h>

#include "decode_params.h"

namespace pat {

__device__ __forceinline__ float load_sink(const SinkArray& sinks, int head) {
  if (sinks.type == SinkType::kFloat32) return static_cast<const float*>(sinks.data)[head];
  const uint16_t bits = static_cast<const uint16_t*>(sinks.data)[head];
  return sinks.type == SinkType::kBfloat16 ? __uint_as_float(uint32_t{bits} << 16)
                                           : __half2float(__ushort_as_half(bits));
}

}  // namespace pat
