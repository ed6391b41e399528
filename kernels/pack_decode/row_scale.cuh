// Computes a row's final factor, which normalises the row's sums, and the row's LSE.
#pragma once

#include <cmath>

#include "pack_decode/work_queue.cuh"
#include "scales.cuh"
#include "sinks.cuh"

namespace pat {

// Adds the sink of a query head to a row. scale: the row's final factor, 0 if the row has no KV. log2_sum: base-2 LSE
// of the row.
__device__ __forceinline__ void add_sink(const SinkArray& sinks, int head, float& scale,
                                         float& log2_sum) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float sink = load_sink(sinks, head) * kLog2E;
  if (log2_sum == -INFINITY) {
    log2_sum = sink;
    return;
  }
  scale *= ptx::reciprocal(1.f + ptx::exp2(sink - log2_sum));
  // Computes relative to the larger of the sink and log2_sum, so that nothing overflows. A NaN takes the second branch.
  log2_sum = log2_sum <= sink ? sink + ptx::log2(1.f + ptx::exp2(log2_sum - sink))
                              : log2_sum + ptx::log2(1.f + ptx::exp2(sink - log2_sum));
}

struct RowScale {
  float scale;  // factor of the row's columns
  float log2_sum;
};

// Returns a row's final factor and LSE. maximum: the largest base-2 logit. total: sum of the exponentials relative to
// `maximum`, 0 if the row has no KV. A row that is stored to the output gets its sink here.
template <typename Dims>
__device__ __forceinline__ RowScale row_scale(const DecodeParams& params,
                                              const KvScales<Dims::kIsFp8>& scales, RowTarget row,
                                              float maximum, float total) {
  const bool empty = total == 0.f;
  // Partials of one-byte KV are fp16. Unscaled values always fit into fp16, so merge_partials applies the value scale
  // later.
  const float v_scale = Dims::kIsFp8 && row >= 0 ? 1.f : scales.value(params);
  float scale = empty ? 0.f : ptx::reciprocal(total) * v_scale;
  float log2_sum = empty ? -INFINITY : maximum + ptx::log2(total);
  if (params.sinks.data != nullptr && row < 0 && row != kNoTarget) {
    add_sink(params.sinks, ~row % params.num_q_heads, scale, log2_sum);
  }
  return {scale, log2_sum};
}

}  // namespace pat
