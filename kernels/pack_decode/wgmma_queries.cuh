// A warp's queries as the left-hand side of wgmma, and their multiplication with a stage's keys. For one-byte keys,
// queries are sums of e4m3 terms (query_fp8_terms.cuh).
#pragma once

#include "pack_decode/consumer.cuh"
#include "pack_decode/query_fp8_terms.cuh"
#include "pack_decode/warp_attention.cuh"
#include "ptx/wgmma.cuh"

namespace pat {

using StageScores = float[kStageTokens / 8][4];

template <typename T, typename Dims, bool kSoftCap>
struct Queries {
  using Attention = WarpAttention<T, Dims, kSoftCap>;
  static constexpr bool kStayShared = false;

  __device__ __forceinline__ void load(Attention& part, const Consumer<Dims>& consumer, int units,
                                       int first_row, const LogitScale&, uint32_t lane) {
    part.begin(consumer.queries(units), units * kUnitRows, first_row, nullptr, lane);
  }
  // Begins a tile in a warp without rows, which only takes part in its warpgroup's multiplications.
  __device__ __forceinline__ void clear(Attention& part) { part.begin_without_rows(); }

  // Starts the multiplication of the queries with a stage's keys.
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

  // The scale of the scores, here the same for all rows.
  __device__ __forceinline__ const LogitScale& scale(const LogitScale& scale) const {
    return scale;
  }
  __device__ __forceinline__ void finish(Attention&, const Consumer<Dims>&, uint32_t) const {}
};

// Queries that stay in shared memory, because the output takes the registers. wgmma reads 64 rows. Rows beyond the tile
// hold arbitrary data, and their results are not stored.
template <typename T, typename Dims, bool kSoftCap>
  requires(Dims::kIsWide)
struct Queries<T, Dims, kSoftCap> {
  using Attention = WarpAttention<T, Dims, kSoftCap>;
  static constexpr bool kStayShared = true;

  uint32_t tile;

  __device__ __forceinline__ void load(Attention& part, const Consumer<Dims>& consumer, int units,
                                       int, const LogitScale&, uint32_t) {
    tile = consumer.queries(units);
    part.begin_without_queries();
  }

  __device__ __forceinline__ void start_scores(StageScores& scores, const Attention&,
                                               uint32_t stage) const {
    const wgmma::Operand<0, KeyOperand::kGroupBytes> queries(wgmma::computed_again(tile));
    const wgmma::Operand<0, KeyOperand::kGroupBytes> keys(stage);
    ptx::fence_shared_memory();
    wgmma::tie(scores);
    wgmma::begin();
#pragma unroll
    for (int step = 0; step < Dims::kKey / 16; ++step) {
      wgmma::multiply_shared_keys<T>(scores, queries.at(step_address(0, kMaxTileRows, step)),
                                     keys.at(KeyOperand::address(0, step)), step > 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ const LogitScale& scale(const LogitScale& scale) const {
    return scale;
  }
  __device__ __forceinline__ void finish(Attention&, const Consumer<Dims>&, uint32_t) const {}
};

// Queries for one-byte keys: a score is the sum of the terms' products, and each row has its own scale.
template <typename T, typename Dims, bool kSoftCap>
  requires(Dims::kIsFp8)
struct Queries<T, Dims, kSoftCap> {
  using Attention = WarpAttention<T, Dims, kSoftCap>;
  static constexpr bool kStayShared = false;

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
      // A row's scale must not be 0, because 0 times a maximum of -inf would be NaN.
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
    // Multiplies the small terms first, because sums of small terms alone are exact.
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

  // Multiplies each row's maximum by the row's factor. Then the scale that is common to all rows applies to the
  // maximum. With a soft-cap, the maximum already includes the factor.
  __device__ __forceinline__ void finish(Attention& part, const Consumer<Dims>& consumer,
                                         uint32_t lane) const {
    if constexpr (!kSoftCap) {
      const float* kept = consumer.storage.query_factors[consumer.warp];
#pragma unroll
      for (int h = 0; h < 2; ++h) part.maximum[h] *= kept[lane / 4 + 8 * h];
    }
  }
};

}  // namespace pat
