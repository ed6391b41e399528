// Assignment: the tiles and parts of tiles of each ticket. add_work_items() turns them into the work items of a Split.
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

// A tile, or a part of a tile, that is assigned to a ticket.
struct AssignedPart {
  int32_t tile;
  int32_t ticket;
  int32_t part;  // index in Assignment::parts; -1: the whole tile
};

// The tiles and parts of tiles of all tickets, in the order of the tickets.
struct Assignment {
  std::vector<AssignedPart> assigned_parts;
  std::vector<TilePart> parts;
  int32_t num_tickets = 0;

  void clear() {
    assigned_parts.clear();
    parts.clear();
  }
  void add(size_t tile, int32_t ticket) {
    assigned_parts.push_back({static_cast<int32_t>(tile), ticket, -1});
  }
  void add(size_t tile, int32_t ticket, const TilePart& part) {
    assigned_parts.push_back(
        {static_cast<int32_t>(tile), ticket, static_cast<int32_t>(parts.size())});
    parts.push_back(part);
  }
};

// Appends the assignment's work items to `out`, and fills the tickets of `out`, which must already exist.
void add_work_items(const Packing& packing, const SplitContext& context,
                    std::span<const Tile> tiles, const Assignment& assignment, Split& out);

}  // namespace pat
