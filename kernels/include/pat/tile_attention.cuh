// The consumer warps of pack_decode: one work item, from the queries in shared memory to normalised rows in
// registers. Warps split a tile's query rows first (16 each) and its KV second; a warp runs its own online
// softmax and meets the others only at the item's end (combine.cuh).
#pragma once

#include <cmath>

#include "pat/work_queue.cuh"

namespace pat {

// How the four consumer warps share a tile of the tile table.
template <int kTile>
struct WarpLayout {
  static constexpr TileConfig kConfig = kTileTable[kTile];
  static constexpr int kRowWarps = kConfig.block_q / kUnitRows;
  static constexpr int kKvWarps = kConsumerWarps / kRowWarps;
  static constexpr int kWarpTokens = kConfig.block_kv / kKvWarps;  // of a step, per warp
  static constexpr int kWarpsPerStage = kStageTokens / kWarpTokens;
  static constexpr int kStagesPerStep = kKvWarps / kWarpsPerStage;

  static_assert(kConfig.num_warps == kConsumerWarps && kRowWarps * kKvWarps == kConsumerWarps);
  static_assert(kWarpTokens * kWarpsPerStage == kStageTokens && kWarpTokens % 16 == 0);
  static_assert(kStagesPerStep * kStageTokens == kConfig.block_kv);
};

// One warp's share of an item: 16 query rows against its part of the KV range. A lane holds rows lane / 4 and
// lane / 4 + 8 (index h), and of each 8 columns two (accumulator layout of mma.m16n8k16).
template <typename T, int kHeadDim, bool kSoftCap>
struct WarpAttention {
  static constexpr int kColumnTiles = kHeadDim / 8;
  static constexpr int kDepthSteps = kHeadDim / 16;

  ptx::Fragment queries[kDepthSteps];
  float out[kColumnTiles][4];
  float maximum[2];  // of the scores so far; -inf before the first
  float sum[2];      // of this lane's columns only, until finish()

  // `tile` holds tile_rows rows; this warp's are the 16 from `first_row`.
  __device__ __forceinline__ void begin(uint32_t tile, int tile_rows, int first_row,
                                        uint32_t lane) {
    const uint32_t first = tile + swizzled_offset(tile_rows, first_row + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      ptx::load_matrices(queries[step], step_address(first, tile_rows, step));
    }
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[tile][i] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -INFINITY;
      sum[h] = 0.f;
    }
  }

  // kTokens tokens of a stage from `first_token`, of which the first num_valid count (at least one).
  template <int kTokens>
  __device__ __forceinline__ void attend(uint32_t keys, uint32_t values, int first_token,
                                         int num_valid, const LogitScale& scale, uint32_t lane) {
    float scores[kTokens / 8][4];
    multiply_keys<kTokens>(scores, keys, first_token, lane);
    if constexpr (kSoftCap) {
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] = ptx::tanh(scores[tile][i] * scale.inner);
      }
    }
    if (num_valid < kTokens) {
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (static_cast<int>(tile * 8 + lane % 4 * 2 + i % 2) >= num_valid)
            scores[tile][i] = -INFINITY;
        }
      }
    }
    update_maximum<kTokens>(scores, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shift = maximum[h] * scale.outer;
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          scores[tile][i] = ptx::exp2(scores[tile][i] * scale.outer - shift);
          sum[h] += scores[tile][i];
        }
      }
    }
    multiply_values<kTokens>(scores, values, first_token, lane);
  }

  // Sums up over the four lanes of a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    }
  }

 private:
  template <int kTokens>
  __device__ __forceinline__ void multiply_keys(float (&scores)[kTokens / 8][4], uint32_t keys,
                                                int first_token, uint32_t lane) {
#pragma unroll
    for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][i] = 0.f;
    }
    const int row = first_token + lane / 16 * 8 + lane % 8;
    const uint32_t first = keys + swizzled_offset(kStageTokens, row, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kTokens / 16; ++pair) {
        ptx::Fragment fragment;
        ptx::load_matrices(fragment,
                           step_address(first, kStageTokens, step) + pair * 16 * kPanelRowBytes);
        ptx::multiply_add<T>(scores[2 * pair], queries[step], fragment[0], fragment[1]);
        ptx::multiply_add<T>(scores[2 * pair + 1], queries[step], fragment[2], fragment[3]);
      }
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void update_maximum(const float (&scores)[kTokens / 8][4],
                                                 const LogitScale& scale) {
    float latest[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) latest[i / 2] = fmaxf(latest[i / 2], scores[tile][i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      latest[h] = fmaxf(latest[h], __shfl_xor_sync(0xffffffffu, latest[h], 1));
      latest[h] = fmaxf(latest[h], __shfl_xor_sync(0xffffffffu, latest[h], 2));
    }
    // Past the first few steps of a range the maximum rarely moves, and the rescaling is skipped.
    if (__any_sync(0xffffffffu, latest[0] > maximum[0] || latest[1] > maximum[1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = ptx::exp2((maximum[h] - latest[h]) * scale.outer);
        sum[h] *= factor;
#pragma unroll
        for (int tile = 0; tile < kColumnTiles; ++tile) {
          out[tile][2 * h] *= factor;
          out[tile][2 * h + 1] *= factor;
        }
        maximum[h] = latest[h];
      }
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void multiply_values(const float (&probabilities)[kTokens / 8][4],
                                                  uint32_t values, int first_token, uint32_t lane) {
    const uint32_t first =
        values + swizzled_offset(kStageTokens, first_token + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      const float (&left)[4] = probabilities[2 * step];
      const float (&right)[4] = probabilities[2 * step + 1];
      const ptx::Fragment weights = {ptx::pack<T>(left[0], left[1]), ptx::pack<T>(left[2], left[3]),
                                     ptx::pack<T>(right[0], right[1]),
                                     ptx::pack<T>(right[2], right[3])};
#pragma unroll
      for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
        ptx::Fragment fragment;
        ptx::load_matrices_transposed(
            fragment, step_address(first, kStageTokens, pair) + step * 16 * kPanelRowBytes);
        ptx::multiply_add<T>(out[2 * pair], weights, fragment[0], fragment[1]);
        ptx::multiply_add<T>(out[2 * pair + 1], weights, fragment[2], fragment[3]);
      }
    }
  }
};

}  // namespace pat
