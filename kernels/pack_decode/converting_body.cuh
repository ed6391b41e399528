// The body of pack_decode on Hopper for tiles of many rows over one-byte KV: consumer warps convert a stage to fp16 in
// shared memory, each a quarter of its tokens, and multiply as in wgmma_body.cuh. So a number is converted once per
// tile, and not by each warp that needs it.
//
// While a stage's scores are multiplied, and the values of the stage before, its values and the keys of the next one are
// converted.
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/mma_body.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "pack_decode/wgmma_body.cuh"
#include "ptx/fp8.cuh"

namespace pat {

// Of one operand: this warp's share of a stage's tokens. The columns of every 16 get the order in which mma_body.cuh has
// them, so that queries and accumulators mean the same in both bodies.
template <typename Dims, bool kIsKey>
__device__ __forceinline__ void convert_tokens(uint32_t bytes, uint32_t numbers, int warp,
                                               uint32_t lane) {
  constexpr int kChunks = (kIsKey ? Dims::kKey : Dims::kValue) / 16;
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
    const auto convert = [](uint32_t word) {
      return fp8::convert<Dims::kKv>(kIsKey ? word : fp8::transposed(word));
    };
    const uint2 first = convert(words.x), second = convert(words.y);
    const uint2 third = convert(words.z), fourth = convert(words.w);
    const uint32_t target = numbers + swizzled_offset(kStageTokens, token, 2 * chunk);
    ptx::store_shared_16(target, make_uint4(first.x, second.x, third.x, fourth.x));
    ptx::store_shared_16(target ^ kChunkBytes, make_uint4(first.y, second.y, third.y, fourth.y));
  }
}

template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void execute_item_converting(const DecodeParams& params,
                                                        Consumer<Dims>& consumer) {
  using Attention = WarpAttention<T, Dims, kSoftCap>;
  using Numbers = typename Dims::Converted;
  constexpr int kSyncThreads = kConsumerWarps * 32;

  const uint32_t lane = ptx::lane_id();
  const int units = tile_units(consumer.record().tile);
  const int first_row = consumer.warp * kUnitRows;
  const bool has_rows = first_row < consumer.record().num_rows;
  float* query_factors = consumer.storage.query_factors[consumer.warp];

  Attention part;
  if (has_rows) {
    part.begin(consumer.queries(units), units * kUnitRows, first_row, query_factors, lane);
  } else {
    part.begin_without_rows();
  }
  consumer.release_queries(units, first_row, lane);

  StageScores scores;
  StageWeights weights;
  const auto weigh = [&](const StageRecord& record) {
    typename Attention::Rescaling rescaling{};
    if (record.counts_for(consumer.warp)) {
      part.template undo_factors<kStageTokens>(scores, query_factors, lane);
      rescaling =
          part.template weigh<kStageTokens>(scores, record, first_row, 0, params.logit_scale, lane);
    } else {
      clear(scores);
    }
    return rescaling;
  };
  // Two buffers, in turn. The address of the keys of one; its values follow.
  const uint32_t buffers = ptx::shared_address(consumer.storage.converted[0]);
  const uint32_t both = buffers ^ (buffers + Numbers::kStageBytes);
  uint32_t buffer = buffers;
  // What all warps have converted is there for the next multiplications, and what they have read is done with.
  const auto exchange = [&] {
    ptx::fence_shared_writes();
    ptx::named_barrier_sync<2, kSyncThreads>();
  };

  ptx::named_barrier_sync<2, kSyncThreads>();  // the last item's end may still be in that memory
  uint32_t stage = consumer.wait_for_stage();
  StageRecord record = consumer.stage_record();
  convert_tokens<Dims, true>(stage, buffer, consumer.warp, lane);
  exchange();

  uint32_t following = stage;
  if (!record.is_last()) following = consumer.wait_for_following_stage();
  start_scores(scores, part, buffer);
  convert_tokens<Dims, false>(stage + Dims::kKeyBytes, buffer + Numbers::kKeyBytes, consumer.warp,
                              lane);
  convert_tokens<Dims, true>(following, buffer ^ both, consumer.warp, lane);
  wgmma::wait<0>();
  wgmma::tie(scores);
  weigh(record);  // nothing to rescale yet
  pack_weights<Attention>(weights, scores);
  while (!record.is_last()) {
    record = consumer.following_stage_record();
    consumer.release_stage();
    exchange();
    stage = following;
    if (!record.is_last()) following = consumer.wait_for_following_stage();
    start_scores(scores, part, buffer ^ both);
    start_output(part, weights, buffer);
    // The keys of this buffer have been multiplied.
    convert_tokens<Dims, false>(stage + Dims::kKeyBytes, (buffer ^ both) + Numbers::kKeyBytes,
                                consumer.warp, lane);
    convert_tokens<Dims, true>(following, buffer, consumer.warp, lane);
    buffer ^= both;
    wgmma::wait<1>();
    wgmma::tie(scores);
    const auto rescaling = weigh(record);
    wgmma::wait<0>();
    wgmma::tie(part.out);
    part.rescale(rescaling);
    pack_weights<Attention>(weights, scores);
  }
  consumer.release_stage();
  exchange();
  start_output(part, weights, buffer);
  wgmma::wait<0>();
  wgmma::tie(part.out);

  if (has_rows) {
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
