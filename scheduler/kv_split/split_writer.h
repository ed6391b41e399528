// Deals the parts of the tiles out to tickets, and writes them as a Split.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/cut_finder.h"
#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// A split that has not been written down.
struct Choice {
  struct Share {  // of a ticket
    int32_t tile;
    int32_t ticket;
    int32_t part;  // into parts; -1: the whole tile
  };
  std::vector<Share> shares;
  std::vector<Part> parts;
  int32_t num_tickets = 0;

  void clear() {
    shares.clear();
    parts.clear();
  }
  void take(size_t tile, int32_t ticket) {
    shares.push_back({static_cast<int32_t>(tile), ticket, -1});
  }
  void take(size_t tile, int32_t ticket, const Part& part) {
    shares.push_back({static_cast<int32_t>(tile), ticket, static_cast<int32_t>(parts.size())});
    parts.push_back(part);
  }
};

class SplitWriter {
 public:
  // Appends the choice's items to `out`, which has the tickets already.
  void add(const Packing& packing, const SplitContext& context, std::span<const Tile> tiles,
           const Choice& choice, Split& out);

 private:
  void add_part(const Packing& packing, const SplitContext& context, const Tile& tile,
                const Part& part, Split& out);

  std::vector<int32_t> place_;  // per request of a tile: its place in the item
};

}  // namespace pat
