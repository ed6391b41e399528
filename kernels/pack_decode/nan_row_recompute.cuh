// Keeps a NaN in one request's KV out of the results of other requests in the same work item. A row has weight 0 for
// the segments to which its request does not attend, but 0 times NaN or infinity is NaN. So at the end of an item with
// such segments, each warp looks for NaN in its sums. If a row has a NaN, the warp recomputes the row, and reads only
// the KV of the row's own request. If that KV holds NaN, the result keeps the NaN.
//
// A row's maximum and its sum of weights cannot get such a NaN, because masked scores are replaced by -inf, not
// multiplied.
#pragma once

#include "decode_params.h"
#include "pack_decode/row_scale.cuh"
#include "pack_decode/segment_source.cuh"
#include "pack_decode/warp_attention.cuh"
#include "pack_decode/work_queue.cuh"
#include "ptx/fp8.cuh"

namespace pat {

// Returns flags that tell which of 8 rows hold a NaN, with four bits per row: one for each lane that has columns of the
// row. Infinities of both signs in one lane count as a NaN.
template <int kTiles>
__device__ __forceinline__ uint64_t find_nan(const float2 (&values)[kTiles]) {
  float total = 0.f;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) total += values[tile].x + values[tile].y;
  return __ballot_sync(kFullWarp, total != total);
}

// Loads columns [4 * group, 4 * group + 4) of a row of keys, values or queries. kType: type of the row's numbers
// (kAsQueries for queries). T: their type after the conversion to 16 bits.
template <typename T, KvType kType>
__device__ __forceinline__ float4 load_columns(const char* row, int group) {
  uint2 packed;
  if constexpr (kType == KvType::kAsQueries) {
    packed = reinterpret_cast<const uint2*>(row)[group];
  } else {
    packed = fp8::convert<kType>(reinterpret_cast<const uint32_t*>(row)[group]);
  }
  const float2 low = ptx::unpack<T>(packed.x), high = ptx::unpack<T>(packed.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ void add_product(float4& sum, float factor, const float4& values) {
  sum.x += factor * values.x;
  sum.y += factor * values.y;
  sum.z += factor * values.z;
  sum.w += factor * values.w;
}

// Computes some of a warp's 16 rows again and stores their columns [first_column, end_column). It is slow, with one row
// and 32 tokens at a time, but hardly ever called.
//
// targets: where each of the 16 rows is stored. first_row: index in the item of the first of the 16 rows. rows: four
// bits per row, as find_nan() returns them. A row is computed if any of the row's bits is set.
template <typename T, typename Dims, bool kSoftCap>
__device__ __noinline__ void recompute_rows(const DecodeParams& params, const RowTarget* targets,
                                            int item, int first_row, uint64_t rows,
                                            int first_column, int end_column) {
  constexpr int kGroups = (Dims::kValue / 4 + 31) / 32;  // groups of four columns per lane
  using Number = ComputeType<T, Dims>;                   // type of keys and values here
  const int lane = ptx::lane_id();
  const WorkItem& work = params.plan.work_items[item];
  __syncwarp();  // orders earlier stores of these rows before the ones here
#pragma unroll 1
  for (int unit_row = 0; unit_row < kUnitRows; ++unit_row) {
    const RowTarget target = targets[unit_row];
    if ((rows >> 4 * unit_row & 15) == 0 || target == kNoTarget) continue;
    const int index = request_of_row(params.rows, first_row + unit_row);
    const int request = params.plan.item_requests[work.request_begin + index].request;
    const int head = (target < 0 ? ~target : target) % params.num_q_heads;
    const int kv_head = head / params.rows.group_size;
    const auto row_of = [&](const QueryArray& array, uint64_t head_chunks) {
      return static_cast<const char*>(array.data) +
             (uint64_t{array.row_chunks} * request + head_chunks * head) * kChunkBytes;
    };
    const char* query =
        row_of(params.q, Dims::kIsLatent ? params.q.head_chunks : Dims::kKey * 2 / kChunkBytes);
    // Base address for the rope's column groups. In latent attention, the rope's groups are numbered after the query's
    // other groups, so the base lies Dv columns before the rope.
    const char* rope = query;
    if constexpr (Dims::kIsLatent) {
      rope = row_of(params.q_rope, params.q_rope.head_chunks) - Dims::kValue * 2;
    }
    const char* keys =
        static_cast<const char*>(params.k_cache) + kv_head * Dims::kKey * Dims::kElementBytes;
    const char* values =
        static_cast<const char*>(params.v_cache) + kv_head * Dims::kValue * Dims::kElementBytes;

    float maximum = -INFINITY, total = 0.f;  // largest base-2 logit; sum of the lane's weights
    float4 sums[kGroups] = {};
#pragma unroll 1
    for (int i = 0; i < work.num_segments; ++i) {
      const SegmentSource segment = SegmentSource::load(params, work.segment_begin + i);
      if (!segment.counts_for(index)) continue;
#pragma unroll 1
      for (int begin = 0; begin < segment.num_tokens; begin += 32) {
        const int num_tokens = min(segment.num_tokens - begin, 32);
        uint32_t slot = 0;
        float logit = -INFINITY;
        if (lane < num_tokens) {
          slot = segment.slots[begin + lane];
          const char* key = keys + static_cast<uint64_t>(slot) * params.k_slot_bytes;
          float score = 0.f;
#pragma unroll 4
          for (int group = 0; group < Dims::kKey / 4; ++group) {
            const bool is_rope = Dims::kIsLatent && group >= Dims::kValue / 4;
            const float4 a = load_columns<T, KvType::kAsQueries>(is_rope ? rope : query, group);
            const float4 b = load_columns<Number, Dims::kKv>(key, group);
            score += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
          }
          if constexpr (Dims::kIsFp8) score *= KvScales<true>::load(params).key;
          if constexpr (kSoftCap) score = ptx::tanh(score * params.logit_scale.inner);
          logit = score * params.logit_scale.outer;
        }
        float highest = fmaxf(maximum, logit);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, distance));
        }
        const float shift = highest == -INFINITY ? 0.f : highest;
        const float factor = ptx::exp2(maximum - shift), weight = ptx::exp2(logit - shift);
        maximum = highest;
        total = total * factor + weight;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          sums[group].x *= factor, sums[group].y *= factor;
          sums[group].z *= factor, sums[group].w *= factor;
        }
#pragma unroll 4
        for (int token = 0; token < num_tokens; ++token) {
          const float token_weight = __shfl_sync(kFullWarp, weight, token);
          const uint32_t token_slot = __shfl_sync(kFullWarp, slot, token);
          const char* value = values + static_cast<uint64_t>(token_slot) * params.v_slot_bytes;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int place = 32 * group + lane;
            if (4 * place >= Dims::kValue) continue;
            add_product(sums[group], token_weight, load_columns<Number, Dims::kKv>(value, place));
          }
        }
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(kFullWarp, total, distance);
    }

    const float scale =
        row_scale<Dims>(params, KvScales<Dims::kIsFp8>::load(params), target, maximum, total).scale;
    const bool is_partial = target >= 0;
    T* out = static_cast<T*>(is_partial ? params.partial_out : params.out) +
             static_cast<int64_t>(is_partial ? target : ~target) * Dims::kValue;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int column = 4 * (32 * group + lane);
      if (column < first_column || column >= end_column) continue;
      const float4& sum = sums[group];
      const auto packed = [&]<typename Out>(Out) {
        return make_uint2(ptx::pack<Out>(sum.x * scale, sum.y * scale),
                          ptx::pack<Out>(sum.z * scale, sum.w * scale));
      };
      *reinterpret_cast<uint2*>(out + column) = is_partial ? packed(Number{}) : packed(T{});
    }
  }
}

}  // namespace pat
