// The tiles of a packing: each is what a CTA executes in one go if it is not cut.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_split/split_context.h"
#include "packing.h"

namespace pat {

// KV that several tiles read is assigned in chunks from this length on, in tokens: what eight KV heads have of it is
// then more than stays in the L2 while others are read.
inline constexpr int32_t kLongRange = 6144;

struct Tile {
  int32_t request_begin;  // into Packing::requests
  int32_t num_requests;
  int32_t segment_begin;  // into Packing::segments
  int32_t segment_end;
  int32_t tile;
  bool is_shared;
  bool is_read_again;  // its first segment is a range that other tiles read as well
  bool is_chunked;     // such a range, and nothing else
  bool is_rest;        // what such a range leaves of a tile
  int64_t num_tokens;
  int64_t kv_load;
  int64_t uncut_cost;
};

// Loads and costs are those of the context that the list is made with.
class TileList {
 public:
  // parted: each long range that other tiles read as well becomes a tile of its own.
  void make(const Packing& packing, const SplitContext& context, bool parted);

  // Tiles of the shared packs, then of the private ones.
  const std::vector<Tile>& tiles() const { return tiles_; }
  size_t num_shared() const { return num_shared_; }
  // Tiles that were parted, and their requests.
  int64_t num_parted() const { return num_parted_; }
  int64_t parted_requests() const { return parted_requests_; }
  int64_t total_cost(size_t begin, size_t end) const;
  int64_t total_cost() const { return total_cost(0, tiles_.size()); }

  // True if both begin with the same shared range.
  static bool is_same_range(const Packing& packing, const Tile& a, const Tile& b);

 private:
  // Marks tiles that begin with a range of so many tokens which other tiles read as well.
  void mark_common_ranges(const Packing& packing, int32_t least_tokens);
  void part_long_ranges(const Packing& packing, const SplitContext& context);

  std::vector<Tile> tiles_;
  size_t num_shared_ = 0;
  int64_t num_parted_ = 0;
  int64_t parted_requests_ = 0;
};

}  // namespace pat
