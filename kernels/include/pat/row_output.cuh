// The end of a work item in pack_decode: combine the warps that split a tile's KV, normalise, and store each row
// as a partial or, where it is the request's only one, straight into the output.
#pragma once

#include "pat/decode_params.h"
#include "pat/tile_attention.cuh"

namespace pat {

// Where a lane's two rows go. Read from the item's record before its slot is handed back to the producer.
struct RowTargets {
  static constexpr int kNone = INT32_MIN;
  // Row of partial_out / partial_lse, or ~row of out / out_lse, or kNone for a padding row.
  int row[2];

  __device__ __forceinline__ RowTargets(const ItemRecord& record, const QueryRows& rows,
                                        int kv_head, int num_q_heads, int first_row, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int tile_row = first_row + lane / 4 + 8 * h;
      row[h] = kNone;
      if (tile_row < record.num_rows) {
        const ItemRequest target = record.requests[request_of_row(rows, tile_row)];
        const int head = kv_head * rows.group_size + head_of_row(rows, tile_row);
        row[h] = target.partial_slot == kDirectStore ? ~(target.request * num_q_heads + head)
                                                     : target.partial_slot * num_q_heads + head;
      }
    }
  }
};

template <typename T, int kHeadDim>
__device__ __forceinline__ void store_columns(const DecodeParams& params, int row, int column,
                                              float x, float y) {
  if (row == RowTargets::kNone) return;
  if (row >= 0) {
    float* target = params.partial_out + static_cast<int64_t>(row) * kHeadDim + column;
    *reinterpret_cast<float2*>(target) = make_float2(x, y);
  } else {
    T* target = static_cast<T*>(params.out) + static_cast<int64_t>(~row) * kHeadDim + column;
    *reinterpret_cast<uint32_t*>(target) = ptx::pack<T>(x, y);
  }
}

// log2_sum: log2 of the sum of exponentials, -inf for an empty range.
__device__ __forceinline__ void store_lse(const DecodeParams& params, int row, float log2_sum) {
  if (row == RowTargets::kNone) return;
  const float lse = log2_sum * 0.6931471805599453f;
  if (row >= 0) {
    params.partial_lse[row] = lse;
  } else if (params.out_lse != nullptr) {
    params.out_lse[~row] = lse;
  }
}

// Finishes a tile whose KV is split across kKvWarps warps (kv_warp is this one's part). num_rows: rows in use,
// for the whole tile. All consumer warps call it together.
template <typename T, int kHeadDim, bool kSoftCap, int kKvWarps>
__device__ __forceinline__ void finish_item(WarpAttention<T, kHeadDim, kSoftCap>& part,
                                            SharedStorage<kHeadDim>& storage,
                                            const DecodeParams& params, const RowTargets& targets,
                                            int num_rows, int warp, int lane) {
  constexpr int kTiles = kHeadDim / 8;
  constexpr int kOwnTiles = kTiles / kKvWarps;
  const int kv_warp = warp % kKvWarps;
  const int column = kv_warp * kOwnTiles * 8 + lane % 4 * 2;

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    part.sum[h] += __shfl_xor_sync(0xffffffffu, part.sum[h], 1);
    part.sum[h] += __shfl_xor_sync(0xffffffffu, part.sum[h], 2);
  }

  float total[2] = {part.sum[0], part.sum[1]};
  float maximum[2] = {part.maximum[0], part.maximum[1]};
  if constexpr (kKvWarps > 1) {
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        storage.row_states[warp][lane / 4 + 8 * h] = make_float2(part.maximum[h], part.sum[h]);
      }
    }
    // Also keeps a fast warp from writing into `exchange` while a slow one still reads the last item's.
    ptx::named_barrier_sync<1, kConsumerWarps * 32>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float2 states[kKvWarps];
#pragma unroll
      for (int other = 0; other < kKvWarps; ++other) {
        states[other] = storage.row_states[warp - kv_warp + other][lane / 4 + 8 * h];
        maximum[h] = fmaxf(maximum[h], states[other].x);
      }
      // An empty part has maximum -inf, and so has the whole of an empty item.
      const float shift = maximum[h] == -INFINITY ? 0.f : maximum[h];
      total[h] = 0.f;
#pragma unroll
      for (int other = 0; other < kKvWarps; ++other) {
        total[h] +=
            states[other].y * ptx::exp2((states[other].x - shift) * params.logit_scale.outer);
      }
      const float factor = ptx::exp2((part.maximum[h] - shift) * params.logit_scale.outer);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        part.out[tile][2 * h] *= factor;
        part.out[tile][2 * h + 1] *= factor;
      }
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Rows 8 to 15 of every warp are padding in the common small tile (one request, group <= 8).
    if constexpr (kKvWarps > 1) {
      if (h == 1 && num_rows <= 8) break;
    }
    float2 own[kOwnTiles];
    if constexpr (kKvWarps == 1) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        own[tile] = make_float2(part.out[tile][2 * h], part.out[tile][2 * h + 1]);
      }
    } else {
      if (h == 1) ptx::named_barrier_sync<1, kConsumerWarps * 32>();
      // exchange[receiver][sender's rank among the others][tile][lane]
      float2* row_group =
          storage.exchange + (warp - kv_warp) * (kKvWarps - 1) * kOwnTiles * 32 + lane;
#pragma unroll
      for (int receiver = 0; receiver < kKvWarps; ++receiver) {
        const int rank = kv_warp - (kv_warp > receiver);
        float2* target = row_group + (receiver * (kKvWarps - 1) + rank) * kOwnTiles * 32;
#pragma unroll
        for (int tile = 0; tile < kOwnTiles; ++tile) {
          const float (&values)[4] = part.out[receiver * kOwnTiles + tile];
          const float2 pair = make_float2(values[2 * h], values[2 * h + 1]);
          if (receiver == kv_warp) {
            own[tile] = pair;
          } else {
            target[tile * 32] = pair;
          }
        }
      }
      ptx::named_barrier_sync<1, kConsumerWarps * 32>();
      const float2* received = row_group + kv_warp * (kKvWarps - 1) * kOwnTiles * 32;
#pragma unroll
      for (int rank = 0; rank < kKvWarps - 1; ++rank) {
#pragma unroll
        for (int tile = 0; tile < kOwnTiles; ++tile) {
          const float2 pair = received[(rank * kOwnTiles + tile) * 32];
          own[tile].x += pair.x;
          own[tile].y += pair.y;
        }
      }
    }

    const bool empty = total[h] == 0.f;
    const float inverse = empty ? 0.f : 1.f / total[h];
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile) {
      store_columns<T, kHeadDim>(params, targets.row[h], column + tile * 8, own[tile].x * inverse,
                                 own[tile].y * inverse);
    }
    if (kv_warp == 0 && lane % 4 == 0) {
      store_lse(params, targets.row[h],
                empty ? -INFINITY : maximum[h] * params.logit_scale.outer + log2f(total[h]));
    }
  }
}

}  // namespace pat
