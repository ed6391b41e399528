// The body of pack_decode on wgmma, for tiles of up to 64 rows. (With one-byte KV, tiles of 16 rows use mma_body.cuh.)
// The four consumer warps are one warpgroup, and wgmma always multiplies 64 rows. Unused rows cost tensor core time,
// which memory-bound items can spare. In return a KV stage is read from shared memory once, and no warp waits for
// another.
//
// Stages overlap: while the warps turn a stage's scores into probabilities, wgmma multiplies the values of the previous
// stage. At each point of the code, the same multiplications are always in flight. Otherwise ptxas would serialise the
// multiplications.
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/mma_body.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/wgmma_queries.cuh"

namespace pat {

using StageWeights = ptx::Fragment[kStageTokens / 16];

// Starts the multiplication of the probabilities with a stage's values, which lie at `address`.
template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void start_output(WarpAttention<T, Dims, kSoftCap>& part,
                                             const StageWeights& weights, uint32_t address) {
  const wgmma::Operand<ValueOperand::kPanelBytes, ValueOperand::kGroupBytes> values(address);
  wgmma::tie(part.out);
  wgmma::begin();
#pragma unroll
  for (int step = 0; step < kStageTokens / 16; ++step) {
    wgmma::multiply_values<ComputeType<T, Dims>>(part.out, weights[step],
                                                 values.at(ValueOperand::address(0, step)));
  }
  wgmma::commit();
}

// Packs a stage's probabilities as left-hand sides of wgmma.
template <typename Attention>
__device__ __forceinline__ void pack_weights(StageWeights& weights, const StageScores& scores) {
#pragma unroll
  for (int step = 0; step < kStageTokens / 16; ++step) {
    Attention::pack_weights(weights[step], scores[2 * step], scores[2 * step + 1]);
  }
}

// Sets all weights to 0, for a stage to which none of the warp's rows attends.
__device__ __forceinline__ void clear(StageScores& scores) {
#pragma unroll
  for (int tile = 0; tile < kStageTokens / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[tile][i] = 0.f;
  }
}

template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void execute_item_wgmma(const DecodeParams& params,
                                                   Consumer<Dims>& consumer) {
  static_assert(kConsumerWarps * kUnitRows >= kTileTable[kNumTiles - 1].block_q);
  using Attention = WarpAttention<T, Dims, kSoftCap>;

  const uint32_t lane = ptx::lane_id();
  const int units = tile_units(consumer.record().tile);
  const int first_row = consumer.unit() * kUnitRows;
  const bool has_rows = first_row < consumer.record().num_rows;

  Attention part;
  Queries<T, Dims, kSoftCap> queries;
  constexpr bool kStayShared = Queries<T, Dims, kSoftCap>::kStayShared;
  if (kStayShared || has_rows) {
    queries.load(part, consumer, units, first_row, consumer.scales.template logit<kSoftCap>(params),
                 lane);
  } else if constexpr (!kStayShared) {
    queries.clear(part);
  }
  if constexpr (!kStayShared) consumer.release_queries(units, first_row, lane);

  StageScores scores;
  StageWeights weights;
  const uint32_t first_value =
      Dims::kKeyBytes + consumer.first_column() / kPanelColumns * ValueOperand::kPanelBytes;
  const auto softmax_weights = [&](const StageRecord& record) {
    if (kStayShared && record.is_last()) consumer.release_queries(units, first_row, lane);
    typename Attention::Rescaling rescaling{};
    if (record.counts_for(consumer.unit())) {
      rescaling = part.template softmax_weights<kStageTokens>(
          scores, record, first_row, 0, queries.scale(params.logit_scale), lane);
    } else {
      clear(scores);
    }
    return rescaling;
  };

  uint32_t stage = consumer.wait_for_wgmma_stage();
  StageRecord record = consumer.stage_record();
  queries.start_scores(scores, part, stage);
  wgmma::wait<0>();
  wgmma::tie(scores);
  consumer.release_keys();
  softmax_weights(record);  // the first stage has nothing to rescale
  pack_weights<Attention>(weights, scores);
  while (!record.is_last()) {
    const uint32_t before = stage;
    stage = consumer.wait_for_following_wgmma_stage();
    queries.start_scores(scores, part, stage);
    consumer.wait_for_values();
    start_output(part, weights, before + first_value);
    record = consumer.following_stage_record();
    wgmma::wait<1>();
    wgmma::tie(scores);
    consumer.release_following_keys();
    const auto rescaling = softmax_weights(record);
    wgmma::wait<0>();
    wgmma::tie(part.out);
    consumer.release_wgmma_stage();
    part.rescale(rescaling);
    pack_weights<Attention>(weights, scores);
  }
  consumer.wait_for_values();
  start_output(part, weights, stage + first_value);
  wgmma::wait<0>();
  wgmma::tie(part.out);
  consumer.release_wgmma_stage();

  if (has_rows) {
    queries.finish(part, consumer, lane);
    part.finish();
    store_item(part, consumer.storage, params, consumer.scales, first_row, consumer.warp, lane,
               consumer.first_column());
  }
}

template <typename T, typename Dims, bool kSoftCap>
  requires(kFirstWgmmaTile<Dims> < kNumTiles)
__device__ __forceinline__ void execute_item(const DecodeParams& params, Consumer<Dims>& consumer) {
  if constexpr (!kUsesWgmma<Dims>) {
    if (consumer.record().tile < kFirstWgmmaTile<Dims>) {
      return execute_tile<T, Dims, kSoftCap, 0, kFirstWgmmaTile<Dims>>(params, consumer);
    }
  }
  execute_item_wgmma<T, Dims, kSoftCap>(params, consumer);
}

}  // namespace pat
