// merge_partials: the second kernel of a decode step. Requests whose KV was read in several pieces get the
// LSE-weighted sum of their partials.
//
// Rows are (request, query head) pairs, dealt out one by one: row r belongs to CTA r % gridDim.x, so a few rows
// occupy as many CTAs. Of long outputs, a row is some of the columns of such a pair. One warp sums a row of few partials. All warps of a CTA share a row of many: each takes a
// contiguous part, and one combines the parts in shared memory. Parts and orders depend on the number of partials
// alone, so the result does not depend on the launch.
#pragma once

#include <algorithm>
#include <cmath>

#include "decode_params.h"
#include "ptx/ptx.cuh"
#include "scales.cuh"
#include "sinks.cuh"

namespace pat {

inline constexpr int kMergeWarps = 16;
inline constexpr int kMergeCtasPerSm = 2;
// A row of up to this many partials is one warp's: at most two rounds of loads; more, where rows are many.
template <int kColumns>
inline constexpr int kWarpPartials = kColumns > 256 ? 48 : 12;
// Partials that make another warp worthwhile in a row of more.
inline constexpr int kPartPartials = 6;

// The partials of a row: where the first lies, and how far apart they are.
template <typename T>
struct PartialRow {
  const T* partial_out;
  const float* partial_lse;
  int num_heads;  // rows from one partial to the next
};

// Columns of a row, of outputs of so many.
template <int kColumns>
inline constexpr int kMergeColumns = kColumns > 256 ? 128 : kColumns;
template <int kColumns>
inline constexpr int kMergeSlices = kColumns / kMergeColumns<kColumns>;

// Weighted sum of some partials of a row, in a warp. kStride: from one output to the next. kLanes lanes hold a row, kVectors times 4 columns each. Where that
// is half the warp, each half takes every other partial; lanes that are left over do what the first ones do.
template <typename T, int kColumns, int kStride, bool kSinks>
struct PartialSum {
  static constexpr int kVectors = (kColumns + 127) / 128;
  static constexpr int kLanes = kColumns / 4 / kVectors;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static_assert(kLanes * kVectors * 4 == kColumns && kLanes >= 16 && kLanes <= 32);
  // Partials loaded before the first is used, as many as there are registers for.
  static constexpr int kInFlight = (32 % kLanes == 0 && !kSinks ? 8 : 6) / kVectors;
  static constexpr float kLog2E = 1.4426950408889634f;

  float maximum = -INFINITY;   // of the LSEs; NaN is left out, but not of `weight`
  float weight = 0.f;          // sum of exp(LSE - maximum)
  float4 columns[kVectors]{};  // not yet divided by `weight`; kLanes * 4 columns apart

  // Partials [begin, end). Past L1: its lines may be older than what the predecessor, which may still have been
  // running when this kernel was launched, has written.
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

  // The same of several rows with up to kFew partials each, to the same bits. counts: 0 for none.
  template <int kFew, int kRows>
  __device__ __forceinline__ static void of_few(PartialSum (&sums)[kRows],
                                                const PartialRow<T> (&rows)[kRows],
                                                const int (&counts)[kRows], int lane) {
    constexpr int kLoads = kFew / kRowsAtOnce;  // of a lane, of a row
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

  // Parts of a row, which its CTA's first num_parts warps have left in shared memory.
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

  // One more partial, of value 0.
  __device__ __forceinline__ void add_sink(float sink) {
    raise(sink);
    weight += ptx::exp2((sink - shift()) * kLog2E);
  }

 private:
  // Subtrahend of LSEs: not -inf, from which nothing can be subtracted, where all partials are empty.
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

// A row of the output and its partials. kColumns: of the output.
template <int kColumns>
struct MergeRow {
  static constexpr int kSlices = kMergeSlices<kColumns>;

  int request;
  int place;  // slice of a query head of the request
  int first_partial;
  int num_partials;

  __device__ __forceinline__ int head() const { return place / kSlices; }
  __device__ __forceinline__ int slice() const { return place % kSlices; }
  __device__ __forceinline__ int first_column() const { return slice() * kMergeColumns<kColumns>; }

  template <typename T>
  __device__ __forceinline__ PartialRow<T> partials(const DecodeParams& params) const {
    const int num_heads = params.num_q_heads;
    const int64_t first = int64_t{first_partial} * num_heads + head();
    return {static_cast<const T*>(params.partial_out) + first * kColumns + first_column(),
            params.partial_lse + first, num_heads};
  }

  __device__ __forceinline__ int64_t out_row(const DecodeParams& params) const {
    return int64_t{request} * params.num_q_heads + head();
  }
};

// A row's output and LSE: 0 and -inf where all partials are empty, NaN where a weight is. T: of the output.
template <typename T, bool kScales, int kColumns, typename Sum>
__device__ __forceinline__ void store_sum(const DecodeParams& params, const Sum& sum,
                                          const MergeRow<kColumns>& row, float v_scale, int lane) {
  const int64_t out_row = row.out_row(params);
  const bool empty = sum.weight == 0.f;
  float inverse = empty ? 0.f : 1.f / sum.weight;
  if constexpr (kScales) inverse *= v_scale;
  if (lane < Sum::kLanes) {
    T* target = static_cast<T*>(params.out) + out_row * kColumns + row.first_column() + lane * 4;
#pragma unroll
    for (int v = 0; v < Sum::kVectors; ++v) {
      const float4& columns = sum.columns[v];
      *reinterpret_cast<uint2*>(target + v * Sum::kLanes * 4) =
          make_uint2(ptx::pack<T>(columns.x * inverse, columns.y * inverse),
                     ptx::pack<T>(columns.z * inverse, columns.w * inverse));
    }
  }
  if (params.out_lse != nullptr && lane == 0 && row.slice() == 0) {
    params.out_lse[out_row] = empty ? -INFINITY : sum.maximum + logf(sum.weight);
  }
}

// Number of partials that counts as few: in merge_partials(), the type of an argument.
template <int kFew>
struct Few {};

// With kMergeWarps warps. T, Partial: of outputs and partials. kScales: the partials do not have the scale of the
// values in them yet. kSinks: the layer has attention sinks.
template <typename T, typename Partial, int kColumns, bool kScales, bool kSinks>
__device__ __forceinline__ void merge_partials(const DecodeParams& params) {
  using Sum = PartialSum<Partial, kMergeColumns<kColumns>, kColumns, kSinks>;
  using MergeRow = MergeRow<kColumns>;
  __shared__ float4 part_columns[kMergeWarps][Sum::kVectors][32];
  __shared__ float2 part_states[kMergeWarps];    // maximum and weight
  __shared__ MergeRow shared_rows[kMergeWarps];  // of this round's long rows; no partials: none

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_places = params.num_q_heads * kMergeSlices<kColumns>;  // of a request
  const int num_rows = params.plan.header->num_merges * num_places;
  const int row_step = gridDim.x * kMergeWarps;
  const auto* entries = reinterpret_cast<const int4*>(params.plan.merges);
  int own = blockIdx.x + warp * gridDim.x;
  int4 entry = own < num_rows ? entries[own / num_places] : int4{};
  int place = own % num_places;
  const bool has_rows = static_cast<int>(blockIdx.x) < num_rows;
  // In a graph, the grid is that of the largest plan. CTAs without rows make room for the successor at once. But the
  // first one waits in any case: pack_decode must have ended when this kernel ends, which is all that the successor
  // waits for.
  if (!has_rows && blockIdx.x > 0) return;
  if (num_rows == 0) ptx::launch_dependents();
  // Only now: the plan was there before pack_decode began, the partials are what it writes.
  ptx::wait_for_dependencies();
  if (!has_rows) return;
  ptx::launch_dependents();
  const float v_scale = KvScales<kScales>::load(params).value(params);
  if (blockIdx.x == 0 && threadIdx.x == 0 && __ldcg(params.partials_owner) != params.launch_tag) {
    __trap();  // another graph, on another stream, writes the partials that this one is about to read
  }
  // Several rounds at once, if the CTA's rows have few partials each: one has few loads to wait for. Rounds are as many
  // in every warp.
  int first_own = blockIdx.x;
  const auto merge_few = [&]<int kFew>(Few<kFew>) {
    constexpr int kMost = kMergeSlices<kColumns> > 1 ? 2 : 4;  // by registers
    constexpr int kRows = std::max(std::min(Sum::kInFlight / kFew, kMost), 1);
    if constexpr (kRows == 1) return false;
    MergeRow rows[kRows];
    PartialRow<Partial> partials[kRows];
    int counts[kRows];
    bool are_few = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int next = own + r * row_step;
      const int4 at = r == 0 ? entry : next < num_rows ? entries[next / num_places] : int4{};
      rows[r] = {at.x, next % num_places, at.y, at.z};
      partials[r] = rows[r].template partials<Partial>(params);
      counts[r] = next < num_rows ? at.z : 0;
      are_few &= counts[r] <= kFew;
    }
    if (!__syncthreads_and(are_few)) return false;
    Sum sums[kRows];
    Sum::template of_few<kFew>(sums, partials, counts, lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (own + r * row_step >= num_rows) continue;
      if (kSinks) sums[r].add_sink(load_sink(params.sinks, rows[r].head()));
      store_sum<T, kScales>(params, sums[r], rows[r], v_scale, lane);
    }
    first_own += (kRows - 1) * row_step;
    own += (kRows - 1) * row_step;
    if (own + row_step < num_rows) entry = entries[(own + row_step) / num_places];
    place = (own + row_step) % num_places;
    return true;
  };
  // Until the CTA's first warp has no row.
  for (; first_own < num_rows; first_own += row_step, own += row_step) {
    if (first_own + row_step < num_rows && (merge_few(Few<2>{}) || merge_few(Few<4>{}))) continue;
    MergeRow row{entry.x, place, entry.y, entry.z};
    const bool is_mine = own < num_rows;
    const bool is_long = is_mine && row.num_partials > kWarpPartials<kColumns>;
    if (own + row_step < num_rows) {
      entry = entries[(own + row_step) / num_places];
      place = (own + row_step) % num_places;
    }

    // The warp's own row, then the CTA's long ones, if it has any: in one loop, so that there is one copy of the code.
    int num_turns = 0;
    if (__syncthreads_or(is_long)) {
      if (lane == 0) shared_rows[warp] = is_long ? row : MergeRow{};
      __syncthreads();
      // So many warps have a row.
      num_turns = min(kMergeWarps, (num_rows - first_own - 1) / static_cast<int>(gridDim.x) + 1);
    }
#pragma unroll 1
    for (int turn = -1; turn < num_turns; ++turn) {
      const bool is_shared = turn >= 0;
      if (is_shared) row = shared_rows[turn];
      const int count = row.num_partials;
      if (is_shared ? count == 0 : !is_mine || is_long) continue;
      const int num_parts =
          is_shared ? min(kMergeWarps, (count + kPartPartials - 1) / kPartPartials) : 1;
      const int part = is_shared ? warp : 0;
      Sum sum;
      if (part < num_parts) {
        sum = Sum::of(row.template partials<Partial>(params), count * part / num_parts,
                      count * (part + 1) / num_parts, lane);
        if (kSinks && part == 0) sum.add_sink(load_sink(params.sinks, row.head()));
      }
      if (is_shared) {
#pragma unroll
        for (int v = 0; v < Sum::kVectors; ++v) part_columns[warp][v][lane] = sum.columns[v];
        if (lane == 0) part_states[warp] = make_float2(sum.maximum, sum.weight);
        __syncthreads();
        if (warp == turn) sum = Sum::of_parts(part_states, part_columns, num_parts, lane);
        __syncthreads();
        if (warp != turn) continue;
      }
      store_sum<T, kScales>(params, sum, row, v_scale, lane);
    }
  }
}

}  // namespace pat
