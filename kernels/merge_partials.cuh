// merge_partials: the second kernel of a decode step. If several work items have read a request's KV, the request's
// output is the LSE-weighted sum of their partials.
//
// A row is the output of a (request, query head) pair or, if that output has more than 256 columns, a slice of it. CTA
// r % gridDim.x sums row r. One warp sums a row with few partials. All warps of a CTA share a row with many partials:
// each warp sums a contiguous part of them, and one warp combines the parts in shared memory. The parts and their order
// depend on the number of partials alone, so the result does not depend on the grid.
#pragma once

#include <algorithm>

#include "decode_params.h"
#include "merge_row.cuh"
#include "partial_sum.cuh"
#include "ptx/ptx.cuh"
#include "scales.cuh"
#include "sinks.cuh"

namespace pat {

inline constexpr int kMergeWarps = 16;
inline constexpr int kMergeCtasPerSm = 2;
// If a row has at most this many partials, one warp sums it. If it has more, all warps of the CTA share it.
template <int kColumns>
inline constexpr int kWarpPartials = kColumns > 256 ? 48 : 12;
// A warp's part of a shared row has at most this many partials, unless all warps already take part.
inline constexpr int kPartPartials = 6;

// A tag that passes the constant kFew to a lambda of merge_partials(). Rows with up to kFew partials are summed
// together.
template <int kFew>
struct Few {};

// Runs with kMergeWarps warps. T, Partial: element types of outputs and of partials. kScales: the partials must still
// be multiplied by the scale of the values. kSinks: the layer has attention sinks.
template <typename T, typename Partial, int kColumns, bool kScales, bool kSinks>
__device__ __forceinline__ void merge_partials(const DecodeParams& params) {
  using Sum = PartialSum<Partial, kMergeColumns<kColumns>, kColumns, kSinks>;
  using MergeRow = MergeRow<kColumns>;
  __shared__ float4 part_columns[kMergeWarps][Sum::kVectors][32];
  __shared__ float2 part_states[kMergeWarps];    // maximum and weight of each part
  __shared__ MergeRow shared_rows[kMergeWarps];  // [w]: warp w's row if all share it, else empty

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t num_places = params.num_q_heads * kMergeSlices<kColumns>;  // rows of a request
  const int num_rows = params.plan.header->num_merges * num_places;
  if (static_cast<int>(blockIdx.x) >= num_rows) {
    // In a CUDA graph, the grid is large enough for the largest possible plan. CTAs without rows exit at once, to make
    // room for the next kernel. CTA 0 waits for pack_decode in any case: the next kernel waits only for the end of this
    // one, and pack_decode must have ended by then.
    if (blockIdx.x > 0) return;
    ptx::launch_dependents();
    ptx::wait_for_dependencies();
    return;
  }
  const int row_step = gridDim.x * kMergeWarps;
  int first_own = blockIdx.x;
  // The warp's row in the present round, or `rounds` later. Computed again each time, because registers are scarce.
  const auto own = [&](int rounds) {
    return first_own + rounds * row_step + warp * static_cast<int>(gridDim.x);
  };
  // Returns row `index`. If there is no such row, the result has no partials.
  const auto load_row = [&](uint32_t index) {
    const uint32_t request = index / num_places;
    const int4 entry =
        index < num_rows ? reinterpret_cast<const int4*>(params.plan.merges)[request] : int4{};
    return MergeRow{entry.x, static_cast<int>(index - request * num_places), entry.y, entry.z};
  };
  MergeRow next_row = load_row(own(0));
  // In the first round, waits for pack_decode, and lets the next kernel start. Call it in each round before the first
  // read of anything but the plan, which was complete before pack_decode began. What needs only the plan comes before
  // the call: it then runs while pack_decode ends. Returns the scale of the values.
  const auto wait_for_partials = [&] {
    if (first_own < row_step) {
      ptx::wait_for_dependencies();
      ptx::launch_dependents();
    }
    return KvScales<kScales>::load(params).value(params);
  };
  // A warp that sums a single row with few partials has too few loads in flight. So if all rows of the CTA's next
  // rounds have few partials, each warp sums several rows at once.
  const auto merge_few = [&]<int kFew>(Few<kFew>) {
    constexpr int kMost = kMergeSlices<kColumns> > 1 ? 2 : 4;  // rows at once, limited by registers
    constexpr int kRows = std::max(std::min(Sum::kInFlight / kFew, kMost), 1);
    if constexpr (kRows == 1) return false;
    MergeRow rows[kRows];
    PartialRow<Partial> partials[kRows];
    int counts[kRows];
    bool are_few = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = r == 0 ? next_row : load_row(own(r));
      partials[r] = rows[r].template partials<Partial>(params);
      counts[r] = rows[r].num_partials;
      are_few &= counts[r] <= kFew;
    }
    if (!__syncthreads_and(are_few)) return false;
    const float v_scale = wait_for_partials();
    Sum sums[kRows];
    Sum::template of_few<kFew>(sums, partials, counts, lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (own(0) >= num_rows - r * row_step) continue;
      if (kSinks) sums[r].add_sink(load_sink(params.sinks, rows[r].head()));
      store_sum<T, kScales>(params, sums[r], rows[r], v_scale, lane);
    }
    first_own += (kRows - 1) * row_step;
    if (first_own + row_step < num_rows) next_row = load_row(own(1));
    return true;
  };
  // Combines the parts of all warps. Warp `combiner` gets the row's sum.
  const auto combine = [&](Sum& sum, int combiner, int num_parts) {
#pragma unroll
    for (int v = 0; v < Sum::kVectors; ++v) part_columns[warp][v][lane] = sum.columns[v];
    if (lane == 0) part_states[warp] = make_float2(sum.maximum, sum.weight);
    __syncthreads();
    if (warp == combiner) sum = Sum::of_parts(part_states, part_columns, num_parts, lane);
    __syncthreads();
  };
  // A round has one row per warp. The loop ends when the CTA's first warp has no row.
  for (; first_own < num_rows; first_own += row_step) {
    if (first_own + row_step < num_rows && (merge_few(Few<2>{}) || merge_few(Few<4>{}))) continue;
    MergeRow row = next_row;
    const bool is_mine = own(0) < num_rows;
    const bool is_long = row.num_partials > kWarpPartials<kColumns>;
    if (first_own + row_step < num_rows) next_row = load_row(own(1));

    // In turn -1, each warp sums its own row, unless the row is long. In each further turn, all warps share one long
    // row of the round. One loop does both, so that there is one copy of the code.
    int num_turns = 0;
    if (__syncthreads_or(is_long)) {
      if (lane == 0) shared_rows[warp] = is_long ? row : MergeRow{};
      __syncthreads();
      // The number of warps that have a row in this round.
      num_turns = min(kMergeWarps, (num_rows - first_own - 1) / gridDim.x + 1);
    }
    const float v_scale = wait_for_partials();
#pragma unroll 1
    for (int turn = -1; turn < num_turns; ++turn) {
      const bool is_shared = turn >= 0;
      if (is_shared) row = shared_rows[turn];
      const int count = row.num_partials;
      if (is_shared ? count == 0 : !is_mine || is_long) continue;
      // Of a shared row, each warp sums one of num_parts contiguous parts. The first part also adds the sink.
      uint32_t num_parts = 1, part = 0;
      int begin = 0, end = count;
      if (is_shared) {
        num_parts = min(kMergeWarps, (count + kPartPartials - 1) / kPartPartials);
        part = warp;
        begin = count * part / num_parts;
        end = count * (part + 1) / num_parts;
      }
      Sum sum;
      if (part < num_parts) {
        sum = Sum::of(row.template partials<Partial>(params), begin, end, lane);
        if (kSinks && part == 0) sum.add_sink(load_sink(params.sinks, row.head()));
      }
      if (is_shared) {
        combine(sum, turn, num_parts);
        if (warp != turn) continue;
      }
      store_sum<T, kScales>(params, sum, row, v_scale, lane);
    }
  }
  // The last warp checks that no graph on another stream has overwritten the partials: it has the fewest rows, so no
  // other warp waits for this load.
  if (blockIdx.x == 0 && threadIdx.x == (kMergeWarps - 1) * 32 &&
      __ldcg(params.partials_owner) != params.launch_tag) {
    __trap();
  }
}

}  // namespace pat
