// Attention sinks: one more logit per query head, without a value, in the denominator of every row. It is added
// to a row's complete sum: where the row is stored directly, or where its partials are merged; never to a partial.
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
