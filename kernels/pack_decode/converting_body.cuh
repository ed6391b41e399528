// The body of pack_decode on Hopper for tiles of many rows over one-byte KV: as wgmma_body.cuh, but keys are multiplied
// as they are (query_terms.cuh), and consumer warps convert a stage's values to fp16 in shared memory, each a quarter
// of its tokens. So a number is converted once per tile, and not by each warp that needs it.
//
// While a stage's scores are multiplied, and the values of the stage before, its values are converted.
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/mma_body.cuh"
#include "pack_decode/query_terms.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "pack_decode/wgmma_body.cuh"
#include "ptx/fp8.cuh"

namespace pat {

// This warp's share of a stage's values. The columns of every 16 get an order in which a lane has four that touch in its
// accumulators.
template <typename Dims>
__device__ __forceinline__ void convert_values(uint32_t bytes, uint32_t numbers, int warp,
                                               uint32_t lane) {
  constexpr int kChunks = Dims::kValue / 16;
  constexpr int kTokens = kStageTokens / kConsumerWarps;
  constexpr int kCopies = kTokens * kChunks / 32;
  static_assert(32 % kChunks == 0 && kTokens * kChunks % 32 == 0);
  const uint32_t chunk = lane % kChunks;
  // The second panel's tokens are swapped in pairs: lanes that write at the same time meet in no bank.
  const uint32_t first_token = warp * kTokens + (lane / kChunks ^ chunk / 4 % 2);
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const uint32_t token = first_token + i * (32 / kChunks);
    const uint4 words = ptx::load_shared_16(bytes + swizzled_offset(kStageTokens, token, chunk));
    const auto convert = [](uint32_t word) { return fp8::convert<Dims::kKv>(word); };
    const uint2 first = convert(words.x), second = convert(words.y);
    const uint2 third = convert(words.z), fourth = convert(words.w);
    const uint32_t target = numbers + swizzled_offset(kStageTokens, token, 2 * chunk);
    ptx::store_shared_16(target, make_uint4(first.x, second.x, third.x, fourth.x));
    ptx::store_shared_16(target ^ kChunkBytes, make_uint4(first.y, second.y, third.y, fourth.y));
  }
}

// Starts the multiplication of a stage's keys. Small terms first, which the sums are exact for.
template <typename T, typename Dims>
__device__ __forceinline__ void start_scores(StageScores& scores, const QueryTerms<T, Dims>& queries,
                                             uint32_t stage) {
  const wgmma::Operand<0, KeyOperand::kGroupBytes> keys(stage);
  wgmma::fence_copies();
  wgmma::tie(scores);
  wgmma::begin();
#pragma unroll
  for (int term = queries.kTerms - 1; term >= 0; --term) {
#pragma unroll
    for (int step = 0; step < queries.kSteps; ++step) {
      wgmma::multiply_byte_keys<Dims::kKv>(scores, queries.terms[term][step],
                                           keys.at(KeyOperand::address(0, step)),
                                           term < queries.kTerms - 1 || step > 0);
    }
  }
  wgmma::commit();
}

template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void execute_item_converting(const DecodeParams& params,
                                                        Consumer<Dims>& consumer) {
  using Attention = WarpAttention<T, Dims, kSoftCap>;
  constexpr int kSyncThreads = kConsumerWarps * 32;

  const uint32_t lane = ptx::lane_id();
  const int units = tile_units(consumer.record().tile);
  const int first_row = consumer.warp * kUnitRows;
  const bool has_rows = first_row < consumer.record().num_rows;
  float* query_factors = consumer.storage.query_factors[consumer.warp];

  Attention part;
  part.begin_without_queries();
  QueryTerms<T, Dims> queries;
  LogitScale scales[2] = {params.logit_scale, params.logit_scale};
  if (has_rows) {
    float factors[2];
    queries.load(consumer.queries(units), units * kUnitRows, first_row, factors, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      (kSoftCap ? scales[h].inner : scales[h].outer) *= factors[h];
      if (lane % 4 == 0) query_factors[lane / 4 + 8 * h] = factors[h];
    }
  } else {
    queries.clear();
  }
  consumer.release_queries(units, first_row, lane);

  StageScores scores;
  StageWeights weights;
  const auto weigh = [&](const StageRecord& record) {
    typename Attention::Rescaling rescaling{};
    if (record.counts_for(consumer.warp)) {
      rescaling = part.template weigh<kStageTokens>(scores, record, first_row, 0, scales, lane);
    } else {
      clear(scores);
    }
    return rescaling;
  };
  // Two buffers, in turn.
  const uint32_t buffers = ptx::shared_address(consumer.storage.converted[0]);
  const uint32_t both = buffers ^ (buffers + Dims::Converted::kValueBytes);
  uint32_t buffer = buffers;
  // What all warps have converted is there for the next multiplications, and what they have read is done with.
  const auto exchange = [&] {
    ptx::fence_shared_writes();
    ptx::named_barrier_sync<2, kSyncThreads>();
  };

  ptx::named_barrier_sync<2, kSyncThreads>();  // the last item's end may still be in that memory
  uint32_t stage = consumer.wait_for_stage();
  StageRecord record = consumer.stage_record();
  start_scores(scores, queries, stage);
  convert_values<Dims>(stage + Dims::kKeyBytes, buffer, consumer.warp, lane);
  wgmma::wait<0>();
  wgmma::tie(scores);
  consumer.release_stage();
  weigh(record);  // nothing to rescale yet
  pack_weights<Attention>(weights, scores);
  while (!record.is_last()) {
    stage = consumer.wait_for_stage();
    record = consumer.stage_record();
    start_scores(scores, queries, stage);
    exchange();
    start_output(part, weights, buffer);
    buffer ^= both;
    convert_values<Dims>(stage + Dims::kKeyBytes, buffer, consumer.warp, lane);
    wgmma::wait<1>();
    wgmma::tie(scores);
    consumer.release_stage();
    const auto rescaling = weigh(record);
    wgmma::wait<0>();
    wgmma::tie(part.out);
    part.rescale(rescaling);
    pack_weights<Attention>(weights, scores);
  }
  exchange();
  start_output(part, weights, buffer);
  wgmma::wait<0>();
  wgmma::tie(part.out);

  if (has_rows) {
    if constexpr (!kSoftCap) {  // there, the maximum is one of capped scores
#pragma unroll
      for (int h = 0; h < 2; ++h) part.maximum[h] *= query_factors[lane / 4 + 8 * h];
    }
    part.finish();
    store_item(part, consumer.storage, params, first_row, consumer.warp, lane);
  }
}

// Smaller tiles convert in registers.
template <typename T, typename Dims, bool kSoftCap>
  requires kConvertsTiles<Dims>
__device__ __forceinline__ void execute_item(const DecodeParams& params, Consumer<Dims>& consumer) {
  if (consumer.record().tile < kFirstConvertingTile) {
    execute_tile<T, Dims, kSoftCap, 0, kFirstConvertingTile>(params, consumer);
  } else {
    execute_item_converting<T, Dims, kSoftCap>(params, consumer);
  }
}

}  // namespace pat
