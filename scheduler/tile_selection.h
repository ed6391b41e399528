// Selects the tile body for a number of query rows: PAT's round-up rule (section 5.2) on a tile table.
#pragma once

#include <cstdint>

#include "check.h"
#include "tile_table.h"

namespace pat {

class TileSelection {
 public:
  // table: the bodies of the layers' kind; it must outlive the selection.
  // max_block_q: the largest body that the device has; must be one of the table's.
  // one_tile: that body executes all work items, so that a row has the same bits in each of them, even if bodies sum in
  // different orders.
  TileSelection(const TileTable& table, int32_t group_size, int32_t max_block_q,
                bool one_tile = false)
      : table_(&table), group_size_(group_size), one_tile_(one_tile) {
    PAT_CHECK(group_size >= 1 && group_size <= table.max_group_size, "group_size must be 1 to ",
              table.max_group_size, " query heads per KV head, got ", group_size);
    for (int32_t tile = 0; tile < table.num_tiles; ++tile) {
      if (table[tile].block_q == max_block_q) largest_ = tile;
    }
    PAT_CHECK(largest_ >= 0, "max_block_q must be the block_q of a tile in the tile table (up to ",
              table.largest_block_q(), "), got ", max_block_q);
    PAT_CHECK(max_block_q >= group_size, "max_block_q must be at least group_size ", group_size,
              ", got ", max_block_q);
  }

  const TileTable& table() const { return *table_; }

  int32_t group_size() const { return group_size_; }
  // Requests in one tile at most. A request's rows never straddle tiles.
  int32_t requests_per_tile() const { return (*table_)[largest_].block_q / group_size_; }
  // Tiles that `num_requests` requests need; each reads the whole KV range.
  int32_t num_tiles(int32_t num_requests) const {
    return (num_requests + requests_per_tile() - 1) / requests_per_tile();
  }
  // The smallest tile that holds `num_requests` <= requests_per_tile() requests: anything larger would waste
  // shared memory and tensor core time on padding rows.
  int32_t select(int32_t num_requests) const {
    int32_t tile = one_tile_ ? largest_ : 0;
    while ((*table_)[tile].block_q < num_requests * group_size_) ++tile;
    return tile;
  }

 private:
  const TileTable* table_;
  int32_t group_size_;
  bool one_tile_;
  int32_t largest_ = -1;
};

}  // namespace pat
