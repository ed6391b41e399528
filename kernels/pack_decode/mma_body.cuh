// The bodies of pack_decode on mma.sync (Ampere and newer), one for each tile of the tile table. The four consumer
// warps first split a tile's query rows, 16 rows each. If a tile has fewer than 64 rows, several warps have the same
// rows and split the KV. Each warp has its own online softmax, and the warps combine their results at the end of the
// item.
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "ptx/fp8.cuh"

namespace pat {

// How a tile is divided among the consumer warps.
template <int kTile>
struct WarpLayout {
  static constexpr TileConfig kConfig = kTileTable[kTile];
  static constexpr int kRowWarps = kConfig.block_q / kUnitRows;
  static constexpr int kKvWarps = kConsumerWarps / kRowWarps;
  static constexpr int kWarpTokens = kConfig.block_kv / kKvWarps;  // tokens per warp and step
  static constexpr int kWarpsPerStage = kStageTokens / kWarpTokens;
  static constexpr int kStagesPerStep = kKvWarps / kWarpsPerStage;

  static_assert(kConfig.num_warps == kConsumerWarps && kRowWarps * kKvWarps == kConsumerWarps);
  static_assert(kWarpTokens * kWarpsPerStage == kStageTokens && kWarpTokens % 16 == 0);
  static_assert(kStagesPerStep * kStageTokens == kConfig.block_kv);
};

template <int kTokens, typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void multiply_keys(float (&scores)[kTokens / 8][4],
                                              const WarpAttention<T, Dims, kSoftCap>& part,
                                              uint32_t keys, int first_token, uint32_t lane) {
  using Number = ComputeType<T, Dims>;
#pragma unroll
  for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[tile][i] = 0.f;
  }
  const uint32_t row = first_token + lane / 16 * 8 + lane % 8;
  const uint32_t first = keys + swizzled_offset(kStageTokens, row, lane / 8 % 2);
  // A step multiplies two chunks of a row: 16 columns of two bytes, or 32 columns of one byte.
  constexpr int kSteps = (Dims::kKey * Dims::kElementBytes / kChunkBytes + 1) / 2;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair) {
      ptx::Fragment fragment;
      ptx::load_matrices(fragment,
                         step_address(first, kStageTokens, step) + pair * 16 * kPanelRowBytes);
      if constexpr (Dims::kIsFp8) {
#pragma unroll
        for (int depth = 2 * step; depth < std::min(2 * step + 2, Dims::kKey / 16); ++depth) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint2 numbers = fp8::convert<Dims::kKv>(fragment[2 * half + depth % 2]);
            ptx::multiply_add<Number>(scores[2 * pair + half], part.queries[depth], numbers.x,
                                      numbers.y);
          }
        }
      } else {
        ptx::multiply_add<T>(scores[2 * pair], part.queries[step], fragment[0], fragment[1]);
        ptx::multiply_add<T>(scores[2 * pair + 1], part.queries[step], fragment[2], fragment[3]);
      }
    }
  }
}

template <int kTokens, typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void multiply_values(WarpAttention<T, Dims, kSoftCap>& part,
                                                const float (&probabilities)[kTokens / 8][4],
                                                uint32_t values, int first_token, uint32_t lane) {
  using Number = ComputeType<T, Dims>;
  const uint32_t first = values + swizzled_offset(kStageTokens, first_token + lane % 16, lane / 16);
  constexpr int kPairs = (Dims::kValue * Dims::kElementBytes / kChunkBytes + 1) / 2;  // chunk pairs
#pragma unroll
  for (int step = 0; step < kTokens / 16; ++step) {
    ptx::Fragment weights;
    part.pack_weights(weights, probabilities[2 * step], probabilities[2 * step + 1]);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      ptx::Fragment fragment;
      ptx::load_matrices_transposed(
          fragment, step_address(first, kStageTokens, pair) + step * 16 * kPanelRowBytes);
      if constexpr (Dims::kIsFp8) {
#pragma unroll
        for (int chunk = 2 * pair; chunk < std::min(2 * pair + 2, Dims::kValue / 16); ++chunk) {
          // Each register holds two columns of two tokens. One tile gets the even columns, and the next tile the odd
          // ones.
          const uint32_t* registers = fragment + chunk % 2 * 2;
          const uint2 low = fp8::convert<Dims::kKv>(fp8::transposed(registers[0]));
          const uint2 high = fp8::convert<Dims::kKv>(fp8::transposed(registers[1]));
          ptx::multiply_add<Number>(part.out[2 * chunk], weights, low.x, high.x);
          ptx::multiply_add<Number>(part.out[2 * chunk + 1], weights, low.y, high.y);
        }
      } else {
        ptx::multiply_add<T>(part.out[2 * pair], weights, fragment[0], fragment[1]);
        ptx::multiply_add<T>(part.out[2 * pair + 1], weights, fragment[2], fragment[3]);
      }
    }
  }
}

// Executes one item with the body of tile kTile.
template <typename T, typename Dims, bool kSoftCap, int kTile>
__device__ __forceinline__ void execute_item_mma(const DecodeParams& params,
                                                 Consumer<Dims>& consumer) {
  using Layout = WarpLayout<kTile>;
  constexpr int kTileRows = Layout::kConfig.block_q;
  constexpr int kUnits = kTileRows / kUnitRows;
  constexpr int kTokens = Layout::kWarpTokens;

  // Reads the lane id again for each item. Otherwise the compiler would keep values that derive from it for all three
  // bodies, and these do not fit in registers.
  const uint32_t lane = ptx::lane_id();
  const int num_rows = consumer.record().num_rows;
  const int first_row = consumer.warp / Layout::kKvWarps * kUnitRows;
  const int kv_warp = consumer.warp % Layout::kKvWarps;

  WarpAttention<T, Dims, kSoftCap> part;
  float* query_factors = consumer.storage.query_factors[Dims::kIsFp8 ? consumer.warp : 0];
  part.begin(consumer.queries(kUnits), kTileRows, first_row, query_factors, lane);
  consumer.release_queries(kUnits, first_row, lane);

  decltype(auto) scale = consumer.scales.template logit<kSoftCap>(params);
  const int own_stage = kv_warp / Layout::kWarpsPerStage;
  const int first_token = kv_warp % Layout::kWarpsPerStage * kTokens;
  int num_stages = 0;
  StageRecord record;
  do {
    const uint32_t keys = consumer.wait_for_stage();
    record = consumer.stage_record();
    if (num_stages % Layout::kStagesPerStep == own_stage && record.num_tokens() > first_token &&
        record.counts_for(first_row / kUnitRows)) {
      float scores[kTokens / 8][4];
      multiply_keys<kTokens>(scores, part, keys, first_token, lane);
      part.template undo_factors<kTokens>(scores, query_factors, lane);
      part.rescale(part.template softmax_weights<kTokens>(scores, record, first_row, first_token,
                                                          scale, lane));
      const uint32_t values = keys + kLandingOffset<Dims>;
      multiply_values<kTokens>(part, scores, values, first_token, lane);
    }
    consumer.release_stage();
    ++num_stages;
  } while (!record.is_last());

  if constexpr (Dims::kIsFp8) part.order_columns();
  part.finish();
  if constexpr (Layout::kKvWarps == 1) {
    store_item(part, consumer.storage, params, consumer.scales, first_row, consumer.warp, lane);
  } else {
    const int num_parts = min(num_stages, Layout::kStagesPerStep) * Layout::kWarpsPerStage;
    combine_and_store_item<T, Dims, kSoftCap, Layout::kKvWarps>(
        part, consumer.storage, params, consumer.scales, num_parts, num_rows, first_row,
        consumer.warp, lane);
  }
}

// Executes one item with the body of its tile, which is one of [kTile, kEndTile).
template <typename T, typename Dims, bool kSoftCap, int kTile, int kEndTile>
__device__ __forceinline__ void execute_tile(const DecodeParams& params, Consumer<Dims>& consumer) {
  if constexpr (kTile + 1 < kEndTile) {
    if (consumer.record().tile != kTile) {
      return execute_tile<T, Dims, kSoftCap, kTile + 1, kEndTile>(params, consumer);
    }
  }
  execute_item_mma<T, Dims, kSoftCap, kTile>(params, consumer);
}

// Executes one item. Used if all tiles of the tile table run on mma.sync.
template <typename T, typename Dims, bool kSoftCap>
  requires(kFirstWgmmaTile<Dims> == kNumTiles)
__device__ __forceinline__ void execute_item(const DecodeParams& params, Consumer<Dims>& consumer) {
  execute_tile<T, Dims, kSoftCap, 0, kNumTiles>(params, consumer);
}

}  // namespace pat
