// The body of pack_decode on Hopper, for every tile of up to 64 rows: the four consumer warps are one warpgroup
// whose instructions always multiply 64 rows. Rows that a tile does not have cost tensor core time that a
// memory-bound item does not miss; in return a KV stage is read from shared memory once, and no warp ever waits
// for another one's part of a row.
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "ptx/wgmma.cuh"

namespace pat {

template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void execute_item(const DecodeParams& params, Consumer<Dims>& consumer) {
  static_assert(kConsumerWarps * kUnitRows >= kTileTable[kNumTiles - 1].block_q);

  const uint32_t lane = ptx::lane_id();
  const int units = tile_units(consumer.record().tile);
  const int first_row = consumer.warp * kUnitRows;
  const bool has_rows = first_row < consumer.record().num_rows;

  WarpAttention<T, Dims, kSoftCap> part;
  if (has_rows) {
    part.begin(consumer.queries(units), units * kUnitRows, first_row, lane);
  } else {
    part.begin_without_rows();
  }
  consumer.release_queries(units, first_row, lane);

  bool is_last;
  do {
    const uint32_t keys = consumer.wait_for_stage();
    const uint32_t values = keys + Dims::kKeyBytes;
    float scores[kStageTokens / 8][4];
    wgmma::fence_copies();
    wgmma::tie(scores);
    wgmma::begin();
#pragma unroll
    for (int step = 0; step < Dims::kKey / 16; ++step) {
      wgmma::multiply_keys<T>(
          scores, part.queries[step],
          wgmma::descriptor(KeyOperand::address(keys, step), 0, KeyOperand::kGroupBytes), step > 0);
    }
    const StageRecord record = consumer.stage_record();
    is_last = record.is_last();
    wgmma::finish();
    wgmma::tie(scores);
    const RowInterval rows = record.rows(first_row);
    if (has_rows && rows.any()) {
      part.template weigh<kStageTokens>(scores, rows, record.num_tokens(), params.logit_scale,
                                        lane);
    } else {
#pragma unroll
      for (int tile = 0; tile < kStageTokens / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] = 0.f;
      }
    }
    // Before begin(): what is written to a register after it is not ordered with the multiplications.
    ptx::Fragment weights[kStageTokens / 16];
#pragma unroll
    for (int step = 0; step < kStageTokens / 16; ++step) {
      part.pack_weights(weights[step], scores[2 * step], scores[2 * step + 1]);
    }
    wgmma::tie(part.out);
    wgmma::begin();
#pragma unroll
    for (int step = 0; step < kStageTokens / 16; ++step) {
      wgmma::multiply_values<T>(
          part.out, weights[step],
          wgmma::descriptor(ValueOperand::address(values, step), ValueOperand::kPanelBytes,
                            ValueOperand::kGroupBytes));
    }
    wgmma::finish();
    wgmma::tie(part.out);
    consumer.release_stage();
  } while (!is_last);

  if (has_rows) {
    part.finish();
    store_item(part, params, consumer.storage.row_targets[consumer.warp], lane);
  }
}

}  // namespace pat
