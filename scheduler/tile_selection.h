// Selects the smallest tile with room for the query rows of some requests: PAT's round-up rule (section 5.2), for any
// tile table.
#pragma once

#include <cstdint>

#include "check.h"
#include "tile_table.h"

namespace pat {

class TileSelection {
 public:
  // table: the tiles of this kind of layer; must outlive the TileSelection. max_block_q: block_q of the largest tile
  // that the device can run; must be in the table. one_tile: select() always returns this largest tile. The bodies of
  // different tiles may sum in different orders, so results would otherwise depend on the tile.
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
  // The most requests that fit into a tile. All query rows of a request are in the same tile.
  int32_t requests_per_tile() const { return (*table_)[largest_].block_q / group_size_; }
  // Number of tiles that `num_requests` requests need. Each tile reads the whole KV range.
  int32_t num_tiles(int32_t num_requests) const {
    return (num_requests + requests_per_tile() - 1) / requests_per_tile();
  }
  // Index of the smallest tile with room for `num_requests` requests, which must be at most requests_per_tile(). A
  // larger tile would waste shared memory and tensor core time on padding rows. With one_tile: the largest tile.
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
