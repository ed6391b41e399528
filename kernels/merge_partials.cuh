// merge_partials: the second kernel of a decode step. Requests whose KV was read in several pieces get the
// LSE-weighted sum of their partials, in the fixed order of the plan. One warp per (request, query head).
#pragma once

#include <cmath>

#include "pat/decode_params.h"
#include "pat/ptx.cuh"

namespace pat {

inline constexpr int kMergeWarps = 8;

// The columns of one row that a lane holds: head_dim / 32 neighbours.
template <int kColumns>
struct alignas(kColumns * 4) LaneColumns {
  float values[kColumns];
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_partials_kernel(const __grid_constant__ MergeParams params) {
  constexpr int kColumns = kHeadDim / 32;
  constexpr int kUnroll = 4;  // rows in flight per warp
  constexpr unsigned kFullWarp = 0xffffffffu;
  using Columns = LaneColumns<kColumns>;

  ptx::wait_for_dependencies();
  const int lane = threadIdx.x % 32;
  const int64_t num_rows = int64_t{params.plan.header->num_merges} * params.num_q_heads;
  const int64_t stride = int64_t{gridDim.x} * kMergeWarps;
  for (int64_t row = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32; row < num_rows;
       row += stride) {
    const int4 entry = reinterpret_cast<const int4*>(params.plan.merges)[row / params.num_q_heads];
    const int head = static_cast<int>(row % params.num_q_heads);
    const int request = entry.x, num_partials = entry.z;
    const int64_t first = int64_t{entry.y} * params.num_q_heads + head;
    const auto* partials =
        reinterpret_cast<const Columns*>(params.partial_out + first * kHeadDim) + lane;
    const int64_t partial_stride = int64_t{params.num_q_heads} * 32;  // in Columns
    const float* lses = params.partial_lse + first;

    // The first rows do not wait for their weights.
    Columns rows[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (i < num_partials) rows[i] = partials[i * partial_stride];
    }

    float lane_lse = lane < num_partials ? lses[int64_t{lane} * params.num_q_heads] : -INFINITY;
    float maximum = lane_lse;
    for (int i = lane + 32; i < num_partials; i += 32) {
      maximum = fmaxf(maximum, lses[int64_t{i} * params.num_q_heads]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, offset));
    }
    const float shift = maximum == -INFINITY ? 0.f : maximum;

    float total = 0.f;
    Columns sum{};
    for (int begin = 0; begin < num_partials; begin += 32) {
      if (begin > 0) {
        lane_lse = begin + lane < num_partials ? lses[int64_t{begin + lane} * params.num_q_heads]
                                               : -INFINITY;
      }
      const float lane_weight = ptx::exp2((lane_lse - shift) * 1.4426950408889634f);
      const int end = min(num_partials, begin + 32);
      for (int i = begin; i < end; i += kUnroll) {
        if (i > 0) {
#pragma unroll
          for (int j = 0; j < kUnroll; ++j) {
            if (i + j < end) rows[j] = partials[(i + j) * partial_stride];
          }
        }
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          if (i + j >= end) break;
          const float weight = __shfl_sync(kFullWarp, lane_weight, i + j - begin);
          total += weight;
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            sum.values[column] += weight * rows[j].values[column];
          }
        }
      }
    }

    const float inverse = total > 0.f ? 1.f / total : 0.f;
    const int64_t out_row = int64_t{request} * params.num_q_heads + head;
    uint32_t packed[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      packed[i] = ptx::pack<T>(sum.values[2 * i] * inverse, sum.values[2 * i + 1] * inverse);
    }
    T* target = static_cast<T*>(params.out) + out_row * kHeadDim + lane * kColumns;
    if constexpr (kColumns == 4) {
      *reinterpret_cast<uint2*>(target) = make_uint2(packed[0], packed[1]);
    } else {
      *reinterpret_cast<uint32_t*>(target) = packed[0];
    }
    if (params.out_lse != nullptr && lane == 0) {
      params.out_lse[out_row] = total > 0.f ? maximum + logf(total) : -INFINITY;
    }
  }
}

}  // namespace pat
