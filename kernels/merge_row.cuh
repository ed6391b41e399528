// Where the partials of a row of merge_partials lie, and where the row's sum is stored.
#pragma once

#include <cmath>

#include "decode_params.h"
#include "partial_sum.cuh"

namespace pat {

// merge_partials cuts an output of kColumns columns into kMergeSlices rows of kMergeColumns columns.
template <int kColumns>
inline constexpr int kMergeColumns = kColumns > 256 ? 128 : kColumns;
template <int kColumns>
inline constexpr int kMergeSlices = kColumns / kMergeColumns<kColumns>;

// One row of merge_partials: a slice of an output of kColumns columns.
template <int kColumns>
struct MergeRow {
  static constexpr int kSlices = kMergeSlices<kColumns>;

  int request;
  int place;  // query head * kSlices + slice of the head's columns
  int first_partial;
  int num_partials;

  __device__ __forceinline__ int head() const { return place / kSlices; }
  __device__ __forceinline__ int slice() const { return place % kSlices; }
  __device__ __forceinline__ int first_column() const { return slice() * kMergeColumns<kColumns>; }

  template <typename T>
  __device__ __forceinline__ PartialRow<T> partials(const DecodeParams& params) const {
    const int num_heads = params.num_q_heads;
    const int64_t first = int64_t{first_partial} * num_heads + head();
    return {static_cast<const T*>(params.partial_out) + first * kColumns + first_column(),
            params.partial_lse + first, num_heads};
  }

  __device__ __forceinline__ int64_t out_row(const DecodeParams& params) const {
    return int64_t{request} * params.num_q_heads + head();
  }
};

// Stores a row's output and LSE. If the row has neither KV nor a sink, the output is 0 and the LSE is -inf. If a weight
// is NaN, both are NaN. T: element type of the output.
template <typename T, bool kScales, int kColumns, typename Sum>
__device__ __forceinline__ void store_sum(const DecodeParams& params, const Sum& sum,
                                          const MergeRow<kColumns>& row, float v_scale, int lane) {
  const int64_t out_row = row.out_row(params);
  const bool empty = sum.weight == 0.f;
  float inverse = empty ? 0.f : 1.f / sum.weight;
  if constexpr (kScales) inverse *= v_scale;
  if (lane < Sum::kLanes) {
    T* target = static_cast<T*>(params.out) + out_row * kColumns + row.first_column() + lane * 4;
#pragma unroll
    for (int v = 0; v < Sum::kVectors; ++v) {
      const float4& columns = sum.columns[v];
      *reinterpret_cast<uint2*>(target + v * Sum::kLanes * 4) =
          make_uint2(ptx::pack<T>(columns.x * inverse, columns.y * inverse),
                     ptx::pack<T>(columns.z * inverse, columns.w * inverse));
    }
  }
  if (params.out_lse != nullptr && lane == 0 && row.slice() == 0) {
    params.out_lse[out_row] = empty ? -INFINITY : sum.maximum + logf(sum.weight);
  }
}

}  // namespace pat
