// CONTRACT between scheduler/ and kernels/: which tiles exist. Both include this header; it includes nothing of theirs.
// For each kind of layer, the scheduler chooses only tiles of that kind's table, and the kernels are compiled for
// exactly these tiles.
#pragma once

#include <cstdint>

namespace pat {

// One tile of the decode kernel. A query row is a (request, query head of the group) pair. docs/development.md says what
// depends on a tile.
struct TileConfig {
  int32_t block_q;    // query rows of one tile; a pack with more rows takes several tiles
  int32_t block_kv;   // KV tokens per step of the main loop
  int32_t num_warps;  // consumer warps
};

inline constexpr TileConfig kTileConfigs[] = {
    {.block_q = 16, .block_kv = 64, .num_warps = 4},  // private tails; memory-bound
    {.block_q = 32, .block_kv = 64, .num_warps = 4},  // small packs
    {.block_q = 64, .block_kv = 32, .num_warps = 4},  // mma.sync still keeps up with HBM here
};
inline constexpr int32_t kNumTiles = sizeof(kTileConfigs) / sizeof(TileConfig);

// The query rows of a request are never divided among tiles, so a group must fit into the smallest tile.
inline constexpr int32_t kMaxGroupSize = 16;

// Tiles of latent attention (MLA): all query heads share one KV head, whose values are the first columns of its keys.
inline constexpr TileConfig kLatentTileConfigs[] = {
    {.block_q = 32, .block_kv = 32, .num_warps = 8},
    {.block_q = 64, .block_kv = 64, .num_warps = 8},
};
inline constexpr int32_t kNumLatentTiles = sizeof(kLatentTileConfigs) / sizeof(TileConfig);
inline constexpr int32_t kMaxLatentGroupSize = 64;

// The tiles of one kind of layer. A work item's tile is an index into this table.
struct TileTable {
  const TileConfig* tiles;
  int32_t num_tiles;
  int32_t max_group_size;

  constexpr const TileConfig& operator[](int32_t tile) const { return tiles[tile]; }
  constexpr const TileConfig* begin() const { return tiles; }
  constexpr const TileConfig* end() const { return tiles + num_tiles; }
  constexpr int32_t largest_block_q() const { return tiles[num_tiles - 1].block_q; }
  // Tiles ascend in block_q, so that the first tile that fits is the smallest that fits. The kernels read a tile's
  // queries in 1, 2 or 4 units of 16 rows.
  constexpr bool is_valid() const {
    for (int32_t i = 0; i < num_tiles; ++i) {
      const int32_t rows = tiles[i].block_q;
      if (rows != 16 && rows != 32 && rows != 64) return false;
      if (i > 0 && rows <= tiles[i - 1].block_q) return false;
    }
    return num_tiles > 0;
  }
};

inline constexpr TileTable kTileTable{kTileConfigs, kNumTiles, kMaxGroupSize};
inline constexpr TileTable kLatentTileTable{kLatentTileConfigs, kNumLatentTiles,
                                            kMaxLatentGroupSize};
static_assert(kTileTable.is_valid(), "tiles have 16, 32 or 64 rows, in ascending order");
static_assert(kLatentTileTable.is_valid(), "tiles have 16, 32 or 64 rows, in ascending order");
static_assert(kTileTable[0].block_q >= kMaxGroupSize);
static_assert(kLatentTileTable.largest_block_q() >= kMaxLatentGroupSize);

constexpr const TileTable& tiles_of(bool is_latent) {
  return is_latent ? kLatentTileTable : kTileTable;
}

}  // namespace pat
