// One warp's online softmax over partials of a row. The warp loads and sums partials, or combines parts that several
// warps have summed.
#pragma once

#include <cmath>

#include "ptx/ptx.cuh"

namespace pat {

// Where the partials of a row lie: the addresses of the first partial, and the distance from one partial to the next.
template <typename T>
struct PartialRow {
  const T* partial_out;
  const float* partial_lse;
  int num_heads;  // the distance, in rows of partial_out and partial_lse
};

// The LSE-weighted sum of some partials of a row, spread over a warp. kStride: elements of a row of partial_out. kLanes
// lanes hold a row, with kVectors times 4 columns each. If kLanes is 16, each half of the warp sums every other
// partial. If kLanes is between 16 and 32, the lanes beyond kLanes repeat the work of the first lanes.
template <typename T, int kColumns, int kStride, bool kSinks>
struct PartialSum {
  static constexpr int kVectors = (kColumns + 127) / 128;
  static constexpr int kLanes = kColumns / 4 / kVectors;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static_assert(kLanes * kVectors * 4 == kColumns && kLanes >= 16 && kLanes <= 32);
  // Number of partials that a lane loads before it uses the first of them: as many as fit into registers.
  static constexpr int kInFlight = (32 % kLanes == 0 && !kSinks ? 8 : 6) / kVectors;
  static constexpr float kLog2E = 1.4426950408889634f;

  float maximum = -INFINITY;   // largest LSE; ignores NaN, which goes into `weight`
  float weight = 0.f;          // sum of exp(LSE - maximum)
  float4 columns[kVectors]{};  // not yet divided by `weight`; vectors are kLanes * 4 columns apart

  // Sums partials [begin, end). The loads bypass L1: this kernel may start while pack_decode still runs, so L1 may hold
  // lines from before pack_decode wrote the partials.
  __device__ __forceinline__ static PartialSum of(const PartialRow<T>& row, int begin, int end,
                                                  int lane) {
    PartialSum sum;
    const int first = kRowsAtOnce == 1 ? 0 : lane / kLanes;
    const float* lse = row.partial_lse + int64_t{begin + first} * row.num_heads;
    const T* out =
        row.partial_out + lane % kLanes * 4 + int64_t{begin + first} * row.num_heads * kStride;
    const int step = kRowsAtOnce * row.num_heads;
#pragma unroll 1
    for (int left = end - begin - first; left > 0; left -= kInFlight * kRowsAtOnce) {
      float lses[kInFlight];
      uint2 values[kInFlight][kVectors];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          values[i][v] = {};
          if (i * kRowsAtOnce < left) {
            values[i][v] = __ldcg(reinterpret_cast<const uint2*>(out) + v * kLanes);
          }
        }
        out += step * kStride;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        lses[i] = i * kRowsAtOnce < left ? __ldcg(lse) : -INFINITY;
        lse += step;
      }
      sum.add(lses, values);
    }
    if constexpr (kRowsAtOnce == 2) sum.add(sum.of_other_half());
    return sum;
  }

  // Sums kRows rows with up to kFew partials each. Produces the same bits as PartialSum::of(). counts: number of
  // partials of each row, which may be 0.
  template <int kFew, int kRows>
  __device__ __forceinline__ static void of_few(PartialSum (&sums)[kRows],
                                                const PartialRow<T> (&rows)[kRows],
                                                const int (&counts)[kRows], int lane) {
    constexpr int kLoads = kFew / kRowsAtOnce;  // partials that each lane loads per row
    const int first = kRowsAtOnce == 1 ? 0 : lane / kLanes;
    float lses[kRows][kLoads];
    uint2 values[kRows][kLoads][kVectors];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int partial = i * kRowsAtOnce + first;
        const int64_t row = int64_t{partial} * rows[r].num_heads;
        const auto* columns =
            reinterpret_cast<const uint2*>(rows[r].partial_out + row * kStride) + lane % kLanes;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          values[r][i][v] = {};
          if (partial < counts[r]) values[r][i][v] = __ldcg(columns + v * kLanes);
        }
        lses[r][i] = partial < counts[r] ? __ldcg(rows[r].partial_lse + row) : -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r].add(lses[r], values[r]);
      if constexpr (kRowsAtOnce == 2) sums[r].add(sums[r].of_other_half());
    }
  }

  // Combines the parts of a row that the CTA's first num_parts warps have stored in shared memory.
  __device__ __forceinline__ static PartialSum of_parts(const float2* states,
                                                        const float4 (*columns)[kVectors][32],
                                                        int num_parts, int lane) {
    PartialSum sum;
#pragma unroll 4
    for (int part = 0; part < num_parts; ++part) {
      sum.maximum = fmaxf(sum.maximum, states[part].x);
    }
#pragma unroll 4
    for (int part = 0; part < num_parts; ++part) {
      const float factor = ptx::exp2((states[part].x - sum.shift()) * kLog2E);
      sum.weight += factor * states[part].y;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) sum.add_scaled(factor, columns[part][v][lane], v);
    }
    return sum;
  }

  // Adds the sink like one more partial: its LSE is `sink`, and its output is 0.
  __device__ __forceinline__ void add_sink(float sink) {
    raise(sink);
    weight += ptx::exp2((sink - shift()) * kLog2E);
  }

 private:
  // The number to subtract from LSEs: the maximum, or 0 if all partials are empty, because -inf - -inf is NaN.
  __device__ __forceinline__ float shift() const { return maximum == -INFINITY ? 0.f : maximum; }

  __device__ __forceinline__ void raise(float latest) {
    const float before = maximum;
    maximum = fmaxf(maximum, latest);
    const float factor = ptx::exp2((before - shift()) * kLog2E);
    weight *= factor;
#pragma unroll
    for (float4& each : columns) {
      each = {each.x * factor, each.y * factor, each.z * factor, each.w * factor};
    }
  }

  __device__ __forceinline__ void add_scaled(float factor, const float4& value, int vector) {
    columns[vector].x += factor * value.x;
    columns[vector].y += factor * value.y;
    columns[vector].z += factor * value.z;
    columns[vector].w += factor * value.w;
  }

  __device__ __forceinline__ static float4 unpack(const uint2& columns) {
    const float2 low = ptx::unpack<T>(columns.x), high = ptx::unpack<T>(columns.y);
    return {low.x, low.y, high.x, high.y};
  }

  template <int kCount>
  __device__ __forceinline__ void add(const float (&lses)[kCount],
                                      const uint2 (&values)[kCount][kVectors]) {
    float latest = lses[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) latest = fmaxf(latest, lses[i]);
    raise(latest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float factor = ptx::exp2((lses[i] - shift()) * kLog2E);
      weight += factor;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add_scaled(factor, unpack(values[i][v]), v);
    }
  }

  __device__ __forceinline__ void add(const PartialSum& other) {
    raise(other.maximum);
    const float factor = ptx::exp2((other.maximum - shift()) * kLog2E);
    weight += factor * other.weight;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) add_scaled(factor, other.columns[v], v);
  }

  __device__ __forceinline__ PartialSum of_other_half() const {
    const auto other = [](float value) { return __shfl_xor_sync(0xffffffffu, value, kLanes); };
    static_assert(kVectors == 1 || kRowsAtOnce == 1);
    const float4& own = columns[0];
    PartialSum sum;
    sum.maximum = other(maximum);
    sum.weight = other(weight);
    sum.columns[0] = {other(own.x), other(own.y), other(own.z), other(own.w)};
    return sum;
  }
};

}  // namespace pat
