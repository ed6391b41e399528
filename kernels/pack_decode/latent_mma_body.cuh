// The body of pack_decode for latent attention on mma.sync (Ampere and newer). A pass has 32 query rows, and four warps
// share each unit of 16 rows. A warp multiplies queries and keys in a quarter of the columns. The four warps add up
// these partial scores in shared memory, so all four compute bit-identical weights. Each then multiplies the weights
// with a quarter of the value columns. The queries stay in registers.
#pragma once

#include "decode_params.h"
#include "pack_decode/latent_mma_stages.cuh"
#include "pack_decode/row_output.cuh"
#include "pack_decode/warp_attention.cuh"
#include "ptx/fp8.cuh"
#include "scales.cuh"

namespace pat {

template <typename T, typename Dims>
struct LatentMmaConsumer {
  using Storage = SharedStorage<Dims>;
  static constexpr int kTokens = Dims::kTokens;
  static constexpr int kColumns = Dims::kValue / LatentPart::kParts;
  static constexpr int kUnitThreads = LatentPart::kParts * 32;
  using Number = ComputeType<T, Dims>;
  using Attention = WarpAttention<T, Dims, false, kColumns>;
  using Scores = float[kTokens / 8][4];
  using Queries = ptx::Fragment[Dims::kQueryPanels];

  static_assert((Storage::kStages & (Storage::kStages - 1)) == 0, "the counter may wrap around");

  const DecodeParams& params;
  Storage& storage;
  const uint32_t pass_unit;  // which 16 rows of the pass
  const LatentPart share;
  uint32_t num_passes = 0;
  uint32_t num_stages = 0;

  __device__ __forceinline__ const PassRecord& record() const {
    return storage.records[num_passes % kPassRecords];
  }

  // Index of the next stage in the ring, computed from num_stages: a RingPosition would take one more register.
  __device__ __forceinline__ uint32_t place() const { return num_stages % Storage::kStages; }
  // Waits until the next stage has arrived, and returns its address.
  __device__ __forceinline__ uint32_t wait_for_stage() const {
    ptx::barrier_wait(ptx::shared_address(&storage.kv_full[place()]),
                      num_stages / Storage::kStages & 1);
    return ptx::shared_address(storage.kv[place()]);
  }
  // Releases the stage. Each lane calls it after it has read the stage.
  __device__ __forceinline__ void release_stage() {
    ptx::barrier_arrive(ptx::shared_address(&storage.kv_empty[place()]));
    ++num_stages;
  }

  __device__ __forceinline__ void load_queries(Queries& queries, uint32_t stage,
                                               uint32_t lane) const {
    if constexpr (Dims::kIsFp8) {
      const uint32_t first = stage + share.byte_queries(pass_unit, lane);
#pragma unroll
      for (int panel = 0; panel < Dims::kQueryPanels; ++panel) {
        const uint32_t address = first + panel * LatentPart::kPanelBytes;
        const uint2 low = ptx::load_shared_8(address);
        const uint2 high = ptx::load_shared_8(address + 8 * kPanelRowBytes);
        queries[panel][0] = low.x, queries[panel][1] = high.x;
        queries[panel][2] = low.y, queries[panel][3] = high.y;
      }
    } else {
      const uint32_t first = stage + share.queries(pass_unit, lane);
#pragma unroll
      for (int panel = 0; panel < Dims::kQueryPanels; ++panel) {
        ptx::load_matrices(queries[panel], first + panel * LatentPart::kPanelBytes);
      }
    }
  }

  // The factors by which narrow_queries() has divided this warp's columns of each query row.
  __device__ __forceinline__ float* query_factors() const {
    return storage.query_factors[Dims::kIsFp8 ? pass_unit * LatentPart::kParts + share.part : 0];
  }

  // Multiplies queries with keys in this warp's columns.
  __device__ __forceinline__ void multiply_keys(Scores& scores, const Queries& queries,
                                                uint32_t stage, uint32_t lane) const {
#pragma unroll
    for (auto& tile : scores) {
#pragma unroll
      for (float& score : tile) score = 0.f;
    }
    if constexpr (Dims::kIsFp8) {
#pragma unroll
      for (int panel = 0; panel < Dims::kQueryPanels; ++panel) {
        ptx::Fragment bytes;
        ptx::load_matrices(bytes, stage + share.byte_keys(panel, lane));
#pragma unroll
        for (int tile = 0; tile < kTokens / 8; ++tile) {
          const uint2 keys = fp8::convert<Dims::kKv>(bytes[tile]);
          ptx::multiply_add<Number>(scores[tile], queries[panel], keys.x, keys.y);
        }
      }
      return;
    }
    const uint32_t first = stage + share.keys(lane);
#pragma unroll
    for (int panel = 0; panel < Dims::kKeyPanels; ++panel) {
#pragma unroll
      for (int pair = 0; pair < kTokens / 16; ++pair) {
        ptx::Fragment keys;
        ptx::load_matrices(keys,
                           first + panel * LatentPart::kPanelBytes + pair * 16 * kPanelRowBytes);
        ptx::multiply_add<T>(scores[2 * pair], queries[panel], keys[0], keys[1]);
        ptx::multiply_add<T>(scores[2 * pair + 1], queries[panel], keys[2], keys[3]);
      }
    }
  }

  __device__ __forceinline__ void wait_for_unit() const {
    if (pass_unit == 0) {
      ptx::named_barrier_sync<1, kUnitThreads>();
    } else {
      ptx::named_barrier_sync<2, kUnitThreads>();
    }
  }

  // Adds up the partial scores of the unit's four warps. All four must call it. Each warp adds up the scores of 8
  // tokens and gives the sums to the other three. This moves half as many bytes through shared memory as if every warp
  // added up all tokens.
  __device__ __forceinline__ void add_up(Scores& scores, uint32_t lane) const {
    static_assert(kTokens / 8 == LatentPart::kParts);
    auto& parts = storage.exchange[pass_unit];
#pragma unroll
    for (int tile = 0; tile < LatentPart::kParts; ++tile) {
      if (tile == share.part) continue;
      const float (&own)[4] = scores[tile];
      parts[share.part][tile][lane] = make_float4(own[0], own[1], own[2], own[3]);
    }
    wait_for_unit();
#pragma unroll
    for (int tile = 0; tile < LatentPart::kParts; ++tile) {
      if (tile != share.part) continue;
      float (&sum)[4] = scores[tile];
#pragma unroll
      for (int other = 1; other < LatentPart::kParts; ++other) {
        const float4 part = parts[(tile + other) % LatentPart::kParts][tile][lane];
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
      }
      parts[tile][tile][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    // After this wait, the next call may overwrite the partial scores. The next call overwrites the sums only after its
    // own first wait. By then, all warps have read the sums.
    wait_for_unit();
#pragma unroll
    for (int tile = 0; tile < LatentPart::kParts; ++tile) {
      if (tile == share.part) continue;
      const float4 sum = parts[tile][tile][lane];
      scores[tile][0] = sum.x, scores[tile][1] = sum.y;
      scores[tile][2] = sum.z, scores[tile][3] = sum.w;
    }
  }

  // Multiplies the weights with this warp's columns of the values.
  __device__ __forceinline__ void multiply_values(Attention& part, const Scores& weights,
                                                  uint32_t stage, uint32_t lane) const {
    constexpr int kValuePanels = panels(Dims::kValue * Dims::kElementBytes);
    const uint32_t first = stage + share.values<kValuePanels>(lane);
    ptx::Fragment packed[kTokens / 16];
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      Attention::pack_weights(packed[step], weights[2 * step], weights[2 * step + 1]);
    }
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < kColumns * Dims::kElementBytes / 32; ++pair) {
        ptx::Fragment values;
        ptx::load_matrices_transposed(
            values, step_address(first, LatentPart::kRows, pair) + step * 16 * kPanelRowBytes);
        if constexpr (Dims::kIsFp8) {
          // As in mma_body.cuh, one tile gets the even columns of a chunk and the next tile the odd ones.
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int tile = 4 * pair + 2 * half;
            const uint2 low = fp8::convert<Dims::kKv>(fp8::transposed(values[2 * half]));
            const uint2 high = fp8::convert<Dims::kKv>(fp8::transposed(values[2 * half + 1]));
            ptx::multiply_add<Number>(part.out[tile], packed[step], low.x, high.x);
            ptx::multiply_add<Number>(part.out[tile + 1], packed[step], low.y, high.y);
          }
        } else {
          ptx::multiply_add<T>(part.out[2 * pair], packed[step], values[0], values[1]);
          ptx::multiply_add<T>(part.out[2 * pair + 1], packed[step], values[2], values[3]);
        }
      }
    }
  }

  // Executes the next pass. Returns false if no pass is left.
  __device__ __forceinline__ bool execute_pass() {
    const uint32_t query_stage = wait_for_stage();
    const int first_unit = __shfl_sync(kFullWarp, record().first_unit, 0);
    if (first_unit == kNoMoreItems) return false;
    Queries queries;
    load_queries(queries, query_stage, ptx::lane_id());
    release_stage();
    bool has_factors = false;
    if constexpr (kNarrowsQueries<T, Dims>) {
      has_factors = narrow_queries<T, Number>(queries, query_factors(), ptx::lane_id());
    }

    const int unit = first_unit + pass_unit;  // which 16 rows of the item
    Attention part;
    part.begin_without_queries();
    part.has_factors = has_factors;
    const auto scales = KvScales<Dims::kIsFp8>::load(params);
    decltype(auto) scale = scales.template logit<false>(params);
    StageRecord stage_record;
    do {
      const uint32_t stage = wait_for_stage();
      stage_record = {__shfl_sync(kFullWarp, storage.stage_records[place()].packed, 0)};
      if (stage_record.counts_for(unit)) {
        const uint32_t lane = ptx::lane_id();  // read again for each stage, which saves registers
        Scores scores;
        multiply_keys(scores, queries, stage, lane);
        part.template undo_factors<kTokens>(scores, query_factors(), lane);
        add_up(scores, lane);
        part.rescale(part.template softmax_weights<kTokens>(scores, stage_record, unit * kUnitRows,
                                                            0, scale, lane));
        multiply_values(part, scores, stage, lane);
      }
      release_stage();
    } while (!stage_record.is_last());

    if constexpr (Dims::kIsFp8) part.order_columns();
    part.finish();
    store_latent_unit<T, Dims>(params, scales, record().targets + pass_unit * kUnitRows,
                               record().mixed_item, unit * kUnitRows, share.part * kColumns,
                               part.out, part.maximum, part.sum, ptx::lane_id());
    ++num_passes;
    return true;
  }
};

}  // namespace pat
