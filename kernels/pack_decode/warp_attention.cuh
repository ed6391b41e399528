// One warp's online softmax of 16 query rows. The bodies (mma_body.cuh, wgmma_body.cuh) do the multiplications. Scores
// and output sums are in registers, in the layout of mma.m16n8k16: a lane holds rows lane / 4 and lane / 4 + 8 (index
// h), and two of every 8 columns.
#pragma once

#include <cmath>

#include "pack_decode/warp_queries.cuh"
#include "pack_decode/work_queue.cuh"

namespace pat {

// Returns the scale of a lane's row h. All rows have the same scale, or each row has its own.
__device__ __forceinline__ const LogitScale& scale_of(const LogitScale& scale, int) {
  return scale;
}
__device__ __forceinline__ const LogitScale& scale_of(const LogitScale (&scales)[2], int h) {
  return scales[h];
}

// kColumns: output columns that the warp accumulates.
template <typename T, typename Dims, bool kSoftCap, int kColumns = kOutColumns<Dims>>
struct WarpAttention {
  using Number = ComputeType<T, Dims>;
  static constexpr int kColumnTiles = kColumns / 8;
  // Unnormalised probabilities are relative to exp2(maximum). If a score is above `maximum`, its probability exceeds 1.
  // `maximum` is raised, and the sums are rescaled, only if a probability would exceed 2^kSlack. This costs no
  // precision: a 16-bit number above 1 is as exact as one below 1.
  static constexpr float kSlack = 8.f;
  // With one-byte KV, probabilities are fp16 even if the model is bf16. They are multiplied by 2^kHeadroom, because
  // fp16 loses precision below 2^-14, and a million of such small probabilities may have a large sum.
  static constexpr float kHeadroom = Dims::kIsFp8 ? 6.f : 0.f;

  WarpQueries<T, Dims> queries;
  float out[kColumnTiles][4];  // columns beyond Dims::kValue are arbitrary
  float maximum[2];            // of each row's scores, or lower by up to kSlack; at first -inf
  float sum[2];                // of each row's weights; before finish(), only of this lane's tokens
  bool has_factors;            // some queries were too large for fp16 and have been divided

  // Begins a tile, whose tile_rows query rows lie at `tile`. This warp has the 16 rows from first_row on.
  __device__ __forceinline__ void begin(uint32_t tile, int tile_rows, int first_row,
                                        float* query_factors, uint32_t lane) {
    load_queries<T, Dims>(queries, has_factors, tile, tile_rows, first_row, query_factors, lane);
    clear();
  }

  // Begins a tile without loading queries into registers.
  __device__ __forceinline__ void begin_without_queries() {
    has_factors = false;
    clear();
  }

  // Begins a tile in a warp without rows, which only takes part in its warpgroup's multiplications.
  __device__ __forceinline__ void begin_without_rows() {
#pragma unroll
    for (int step = 0; step < kDepthSteps<Dims>; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[step][i] = 0;
    }
    begin_without_queries();
  }

  // By which factors rescale() must multiply `out`, because maxima have risen.
  struct Rescaling {
    bool any;  // some row of the warp must be rescaled
    float factor[2];
  };

  // Turns the scores of tokens [first_token, first_token + kTokens) of a stage into unnormalised probabilities. The
  // warp's first row is row first_row of the item. Some row of the warp must attend to one of these tokens. `out` is
  // not touched, so a multiplication may still be writing it. Call rescale() with the result before the probabilities
  // are multiplied with values.
  template <int kTokens, typename Scale>
  __device__ __forceinline__ Rescaling softmax_weights(float (&scores)[kTokens / 8][4],
                                                       const StageRecord& stage, int first_row,
                                                       int first_token, const Scale& scale,
                                                       uint32_t lane) {
    if constexpr (kSoftCap) cap<kTokens>(scores, scale);
    if (!stage.is_whole(first_row / kUnitRows)) {
      mask<kTokens>(scores, stage, first_row, first_token, lane);
    }
    const Rescaling rescaling = update_maximum<kTokens>(scores, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          scores[tile][i] = ptx::exp2(scores[tile][i] * scale_of(scale, h).outer - shift_[h]);
          sum[h] += scores[tile][i];
        }
      }
    }
    return rescaling;
  }

  // Adopts the maxima of another warp, which has computed the weights of the same rows for the tokens that `out` adds
  // up next.
  __device__ __forceinline__ Rescaling follow(const float (&raised)[2], const LogitScale& scale) {
    Rescaling rescaling{};
    rescaling.any = __any_sync(kFullWarp, raised[0] != maximum[0] || raised[1] != maximum[1]);
    if (rescaling.any) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rescaling.factor[h] = 1.f;
        if (raised[h] != maximum[h]) raise(rescaling, h, raised[h], scale);
      }
    }
    return rescaling;
  }

  __device__ __forceinline__ void rescale(const Rescaling& rescaling) {
    if (!rescaling.any) return;
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[tile][i] *= rescaling.factor[i / 2];
    }
  }

  // Packs the probabilities of 16 tokens as a left-hand side of mma.
  __device__ __forceinline__ static void pack_weights(ptx::Fragment& weights,
                                                      const float (&left)[4],
                                                      const float (&right)[4]) {
    weights[0] = ptx::pack<Number>(left[0], left[1]);
    weights[1] = ptx::pack<Number>(left[2], left[3]);
    weights[2] = ptx::pack<Number>(right[0], right[1]);
    weights[3] = ptx::pack<Number>(right[2], right[3]);
  }

  // Multiplies the scores with the factors by which load_queries() has divided the queries.
  template <int kTokens>
  __device__ __forceinline__ void undo_factors(float (&scores)[kTokens / 8][4],
                                               const float* query_factors, uint32_t lane) const {
    if constexpr (kNarrowsQueries<T, Dims>) {
      if (!has_factors) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = query_factors[lane / 4 + 8 * h];
#pragma unroll
        for (int tile = 0; tile < kTokens / 8; ++tile) {
          scores[tile][2 * h] *= factor, scores[tile][2 * h + 1] *= factor;
        }
      }
    }
  }

  // Adds up the sums of the four lanes that share a row. Call it after the last token.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
      sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
    }
  }

  // Puts a lane's four columns of every 16 into ascending order. Needed if one-byte values were converted in registers,
  // because that changes the order of the columns.
  __device__ __forceinline__ void order_columns() {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; tile += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float third = out[tile][2 * h + 1];
        out[tile][2 * h + 1] = out[tile + 1][2 * h];
        out[tile + 1][2 * h] = third;
      }
    }
  }

 private:
  template <int kTokens, typename Scale>
  __device__ __forceinline__ static void cap(float (&scores)[kTokens / 8][4], const Scale& scale) {
#pragma unroll
    for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[tile][i] = ptx::tanh(scores[tile][i] * scale_of(scale, i / 2).inner);
      }
    }
  }

  // Sets scores to -inf for rows that do not attend to the stage and for tokens that the stage does not have.
  template <int kTokens>
  __device__ __forceinline__ static void mask(float (&scores)[kTokens / 8][4],
                                              const StageRecord& stage, int first_row,
                                              int first_token, uint32_t lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + lane / 4 + i / 2 * 8;
      const bool counts = row >= stage.first_row() && row < stage.end_row();
      const int num_valid = counts ? stage.num_tokens() - first_token : 0;
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
        const int column = tile * 8 + lane % 4 * 2 + i % 2;
        if (column >= num_valid) scores[tile][i] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[tile][i] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = limit_[h] = -INFINITY;
      sum[h] = shift_[h] = 0.f;
    }
  }

  template <int kTokens, typename Scale>
  __device__ __forceinline__ Rescaling update_maximum(const float (&scores)[kTokens / 8][4],
                                                      const Scale& scale) {
    float latest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) latest[i / 2] = fmaxf(latest[i / 2], scores[tile][i]);
    }
    Rescaling rescaling{};
    // Each lane checks its own columns. The row maxima are reduced across lanes only if some lane has a score above its
    // limit.
    rescaling.any = __any_sync(kFullWarp, latest[0] > limit_[0] || latest[1] > limit_[1]);
    if (rescaling.any) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        latest[h] = fmaxf(latest[h], __shfl_xor_sync(kFullWarp, latest[h], 1));
        latest[h] = fmaxf(latest[h], __shfl_xor_sync(kFullWarp, latest[h], 2));
        rescaling.factor[h] = 1.f;
        // Compares with the limit, not with the maximum: the result of a row must not depend on the warp's other rows.
        if (latest[h] > limit_[h]) raise(rescaling, h, latest[h], scale_of(scale, h));
      }
    }
    return rescaling;
  }

  // Makes `latest` the maximum of row h.
  __device__ __forceinline__ void raise(Rescaling& rescaling, int h, float latest,
                                        const LogitScale& scale) {
    rescaling.factor[h] = ptx::exp2((maximum[h] - latest) * scale.outer);
    sum[h] *= rescaling.factor[h];
    maximum[h] = latest;
    shift_[h] = latest * scale.outer - kHeadroom;
    limit_[h] = latest + kSlack / scale.outer;
  }

  // The number to subtract from a row's logits: the scaled maximum minus kHeadroom. Before the row's first token, the
  // number is 0, so that weights of masked scores are 0 instead of NaN.
  float shift_[2];
  float limit_[2];  // a score above it raises the maximum
};

}  // namespace pat
