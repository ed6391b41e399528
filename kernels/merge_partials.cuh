// merge_partials: the second kernel of a decode step. Requests whose KV was read in several pieces get the
// LSE-weighted sum of their partials, in the fixed order of the plan.
//
// Rows are (request, query head) pairs. One warp takes a row; if there are few rows, with many partials each, all
// warps of a CTA share one.
#pragma once

#include <cmath>

#include "decode_params.h"
#include "ptx/ptx.cuh"

namespace pat {

inline constexpr int kMergeWarps = 8;

// The columns of a row that one lane holds: head_dim / 32 neighbours.
template <int kColumns>
struct alignas(kColumns * 4) LaneColumns {
  float values[kColumns];
};

// Past L1: its lines may be older than what the predecessor, which may still have been running when this kernel
// was launched, has written.
__device__ __forceinline__ LaneColumns<4> load_fresh(const LaneColumns<4>* source) {
  const float4 v = __ldcg(reinterpret_cast<const float4*>(source));
  return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ LaneColumns<2> load_fresh(const LaneColumns<2>* source) {
  const float2 v = __ldcg(reinterpret_cast<const float2*>(source));
  return {v.x, v.y};
}

// Weighted sum of some partials of a row: every `step`th from `first`.
template <int kColumns>
struct PartialSum {
  LaneColumns<kColumns> columns{};
  float weight = 0.f;

  __device__ __forceinline__ void add(const LaneColumns<kColumns>* partials, const float* lses,
                                      int num_heads, int first, int step, int num_partials,
                                      float shift) {
    constexpr int kInFlight = 4;
    constexpr float kLog2E = 1.4426950408889634f;
    for (int begin = first; begin < num_partials; begin += kInFlight * step) {
      LaneColumns<kColumns> rows[kInFlight];
      float row_lses[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t offset = int64_t{begin + i * step} * num_heads;
        row_lses[i] = -INFINITY;
        rows[i] = {};
        if (begin + i * step < num_partials) {
          rows[i] = load_fresh(partials + offset * 32);
          row_lses[i] = __ldcg(lses + offset);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const float row_weight = ptx::exp2((row_lses[i] - shift) * kLog2E);
        weight += row_weight;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          columns.values[column] += row_weight * rows[i].values[column];
        }
      }
    }
  }
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_partials_kernel(const __grid_constant__ MergeParams params) {
  constexpr int kColumns = kHeadDim / 32;
  constexpr unsigned kFullWarp = 0xffffffffu;
  using Columns = LaneColumns<kColumns>;
  __shared__ PartialSum<kColumns> shared_sums[kMergeWarps][32];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_heads = params.num_q_heads;
  const int num_rows = params.plan.header->num_merges * num_heads;
  const bool cta_per_row = num_rows <= static_cast<int>(gridDim.x);
  const int first_row = cta_per_row ? blockIdx.x : blockIdx.x * kMergeWarps + warp;
  const int row_step = cta_per_row ? gridDim.x : gridDim.x * kMergeWarps;

  const auto* entries = reinterpret_cast<const int4*>(params.plan.merges);
  int4 entry = first_row < num_rows ? entries[first_row / num_heads] : int4{};
  // Only now: the plan was there before pack_decode began, the partials are what it writes.
  ptx::wait_for_dependencies();
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.num_draws = 0;  // pack_decode has drawn its last
  for (int row = first_row; row < num_rows; row += row_step) {
    const int head = row % num_heads;
    const int request = entry.x, num_partials = entry.z;
    const int64_t first = int64_t{entry.y} * num_heads + head;
    if (row + row_step < num_rows) entry = entries[(row + row_step) / num_heads];
    const float* lses = params.partial_lse + first;

    float maximum = -INFINITY;
    for (int i = lane; i < num_partials; i += 32) {
      maximum = fmaxf(maximum, __ldcg(lses + int64_t{i} * num_heads));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, offset));
    }
    const float shift = maximum == -INFINITY ? 0.f : maximum;  // all partials empty

    PartialSum<kColumns> sum;
    const auto* partials = reinterpret_cast<const Columns*>(params.partial_out) + first * 32 + lane;
    sum.add(partials, lses, num_heads, cta_per_row ? warp : 0, cta_per_row ? kMergeWarps : 1,
            num_partials, shift);
    if (cta_per_row) {
      shared_sums[warp][lane] = sum;
      __syncthreads();
      sum = {};
      for (int i = 0; i < kMergeWarps; ++i) {
        const PartialSum<kColumns>& part = shared_sums[i][lane];
        sum.weight += part.weight;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          sum.columns.values[column] += part.columns.values[column];
        }
      }
      __syncthreads();
      if (warp > 0) continue;
    }

    const float inverse = sum.weight > 0.f ? 1.f / sum.weight : 0.f;
    uint32_t packed[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      packed[i] = ptx::pack<T>(sum.columns.values[2 * i] * inverse,
                               sum.columns.values[2 * i + 1] * inverse);
    }
    const int64_t out_row = int64_t{request} * num_heads + head;
    T* target = static_cast<T*>(params.out) + out_row * kHeadDim + lane * kColumns;
    if constexpr (kColumns == 4) {
      *reinterpret_cast<uint2*>(target) = make_uint2(packed[0], packed[1]);
    } else {
      *reinterpret_cast<uint32_t*>(target) = packed[0];
    }
    if (params.out_lse != nullptr && lane == 0) {
      params.out_lse[out_row] = sum.weight > 0.f ? maximum + logf(sum.weight) : -INFINITY;
    }
  }
}

}  // namespace pat
