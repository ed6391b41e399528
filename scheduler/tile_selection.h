// Which tile body executes a given number of query rows: PAT's round-up rule (section 5.2) on the one tile table.
#pragma once

#include <cstdint>

#include "check.h"
#include "tile_table.h"

namespace pat {

class TileSelection {
 public:
  // max_block_q: the largest body that the device has; must be one of the table's.
  // one_tile: everything is executed in that body, so that a row is computed alike in each work item even where the
  // bodies differ in how they add up.
  TileSelection(int32_t group_size, int32_t max_block_q, bool one_tile = false)
      : group_size_(group_size), one_tile_(one_tile) {
    PAT_CHECK(group_size >= 1 && group_size <= kMaxGroupSize, "group_size must be 1 to ",
              kMaxGroupSize, " query heads per KV head, got ", group_size);
    for (int32_t tile = 0; tile < kNumTiles; ++tile) {
      if (kTileTable[tile].block_q == max_block_q) largest_ = tile;
    }
    PAT_CHECK(largest_ >= 0, "max_block_q must be the block_q of a tile in the tile table (up to ",
              kTileTable[kNumTiles - 1].block_q, "), got ", max_block_q);
  }

  int32_t group_size() const { return group_size_; }
  // Requests in one tile at most. A request's rows never straddle tiles.
  int32_t requests_per_tile() const { return kTileTable[largest_].block_q / group_size_; }
  // Tiles that `num_requests` requests need; each reads the whole KV range.
  int32_t num_tiles(int32_t num_requests) const {
    return (num_requests + requests_per_tile() - 1) / requests_per_tile();
  }
  // The smallest tile that holds `num_requests` <= requests_per_tile() requests: anything larger would waste
  // shared memory and tensor core time on padding rows.
  int32_t select(int32_t num_requests) const {
    int32_t tile = one_tile_ ? largest_ : 0;
    while (kTileTable[tile].block_q < num_requests * group_size_) ++tile;
    return tile;
  }

 private:
  int32_t group_size_;
  bool one_tile_;
  int32_t largest_ = -1;
};

}  // namespace pat
