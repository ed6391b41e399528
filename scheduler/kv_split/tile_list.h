// The tiles of a packing. A CTA executes a tile in one go, unless it is cut.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_split/split_context.h"
#include "packing.h"

namespace pat {

// A shared range from this length on, in tokens, is assigned chunk by chunk to all tiles that read it. The KV of such a
// range, in eight KV heads, is more than stays in the L2.
inline constexpr int32_t kLongRange = 6144;

struct Tile {
  int32_t request_begin;  // into Packing::requests
  int32_t num_requests;
  int32_t segment_begin;  // into Packing::segments
  int32_t segment_end;
  int32_t tile;
  bool is_shared;
  bool is_chunked;  // the tile is one range of kLongRange tokens or more, and nothing else
  bool is_rest;     // what remains of a tile whose long range became a tile
  // The most requests of any tile that reads the range of the first segment, this tile included. 0 if no other tile
  // reads it.
  int32_t widest_reader;
  int64_t num_tokens;
  int64_t kv_load;
  int64_t uncut_cost;

  bool is_read_again() const { return widest_reader > 0; }
};

// Loads and costs are those of the context of make().
class TileList {
 public:
  // parted: a long range that several tiles read becomes a tile of its own in each of them.
  void make(const Packing& packing, const SplitContext& context, bool parted);

  // The tiles of the shared packs, then those of the private packs.
  const std::vector<Tile>& tiles() const { return tiles_; }
  size_t num_shared() const { return num_shared_; }
  // How many tiles were parted, and how many requests these have.
  int64_t num_parted() const { return num_parted_; }
  int64_t parted_requests() const { return parted_requests_; }
  int64_t total_cost(size_t begin, size_t end) const;
  int64_t total_cost() const { return total_cost(0, tiles_.size()); }

  // True if both tiles begin with the same shared range.
  static bool is_same_range(const Packing& packing, const Tile& a, const Tile& b);

 private:
  // Marks tiles that begin with a range of at least this length which other tiles read as well.
  void mark_common_ranges(const Packing& packing, int32_t least_tokens);
  void part_long_ranges(const Packing& packing, const SplitContext& context);

  std::vector<Tile> tiles_;
  size_t num_shared_ = 0;
  int64_t num_parted_ = 0;
  int64_t parted_requests_ = 0;
};

}  // namespace pat
