// The end of a work item in pack_decode. Combines the results of the warps that split a tile's KV, normalises each row,
// and stores it. If the row's request is in no other work item, the row is stored to the output, else as a partial.
#pragma once

#include "decode_params.h"
#include "pack_decode/nan_row_recompute.cuh"
#include "pack_decode/row_scale.cuh"
#include "pack_decode/warp_attention.cuh"

namespace pat {

// Stores kTiles tiles of 8 columns of a row, from `first_column` on. This lane holds two columns of each tile. kMayEnd:
// the row may end before the last of these columns.
template <typename T, typename Dims, bool kMayEnd, int kTiles>
__device__ __forceinline__ void store_columns(const DecodeParams& params, RowTarget row,
                                              int first_column, const float2 (&values)[kTiles],
                                              float scale, uint32_t lane) {
  if (row == kNoTarget) return;
  using Partial = ComputeType<T, Dims>;
  static_assert(sizeof(Partial) == sizeof(T));
  const bool is_partial = row >= 0;
  // This lane has two neighbouring columns of each tile or, with one-byte KV, four neighbouring columns of two tiles.
  T* target = static_cast<T*>(is_partial ? params.partial_out : params.out) +
              static_cast<int64_t>(is_partial ? row : ~row) * Dims::kValue +
              (first_column + lane % 4 * (Dims::kIsFp8 ? 4 : 2));
  if constexpr (Dims::kIsFp8) {
    const bool converts = !std::is_same_v<T, Partial> && !is_partial;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      if (kMayEnd && first_column + tile * 8 >= Dims::kValue) continue;
      const float2 low = make_float2(values[tile].x * scale, values[tile].y * scale);
      const float2 high = make_float2(values[tile + 1].x * scale, values[tile + 1].y * scale);
      *reinterpret_cast<uint2*>(target + tile * 8) =
          converts
              ? make_uint2(ptx::pack<T>(low.x, low.y), ptx::pack<T>(high.x, high.y))
              : make_uint2(ptx::pack<Partial>(low.x, low.y), ptx::pack<Partial>(high.x, high.y));
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (kMayEnd && first_column + tile * 8 >= Dims::kValue) continue;
      *reinterpret_cast<uint32_t*>(target + tile * 8) =
          ptx::pack<T>(values[tile].x * scale, values[tile].y * scale);
    }
  }
}

// Transposes 4 x 4 words among four neighbouring lanes: lane i gets word i of each of the four lanes.
__device__ __forceinline__ void transpose(uint32_t (&words)[4], uint32_t lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool is_upper = lane & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      const uint32_t other = __shfl_xor_sync(kFullWarp, is_upper ? low : high, distance);
      (is_upper ? low : high) = other;
    }
  }
}

// Does the same as store_columns(), but faster for long rows: the row's four lanes exchange columns, so that each lane
// stores 16 bytes at once.
template <typename T, typename Dims, int kTiles>
__device__ __forceinline__ void store_long_row(const DecodeParams& params, RowTarget row,
                                               int first_column, const float2 (&values)[kTiles],
                                               float scale, uint32_t lane) {
  const bool is_partial = row >= 0;
  T* target = static_cast<T*>(is_partial ? params.partial_out : params.out) +
              static_cast<int64_t>(is_partial ? row : ~row) * Dims::kValue +
              (first_column + lane % 4 * 8);
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = ptx::pack<T>(values[tile + i].x * scale, values[tile + i].y * scale);
    }
    transpose(words, lane);
    if (row == kNoTarget) continue;
    *reinterpret_cast<uint4*>(target + tile * 8) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ void store_lse(const DecodeParams& params, RowTarget row,
                                          float log2_sum) {
  if (row == kNoTarget) return;
  const float lse = log2_sum * 0.6931471805599453f;
  if (row >= 0) {
    params.partial_lse[row] = lse;
  } else if (params.out_lse != nullptr) {
    params.out_lse[~row] = lse;
  }
}

// Stores the results of latent attention for 16 rows, the first of which is row first_row of the item: kTiles * 8
// columns from first_column on and, if first_column is 0, the LSEs. maximum, total: for each of this lane's two rows,
// the score to which the exponentials are relative, and the sum of the exponentials.
template <typename T, typename Dims, int kTiles>
__device__ __forceinline__ void store_latent_unit(
    const DecodeParams& params, const KvScales<Dims::kIsFp8>& scales, const RowTarget* targets,
    int mixed_item, int first_row, int first_column, const float (&out)[kTiles][4],
    const float (&maximum)[2], const float (&total)[2], uint32_t lane) {
  uint64_t rows_with_nan = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float2 values[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      values[tile] = make_float2(out[tile][2 * h], out[tile][2 * h + 1]);
    }
    if (mixed_item != kNotMixed) rows_with_nan |= find_nan(values) << 32 * h;
    const RowTarget row = targets[lane / 4 + 8 * h];
    constexpr float kHeadroom = WarpAttention<T, Dims, false>::kHeadroom;
    const float logit = maximum[h] * scales.template logit<false>(params).outer;
    const auto [scale, log2_sum] =
        row_scale<Dims>(params, scales, row, logit - kHeadroom, total[h]);
    if constexpr (Dims::kIsFp8) {
      store_columns<T, Dims, false>(params, row, first_column, values, scale, lane);
    } else {
      store_long_row<T, Dims>(params, row, first_column, values, scale, lane);
    }
    if (first_column == 0 && lane % 4 == 0) store_lse(params, row, log2_sum);
  }
  if (rows_with_nan != 0) {
    recompute_rows<T, Dims, false>(params, targets, mixed_item, first_row, rows_with_nan,
                                   first_column, first_column + kTiles * 8);
  }
}

// Stores a row's columns from `first_column` on, and the row's LSE if `first_column` is 0. total: sum of the
// exponentials, which are relative to the score `maximum`.
template <typename T, typename Dims, bool kSoftCap, bool kMayEnd, int kTiles>
__device__ __forceinline__ void store_row(const DecodeParams& params,
                                          const KvScales<Dims::kIsFp8>& scales, RowTarget row,
                                          int first_column, const float2 (&values)[kTiles],
                                          float maximum, float total, uint32_t lane) {
  constexpr float kHeadroom = WarpAttention<T, Dims, kSoftCap>::kHeadroom;
  const float logit = maximum * scales.template logit<kSoftCap>(params).outer;
  const auto [scale, log2_sum] = row_scale<Dims>(params, scales, row, logit - kHeadroom, total);
  if constexpr (Dims::kIsWide) {
    store_long_row<T, Dims>(params, row, first_column, values, scale, lane);
  } else {
    store_columns<T, Dims, kMayEnd>(params, row, first_column, values, scale, lane);
  }
  if (first_column == 0 && lane % 4 == 0) store_lse(params, row, log2_sum);
}

// Stores a tile whose KV was not split among warps. Every warp stores its own columns of its own 16 rows. The first of
// these rows is row first_row of the item.
template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void store_item(const WarpAttention<T, Dims, kSoftCap>& part,
                                           SharedStorage<Dims>& storage, const DecodeParams& params,
                                           const KvScales<Dims::kIsFp8>& scales, int first_row,
                                           int warp, uint32_t lane, int first_column = 0) {
  constexpr int kTiles = std::min(Dims::kValue, kOutColumns<Dims>) / 8;
  const RowTarget* targets = storage.row_targets[warp];
  const bool is_mixed = storage.mixed_items[warp] != kNotMixed;
  uint64_t rows_with_nan = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float2 values[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      values[tile] = make_float2(part.out[tile][2 * h], part.out[tile][2 * h + 1]);
    }
    if (is_mixed) rows_with_nan |= find_nan(values) << 32 * h;
    store_row<T, Dims, kSoftCap, false>(params, scales, targets[lane / 4 + 8 * h], first_column,
                                        values, part.maximum[h], part.sum[h], lane);
  }
  if (rows_with_nan != 0) {
    recompute_rows<T, Dims, kSoftCap>(params, targets, storage.mixed_items[warp], first_row,
                                      rows_with_nan, first_column, first_column + kTiles * 8);
  }
}

// Combines and stores a tile whose KV was split: kKvWarps warps have the same 16 rows. Only the first num_parts of
// these warps may have read KV. Each warp combines and stores some of the columns. All consumer warps must call it.
template <typename T, typename Dims, bool kSoftCap, int kKvWarps>
__device__ __forceinline__ void combine_and_store_item(const WarpAttention<T, Dims, kSoftCap>& part,
                                                       SharedStorage<Dims>& storage,
                                                       const DecodeParams& params,
                                                       const KvScales<Dims::kIsFp8>& scales,
                                                       int num_parts, int num_rows, int first_row,
                                                       int warp, uint32_t lane) {
  constexpr int kTiles = Dims::kValue / 8;
  constexpr int kOwnTiles = own_tiles<Dims>(kKvWarps);
  constexpr bool kMayEnd = kOwnTiles * kKvWarps != kTiles;  // the last warp has fewer columns
  constexpr int kOthers = kKvWarps - 1;
  constexpr int kSyncThreads = kConsumerWarps * 32;
  decltype(auto) scale = scales.template logit<kSoftCap>(params);
  const int kv_warp = warp % kKvWarps;
  const int first_warp = warp - kv_warp;
  const bool has_part = kv_warp < num_parts;
  const int state_row = lane / 4;
  const int first_column = kv_warp * kOwnTiles * 8;
  const RowTarget* targets = storage.row_targets[warp];
  const bool is_mixed = storage.mixed_items[warp] != kNotMixed;
  uint64_t rows_with_nan = 0;

  if (has_part && lane % 4 == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      storage.row_states[warp][state_row + 8 * h] = make_float2(part.maximum[h], part.sum[h]);
    }
  }
  // The barrier also keeps a fast warp from writing to `exchange` while a slow warp still reads the previous item's
  // data.
  ptx::named_barrier_sync<1, kSyncThreads>();

  // exchange[row group][receiver][sender's rank among the others][tile][lane] holds 8 rows at a time.
  float2* exchange = storage.exchange + first_warp * kOthers * kOwnTiles * 32 + lane;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // In the common case of one request with a group size of at most 8, rows 8 to 15 of the tile are padding.
    if (h == 1) {
      if (num_rows <= 8) break;
      ptx::named_barrier_sync<1, kSyncThreads>();
    }
    float maximum = -INFINITY, total = 0.f;
    float2 states[kKvWarps];
#pragma unroll
    for (int other = 0; other < kKvWarps; ++other) {
      states[other] = make_float2(-INFINITY, 0.f);
      if (other < num_parts)
        states[other] = storage.row_states[first_warp + other][state_row + 8 * h];
      maximum = fmaxf(maximum, states[other].x);
    }
    const float shift = maximum == -INFINITY ? 0.f : maximum;  // 0 if the row has no KV
#pragma unroll
    for (int other = 0; other < kKvWarps; ++other) {
      total += states[other].y * ptx::exp2((states[other].x - shift) * scale.outer);
    }

    float2 own[kOwnTiles] = {};
    if (has_part) {
      const float factor = ptx::exp2((part.maximum[h] - shift) * scale.outer);
#pragma unroll
      for (int receiver = 0; receiver < kKvWarps; ++receiver) {
        const int rank = kv_warp - (kv_warp > receiver);
        float2* target = exchange + (receiver * kOthers + rank) * kOwnTiles * 32;
#pragma unroll
        for (int tile = 0; tile < kOwnTiles; ++tile) {
          if (receiver * kOwnTiles + tile >= kTiles) continue;
          const float (&values)[4] = part.out[receiver * kOwnTiles + tile];
          const float2 pair = make_float2(values[2 * h] * factor, values[2 * h + 1] * factor);
          if (receiver == kv_warp) {
            own[tile] = pair;
          } else {
            target[tile * 32] = pair;
          }
        }
      }
    }
    ptx::named_barrier_sync<1, kSyncThreads>();
    const float2* received = exchange + kv_warp * kOthers * kOwnTiles * 32;
#pragma unroll
    for (int rank = 0; rank < kOthers; ++rank) {
      const int sender = rank + (rank >= kv_warp);
      if (sender >= num_parts) continue;
#pragma unroll
      for (int tile = 0; tile < kOwnTiles; ++tile) {
        if (kMayEnd && kv_warp * kOwnTiles + tile >= kTiles) continue;
        const float2 pair = received[(rank * kOwnTiles + tile) * 32];
        own[tile].x += pair.x;
        own[tile].y += pair.y;
      }
    }
    if (is_mixed) rows_with_nan |= find_nan(own) << 32 * h;
    store_row<T, Dims, kSoftCap, kMayEnd>(params, scales, targets[lane / 4 + 8 * h], first_column,
                                          own, maximum, total, lane);
  }
  if (rows_with_nan != 0) {
    recompute_rows<T, Dims, kSoftCap>(params, targets, storage.mixed_items[warp], first_row,
                                      rows_with_nan, first_column,
                                      min(first_column + kOwnTiles * 8, Dims::kValue));
  }
}

}  // namespace pat
