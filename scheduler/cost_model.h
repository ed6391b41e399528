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
  int32_t piece = 16;
  // Reading a KV range once more from another tile of the same pack, in 1 / kRateUnit of reading it: the tiles
  // run side by side and hit L2. A tile of another pack runs at another time and pays HBM in full.
  int32_t pass_in_pack = kRateUnit / 2;
  // Query rows from which a KV token costs more than its bytes (the ridge of the roofline under mma.sync).
  int32_t rows_at_ridge = 100;

  // Cost per KV token of a tile, in 1 / kRateUnit.
  int64_t rate(int32_t block_q) const {
    return std::max<int64_t>(kRateUnit, int64_t{kRateUnit} * block_q / rows_at_ridge);
  }
};

}  // namespace pat
