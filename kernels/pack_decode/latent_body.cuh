// The wgmma body of pack_decode for latent attention: two warpgroups share a tile of 64 query rows and 512 output
// columns. They take an item's stages in pairs. The first warpgroup computes the scores of the pair's first stage, the
// second warpgroup those of the pair's second stage. Each warpgroup then multiplies the weights (unnormalised
// probabilities) of both stages with its own 256 columns of the values. It has its own weights in registers. It reads
// the other warpgroup's weights from shared memory, where they replace the last key panel of the other warpgroup's
// stage.
//
// Both warpgroups use the same maximum for a row's weights: a warpgroup passes its maximum on together with its
// weights. While one warpgroup turns scores into weights, the other multiplies.
#pragma once

#include "decode_params.h"
#include "pack_decode/latent_storage.cuh"
#include "pack_decode/nan_row_recompute.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "ptx/wgmma.cuh"
#include "scales.cuh"

namespace pat {

// Ids of the named barriers that announce the first and the second warpgroup's weights.
inline constexpr int kFirstWeights = 1, kSecondWeights = 2;
inline constexpr int kBarrierThreads = kLatentConsumerWarps * 32;

template <typename T, typename Dims, int kGroup>
struct LatentConsumer {
  using Storage = SharedStorage<Dims>;
  static constexpr int kColumns = Dims::kValue / kLatentGroups;
  static constexpr int kTokens = Dims::kTokens;
  static_assert(kTokens == LatentOperand::kRows && kMaxTileRows == LatentOperand::kRows);
  // Operands of wgmma. Columns: 16 columns of 64 rows. Values: 16 tokens of this warpgroup's half of the value columns.
  using Columns = wgmma::Operand<0, LatentOperand::kGroupBytes>;
  using Values = wgmma::Operand<LatentOperand::kPanelBytes, LatentOperand::kGroupBytes>;
  using Attention = WarpAttention<T, Dims, false, kColumns>;
  using Ring = RingPosition<Storage::kStages>;
  using Scores = float[kTokens / 8][4];
  using Weights = ptx::Fragment[kTokens / 16];

  const DecodeParams& params;
  Storage& storage;
  const int unit;  // which 16 rows of the tile
  const uint32_t lane;
  uint32_t num_items = 0;
  Ring ring{};

  __device__ __forceinline__ const ItemRecord& record() const {
    return storage.records[num_items % kLatentRecords];
  }

  // Waits for the next item's record and queries. Returns false if no item is left.
  __device__ __forceinline__ bool wait_for_item() const {
    ptx::barrier_wait(ptx::shared_address(&storage.queries_full), num_items & 1);
    return __shfl_sync(kFullWarp, record().tile, 0) != kNoMoreItems;
  }
  // Releases the queries. All lanes call it. The item's record stays valid until the next item's queries are released.
  __device__ __forceinline__ void release_queries() const {
    ptx::barrier_arrive(ptx::shared_address(&storage.queries_empty));
  }

  __device__ __forceinline__ uint32_t address(const Ring& at) const {
    return ptx::shared_address(storage.kv[at.stage]);
  }
  // Waits for a part of a stage. The other warpgroup alone releases some of the parts, so such a part could be refilled
  // before this warpgroup has waited for it. To prevent that, this warpgroup waits for such a part before it hands over
  // its weights of the stage, without which the other warpgroup cannot release the part.
  __device__ __forceinline__ void wait_for_part(const Ring& at, int part) const {
    ptx::barrier_wait(ptx::shared_address(&storage.kv_full[at.stage][part]), at.parity);
    ptx::fence_shared_memory();
  }
  // The stage's record, which arrives with the stage's last part. The broadcast from lane 0 tells ptxas that the record
  // is uniform.
  __device__ __forceinline__ StageRecord stage_record(const Ring& at) const {
    return {__shfl_sync(kFullWarp, storage.stage_records[at.stage].packed, 0)};
  }
  __device__ __forceinline__ void release_part(const Ring& at, int part) const {
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&storage.kv_empty[at.stage][part]));
  }

  // Starts the multiplication of the queries with a stage's keys. Waits for each part of the keys just before the
  // part's first use.
  __device__ __forceinline__ void start_scores(Scores& scores, const Ring& at) const {
    const Columns queries(ptx::shared_address(storage.queries)), keys(address(at));
    wgmma::tie(scores);
#pragma unroll
    for (int step = 0; step < Dims::kKey / 16; ++step) {
      if (step % (4 * kPartPanels) == 0) {
        wait_for_part(at, step / (4 * kPartPanels));
        wgmma::begin();
      }
      const uint32_t offset = LatentOperand::columns(0, step);
      wgmma::multiply_shared_keys<T>(scores, queries.at(offset), keys.at(offset), step > 0);
    }
    wgmma::commit();
  }

  // The wgmma operand with the values of 16 tokens of a stage.
  __device__ __forceinline__ uint64_t values(const Ring& at, int step) const {
    return Values(address(at)).at(LatentOperand::tokens(0, kGroup * kPartPanels, step));
  }
  // Address of the weights in shared memory: 64 rows by 64 tokens, in place of the stage's last key panel.
  __device__ __forceinline__ uint32_t shared_weights(const Ring& at) const {
    return address(at) + kLatentGroups * kPartPanels * LatentOperand::kPanelBytes;
  }

  // Both functions start the multiplication of weights with a stage's values. start_output() takes this warpgroup's
  // weights from registers, start_shared_output() the other warpgroup's weights from shared memory.
  __device__ __forceinline__ void start_output(Attention& part, const Weights& weights,
                                               const Ring& at) const {
    wgmma::tie(part.out);
    wgmma::begin();
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      wgmma::multiply_values<T>(part.out, weights[step], values(at, step));
    }
    wgmma::commit();
  }
  __device__ __forceinline__ void start_shared_output(Attention& part, const Ring& at) const {
    const Columns weights(shared_weights(at));
    wgmma::tie(part.out);
    wgmma::begin();
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      wgmma::multiply_shared_values<T>(part.out, weights.at(LatentOperand::columns(0, step)),
                                       values(at, step));
    }
    wgmma::commit();
  }

  // Turns a stage's scores into weights. See WarpAttention::softmax_weights().
  __device__ __forceinline__ typename Attention::Rescaling softmax_weights(
      Attention& part, Weights& weights, Scores& scores, const StageRecord& record) const {
    typename Attention::Rescaling rescaling{};
    if (record.counts_for(unit)) {
      rescaling = part.template softmax_weights<kTokens>(scores, record, unit * kUnitRows, 0,
                                                         params.logit_scale, lane);
    } else {
#pragma unroll
      for (auto& tile : scores) {
#pragma unroll
        for (float& score : tile) score = 0.f;
      }
    }
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      Attention::pack_weights(weights[step], scores[2 * step], scores[2 * step + 1]);
    }
    return rescaling;
  }

  // Gives the weights and the maxima of a stage to the other warpgroup, through shared memory.
  __device__ __forceinline__ void hand_over(const Attention& part, const Weights& weights,
                                            const Ring& at) const {
    const uint32_t target =
        shared_weights(at) + swizzled_offset(kMaxTileRows, unit * kUnitRows + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      ptx::store_matrices(step_address(target, kMaxTileRows, step), weights[step]);
    }
    ptx::fence_shared_memory();
    if (lane % 4 == 0) {
      float* maxima = storage.maxima + unit * kUnitRows + lane / 4;
      maxima[0] = part.maximum[0];
      maxima[8] = part.maximum[1];
    }
    ptx::named_barrier_arrive<kGroup == 0 ? kFirstWeights : kSecondWeights, kBarrierThreads>();
  }
  // Waits for the other warpgroup's weights and adopts its maxima. Returns the factors by which this warpgroup must
  // rescale its sums.
  __device__ __forceinline__ typename Attention::Rescaling take_over(Attention& part) const {
    ptx::named_barrier_sync<kGroup == 0 ? kSecondWeights : kFirstWeights, kBarrierThreads>();
    const float* maxima = storage.maxima + unit * kUnitRows + lane / 4;
    return part.follow({maxima[0], maxima[8]}, params.logit_scale);
  }

  __device__ __forceinline__ void finish_output(Attention& part, const Ring& at) const {
    wgmma::wait<0>();
    wgmma::tie(part.out);
    release_part(at, kGroup);
    release_part(at, kStageParts - 1);
  }

  __device__ __forceinline__ void execute_stages(Attention& part) {
    Scores scores;
    Weights weights;
    bool is_last;
    do {
      const Ring first = ring;
      ring.advance();
      const Ring second = ring;
      if constexpr (kGroup == 0) {
        start_scores(scores, first);
        const StageRecord record = stage_record(first);
        is_last = record.is_last();
        wgmma::wait<0>();
        wgmma::tie(scores);
        if (is_last) release_queries();
        const auto rescaling = softmax_weights(part, weights, scores, record);
        hand_over(part, weights, first);
        part.rescale(rescaling);
        start_output(part, weights, first);
        finish_output(part, first);
        if (is_last) break;
        wait_for_part(second, kGroup);
        wait_for_part(second, kStageParts - 1);
        is_last = stage_record(second).is_last();
        if (is_last) release_queries();
        part.rescale(take_over(part));
        start_shared_output(part, second);
      } else {
        wait_for_part(first, kStageParts - 1);
        is_last = stage_record(first).is_last();
        if (is_last) {
          release_queries();
          part.rescale(take_over(part));
          wait_for_part(first, kGroup);
          start_shared_output(part, first);
          finish_output(part, first);
          break;
        }
        start_scores(scores, second);
        const StageRecord record = stage_record(second);
        is_last = record.is_last();
        wgmma::wait<0>();
        wgmma::tie(scores);
        if (is_last) release_queries();
        part.rescale(take_over(part));
        wait_for_part(first, kGroup);
        start_shared_output(part, first);
        const auto rescaling = softmax_weights(part, weights, scores, record);
        hand_over(part, weights, second);
        finish_output(part, first);
        part.rescale(rescaling);
        start_output(part, weights, second);
      }
      ring.advance();
      finish_output(part, second);
    } while (!is_last);
  }

  __device__ __forceinline__ void execute_item() {
    Attention part;
    part.begin_without_queries();
    execute_stages(part);
    part.finish();
    float total[2];
    exchange_sums(total, part);
    store(part, total);
    ++num_items;
  }

  // Adds up the softmax sums of both warpgroups, each of which has summed the weights of its own stages.
  __device__ __forceinline__ void exchange_sums(float (&total)[2], const Attention& part) const {
    const int row = unit * kUnitRows + lane / 4;
    auto& sums = storage.sums[num_items % 2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0) sums[kGroup][row + 8 * h] = part.sum[h];
    }
    const uint32_t full = ptx::shared_address(&storage.sums_full);
    ptx::barrier_arrive(full);
    ptx::barrier_wait(full, num_items & 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = sums[0][row + 8 * h] + sums[1][row + 8 * h];
  }

  __device__ __forceinline__ void store(const Attention& part, const float (&total)[2]) const {
    store_latent_unit<T, Dims>(params, {}, record().targets + unit * kUnitRows, record().mixed_item,
                               unit * kUnitRows, kGroup * kColumns, part.out, part.maximum, total,
                               lane);
  }
};

}  // namespace pat
