// Costs of memory-bound decode attention, in KV tokens of one KV head. A token is 4 * head_dim bytes (K and V,
// 2 bytes an element), so costs do not depend on head_dim.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pat {

struct CostModel {
  static constexpr int32_t kRateUnit = 64;

  // Writing and later reading one more partial of one query row: 2 * 4 * head_dim bytes of fp32 output.
  int32_t partial_row = 2;
  // Starting one more work item: its queries, its first loads, its epilogue.
  int32_t piece = 24;
  // Finishing one query row of a work item, in 1 / kRateUnit: normalising and storing it.
  int32_t query_row = 3 * kRateUnit / 2;
  // A work item takes as long as this many tokens at least, however few it has: the latency of its loads.
  int32_t shortest = 48;
  // Query rows from which a KV token costs more than its bytes (the ridge of the roofline under mma.sync).
  int32_t rows_at_ridge = 100;

  // Cost of a work item, in 1 / kRateUnit: what it costs at any length, and per KV token.
  int64_t fixed(int32_t num_rows) const {
    return kRateUnit * int64_t{piece} + int64_t{query_row} * num_rows;
  }
  int64_t rate(int32_t block_q) const {
    return std::max<int64_t>(kRateUnit, int64_t{kRateUnit} * block_q / rows_at_ridge);
  }
};

}  // namespace pat
