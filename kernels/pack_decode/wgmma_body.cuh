// The body of pack_decode on Hopper, for every tile of up to 64 rows (over one-byte KV, of more than 16): the four consumer
// warps are one warpgroup whose instructions always multiply 64 rows. Rows that a tile does not have cost tensor core time that a
// memory-bound item does not miss; in return a KV stage is read from shared memory once, and no warp ever waits
// for another one's part of a row.
//
// Stages overlap: while a stage's scores become probabilities, the values of the stage before are multiplied. What is
// under way is the same at every point of the code, or ptxas would let one multiplication wait for the other.
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/mma_body.cuh"
#include "pack_decode/query_terms.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "ptx/wgmma.cuh"

namespace pat {

using StageScores = float[kStageTokens / 8][4];
using StageWeights = ptx::Fragment[kStageTokens / 16];

// A warp's queries, as the left-hand side of the multiplication with keys.
template <typename T, typename Dims, bool kSoftCap>
struct Queries {
  using Attention = WarpAttention<T, Dims, kSoftCap>;

  __device__ __forceinline__ void load(Attention& part, const Consumer<Dims>& consumer, int units,
                                       int first_row, const LogitScale&, uint32_t lane) {
    part.begin(consumer.queries(units), units * kUnitRows, first_row, nullptr, lane);
  }
  // Of a warp that only takes part in its warpgroup's multiplications.
  __device__ __forceinline__ void clear(Attention& part) { part.begin_without_rows(); }

  // Starts the multiplication with a stage's keys.
  __device__ __forceinline__ void start_scores(StageScores& scores, const Attention& part,
                                               uint32_t stage) const {
    const wgmma::Operand<0, KeyOperand::kGroupBytes> keys(stage);
    ptx::fence_shared_memory();
    wgmma::tie(scores);
    wgmma::begin();
#pragma unroll
    for (int step = 0; step < Dims::kKey / 16; ++step) {
      wgmma::multiply_keys<T>(scores, part.queries[step], keys.at(KeyOperand::address(0, step)),
                              step > 0);
    }
    wgmma::commit();
  }

  // Of the scores.
  __device__ __forceinline__ const LogitScale& scale(const LogitScale& scale) const {
    return scale;
  }
  __device__ __forceinline__ void finish(Attention&, const Consumer<Dims>&, uint32_t) const {}
};

// Where keys have one byte: terms, of which scores are sums, by a row's own scale.
template <typename T, typename Dims, bool kSoftCap>
  requires(Dims::kOneByte)
struct Queries<T, Dims, kSoftCap> {
  using Attention = WarpAttention<T, Dims, kSoftCap>;

  QueryTerms<T, Dims> terms;
  LogitScale scales[2];

  __device__ __forceinline__ void load(Attention& part, const Consumer<Dims>& consumer, int units,
                                       int first_row, const LogitScale& scale, uint32_t lane) {
    part.begin_without_queries();
    float factors[2];
    terms.load(consumer.queries(units), units * kUnitRows, first_row, factors, lane);
    float* kept = consumer.storage.query_factors[consumer.warp];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scales[h] = scale;
      (kSoftCap ? scales[h].inner : scales[h].outer) *= factors[h];
      // Not 0, with which a maximum of -inf would become NaN.
      constexpr float kLeast = 1.17549435e-38f;
      if (scales[h].outer < kLeast) scales[h].outer = kLeast;
      if (lane % 4 == 0) kept[lane / 4 + 8 * h] = factors[h];
    }
  }
  __device__ __forceinline__ void clear(Attention& part) {
    part.begin_without_queries();
    terms.clear();
  }

  __device__ __forceinline__ void start_scores(StageScores& scores, const Attention&,
                                               uint32_t stage) const {
    constexpr int kTerms = QueryTerms<T, Dims>::kTerms;
    const wgmma::Operand<0, KeyOperand::kGroupBytes> keys(stage);
    wgmma::tie(scores);
    wgmma::begin();
    // Small terms first: the sums are exact for them.
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
      for (int step = 0; step < Dims::kKey / 32; ++step) {
        wgmma::multiply_byte_keys<Dims::kKv>(scores, terms.terms[term][step],
                                             keys.at(KeyOperand::address(0, step)),
                                             term < kTerms - 1 || step > 0);
      }
    }
    wgmma::commit();
  }

  __device__ __forceinline__ const LogitScale (&scale(const LogitScale&) const)[2] {
    return scales;
  }

  // Makes the maximum one of scores as they are without factors. A capped one is.
  __device__ __forceinline__ void finish(Attention& part, const Consumer<Dims>& consumer,
                                         uint32_t lane) const {
    if constexpr (!kSoftCap) {
      const float* kept = consumer.storage.query_factors[consumer.warp];
#pragma unroll
      for (int h = 0; h < 2; ++h) part.maximum[h] *= kept[lane / 4 + 8 * h];
    }
  }
};

// Starts the multiplication of a stage's values, which lie at `address`.
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

// A stage's probabilities as a left-hand side of a multiplication.
template <typename Attention>
__device__ __forceinline__ void pack_weights(StageWeights& weights, const StageScores& scores) {
#pragma unroll
  for (int step = 0; step < kStageTokens / 16; ++step) {
    Attention::pack_weights(weights[step], scores[2 * step], scores[2 * step + 1]);
  }
}

// Of a stage that counts for none of a warp's rows.
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
  const int first_row = consumer.warp * kUnitRows;
  const bool has_rows = first_row < consumer.record().num_rows;

  Attention part;
  Queries<T, Dims, kSoftCap> queries;
  if (has_rows) {
    queries.load(part, consumer, units, first_row, params.logit_scale, lane);
  } else {
    queries.clear(part);
  }
  consumer.release_queries(units, first_row, lane);

  StageScores scores;
  StageWeights weights;
  const auto weigh = [&](const StageRecord& record) {
    typename Attention::Rescaling rescaling{};
    if (record.counts_for(consumer.warp)) {
      rescaling = part.template weigh<kStageTokens>(scores, record, first_row, 0,
                                                    queries.scale(params.logit_scale), lane);
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
  weigh(record);  // nothing to rescale yet
  pack_weights<Attention>(weights, scores);
  while (!record.is_last()) {
    const uint32_t before = stage;
    stage = consumer.wait_for_following_wgmma_stage();
    queries.start_scores(scores, part, stage);
    start_output(part, weights, before + Dims::kKeyBytes);
    record = consumer.following_stage_record();
    wgmma::wait<1>();
    wgmma::tie(scores);
    const auto rescaling = weigh(record);
    wgmma::wait<0>();
    wgmma::tie(part.out);
    consumer.release_wgmma_stage();
    part.rescale(rescaling);
    pack_weights<Attention>(weights, scores);
  }
  start_output(part, weights, stage + Dims::kKeyBytes);
  wgmma::wait<0>();
  wgmma::tie(part.out);
  consumer.release_wgmma_stage();

  if (has_rows) {
    queries.finish(part, consumer, lane);
    part.finish();
    store_item(part, consumer.storage, params, first_row, consumer.warp, lane);
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
