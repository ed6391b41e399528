// The tiles of a packing. A tile that is not cut becomes one work item.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_split/split_context.h"
#include "packing.h"

namespace pat {

// GuidedSelfScheduling assigns shared ranges of at least this many tokens chunk by chunk, because the L2 cannot keep
// the KV of so long a range for eight KV heads.
inline constexpr int32_t kLongRange = 6144;

struct Tile {
  int32_t request_begin;  // index in Packing::requests
  int32_t num_requests;
  int32_t segment_begin;  // index in Packing::segments
  int32_t segment_end;
  int32_t tile;
  bool is_shared;
  bool is_chunked;  // the tile is one range of kLongRange tokens or more
  bool is_rest;     // the rest of a tile whose long range became a tile of its own
  // Of all tiles that read the first segment's range, the number of requests of the widest tile. 0 if only this tile
  // reads the range, or if the range is too short.
  int32_t widest_reader;
  int64_t num_tokens;
  int64_t kv_load;
  int64_t uncut_cost;

  bool is_read_again() const { return widest_reader > 0; }
};

// The tiles of all packs, with their loads and costs in the context that make() gets.
class TileList {
 public:
  // parted: if several tiles read the same long range, each of them is parted into two: a tile with that range, and a
  // tile with the rest.
  void make(const Packing& packing, const SplitContext& context, bool parted);

  // The tiles of the shared packs, then those of the private packs.
  const std::vector<Tile>& tiles() const { return tiles_; }
  size_t num_shared() const { return num_shared_; }
  // Number of tiles that were parted, and number of requests of these tiles.
  int64_t num_parted() const { return num_parted_; }
  int64_t parted_requests() const { return parted_requests_; }
  int64_t total_cost(size_t begin, size_t end) const;
  int64_t total_cost() const { return total_cost(0, tiles_.size()); }

  // True if both tiles begin with the same shared range.
  static bool is_same_range(const Packing& packing, const Tile& a, const Tile& b);

 private:
  // Sets widest_reader of tiles whose first range has at least `least_tokens` tokens and is read by other tiles too.
  void mark_common_ranges(const Packing& packing, int32_t least_tokens);
  void part_long_ranges(const Packing& packing, const SplitContext& context);

  std::vector<Tile> tiles_;
  size_t num_shared_ = 0;
  int64_t num_parted_ = 0;
  int64_t parted_requests_ = 0;
};

}  // namespace pat
