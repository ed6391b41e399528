// Online softmax of one warp: 16 query rows against however many KV tokens it is given. What multiplies is the
// body's matter (mma_body.cuh, wgmma_body.cuh); both use these registers, in the layout of mma.m16n8k16: a lane
// holds rows lane / 4 and lane / 4 + 8 (index h), and of every 8 columns two.
#pragma once

#include <cmath>

#include "pack_decode/work_queue.cuh"

namespace pat {

template <typename T, typename Dims, bool kSoftCap>
struct WarpAttention {
  static constexpr int kColumnTiles = kOutColumns<Dims> / 8;
  static constexpr int kDepthSteps = Dims::kKey / 16;

  ptx::Fragment queries[kDepthSteps];
  float out[kColumnTiles][4];  // those beyond Dims::kValue hold whatever lies behind the values
  float maximum[2];            // of the scores so far; -inf before the first
  float sum[2];                // of this lane's columns only, until finish()

  // `tile` holds tile_rows query rows; this warp's are the 16 from first_row.
  __device__ __forceinline__ void begin(uint32_t tile, int tile_rows, int first_row,
                                        uint32_t lane) {
    const uint32_t first = tile + swizzled_offset(tile_rows, first_row + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      ptx::load_matrices(queries[step], step_address(first, tile_rows, step));
    }
    clear();
  }

  // For a warp that only takes part in its warpgroup's multiplications.
  __device__ __forceinline__ void begin_without_rows() {
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[step][i] = 0;
    }
    clear();
  }

  // Scores of kTokens tokens, of which the first num_valid count (at least one), and for these rows, to unnormalised
  // probabilities. Rescales `out` and `sum` where the maximum has risen.
  template <int kTokens>
  __device__ __forceinline__ void weigh(float (&scores)[kTokens / 8][4], const RowInterval& rows,
                                        int num_valid, const LogitScale& scale, uint32_t lane) {
    if constexpr (kSoftCap) {
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] = ptx::tanh(scores[tile][i] * scale.inner);
      }
    }
    if (num_valid < kTokens) {
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = tile * 8 + lane % 4 * 2 + i % 2;
          if (column >= num_valid) scores[tile][i] = -INFINITY;
        }
      }
    }
    if (!rows.all()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (rows.holds(lane / 4 + 8 * h)) continue;
#pragma unroll
        for (int tile = 0; tile < kTokens / 8; ++tile) {
          scores[tile][2 * h] = scores[tile][2 * h + 1] = -INFINITY;
        }
      }
    }
    update_maximum<kTokens>(scores, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shift = finite_maximum(maximum[h]) * scale.outer;
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          scores[tile][i] = ptx::exp2(scores[tile][i] * scale.outer - shift);
          sum[h] += scores[tile][i];
        }
      }
    }
  }

  // 16 columns of probabilities as a left-hand side of a multiplication.
  __device__ __forceinline__ static void pack_weights(ptx::Fragment& weights,
                                                      const float (&left)[4],
                                                      const float (&right)[4]) {
    weights[0] = ptx::pack<T>(left[0], left[1]);
    weights[1] = ptx::pack<T>(left[2], left[3]);
    weights[2] = ptx::pack<T>(right[0], right[1]);
    weights[3] = ptx::pack<T>(right[2], right[3]);
  }

  // After the last token: sums up over the four lanes of a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
      sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
    }
  }

 private:
  // A row that no token has counted for so far has weights and factors of 0, not NaN.
  __device__ __forceinline__ static float finite_maximum(float maximum) {
    return maximum == -INFINITY ? 0.f : maximum;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[tile][i] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -INFINITY;
      sum[h] = 0.f;
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void update_maximum(const float (&scores)[kTokens / 8][4],
                                                 const LogitScale& scale) {
    float latest[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int tile = 0; tile < kTokens / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) latest[i / 2] = fmaxf(latest[i / 2], scores[tile][i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      latest[h] = fmaxf(latest[h], __shfl_xor_sync(kFullWarp, latest[h], 1));
      latest[h] = fmaxf(latest[h], __shfl_xor_sync(kFullWarp, latest[h], 2));
    }
    // Past the first few steps of a range the maximum rarely moves, and the rescaling is skipped.
    if (__any_sync(kFullWarp, latest[0] > maximum[0] || latest[1] > maximum[1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = ptx::exp2((maximum[h] - finite_maximum(latest[h])) * scale.outer);
        sum[h] *= factor;
#pragma unroll
        for (int tile = 0; tile < kColumnTiles; ++tile) {
          out[tile][2 * h] *= factor;
          out[tile][2 * h + 1] *= factor;
        }
        maximum[h] = latest[h];
      }
    }
  }
};

}  // namespace pat
