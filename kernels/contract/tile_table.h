// CONTRACT between scheduler/ and kernels/: which tile bodies exist. Included by both; includes neither.
// The scheduler may only choose a tile of this table, and the kernels instantiate exactly this table.
#pragma once

#include <cstdint>

namespace pat {

// One body of the decode kernel. Query rows are (request, query head of the group) pairs.
struct TileConfig {
  int32_t block_q;    // query rows held by one CTA; a pack with more rows takes several tiles
  int32_t block_kv;   // KV tokens per step of the main loop
  int32_t num_warps;  // warps that compute
};

// Ascending in block_q, so that "the first that fits" is the smallest that fits.
inline constexpr TileConfig kTileTable[] = {
    {.block_q = 16, .block_kv = 64, .num_warps = 4},  // private tails; memory-bound
    {.block_q = 32, .block_kv = 64, .num_warps = 4},  // small packs
    {.block_q = 64, .block_kv = 32, .num_warps = 4},  // what mma.sync feeds at HBM rate
};
inline constexpr int32_t kNumTiles = sizeof(kTileTable) / sizeof(kTileTable[0]);

// A request's query rows never straddle two tiles, so the group must fit into the smallest one.
inline constexpr int32_t kMaxGroupSize = 16;

constexpr bool tile_table_is_ascending() {
  for (int32_t i = 1; i < kNumTiles; ++i) {
    if (kTileTable[i].block_q <= kTileTable[i - 1].block_q) return false;
  }
  return true;
}
static_assert(kNumTiles > 0 && kTileTable[0].block_q >= kMaxGroupSize && tile_table_is_ascending());

}  // namespace pat
