// Costs of memory-bound decode attention, in KV tokens of one KV head. A token is 4 * head_dim bytes (K and V,
// 2 bytes an element), so costs do not depend on head_dim.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"

namespace pat {

struct CostModel {
  static constexpr int32_t kRateUnit = 64;
  // Sums of costs up to this, over any batch that fits into memory, fit into int64.
  static constexpr int32_t kLargest = 1 << 20;

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

  // Throws std::invalid_argument naming the first cost that is out of range.
  void check() const {
    check_range("partial_row", partial_row, 0);
    check_range("piece", piece, 0);
    check_range("query_row", query_row, 0);
    check_range("shortest", shortest, 0);
    check_range("rows_at_ridge", rows_at_ridge, 1);
  }

  // Cost of a work item, in 1 / kRateUnit: what it costs at any length, and per KV token.
  int64_t fixed(int32_t num_rows) const {
    return kRateUnit * int64_t{piece} + int64_t{query_row} * num_rows;
  }
  int64_t rate(int32_t block_q) const {
    return std::max<int64_t>(kRateUnit, int64_t{kRateUnit} * block_q / rows_at_ridge);
  }

 private:
  static void check_range(const char* name, int32_t value, int32_t least) {
    PAT_CHECK(value >= least && value <= kLargest, "cost ", name, " must be ", least, " to ",
              kLargest, ", got ", value);
  }
};

}  // namespace pat
