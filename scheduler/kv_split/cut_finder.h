// Cuts of a tile: between two segments, or within one.
#pragma once

#include <cstdint>

#include "kv_split/split_context.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// Progress in assigning the items of a tile.
struct Position {
  int32_t segment;  // into Packing::segments
  int32_t offset;   // tokens of it that are assigned
  int32_t first;    // requests before this one are done
  // Segments from here on that the next item reads again, as far as they concern the requests from `first` on.
  int32_t base;
  int32_t base_offset;
  int64_t assigned;     // load, what is read again not counted
  int64_t reread_load;  // load that the next item reads again

  static Position begin_of(const Tile& tile) {
    return {.segment = tile.segment_begin,
            .offset = 0,
            .first = 0,
            .base = tile.segment_begin,
            .base_offset = 0,
            .assigned = 0,
            .reread_load = 0};
  }
};

struct Cut {
  Position next;
  int64_t cost;           // of the item before the cut
  int32_t last;           // requests before this one belong to the item
  int32_t both_requests;  // requests that the cut concerns
  bool is_end;            // there is nothing behind it
};

struct TilePart {  // of a tile
  Position begin;
  Cut cut;
};

// Cuts are written in place: they are made a few hundred times for a plan.
class CutFinder {
 public:
  CutFinder(const Packing& packing, const SplitContext& context)
      : packing_(packing), context_(context) {}

  void take_rest(const Tile& tile, const Position& at, Cut& cut) const {
    cut.next.segment = tile.segment_end;
    cut.next.offset = 0;
    cut.next.assigned = tile.kv_load;
    cut.cost =
        context_.cost(tile.num_requests - at.first, tile.kv_load - at.assigned + at.reread_load);
    cut.last = tile.num_requests;
    cut.both_requests = 0;
    cut.is_end = true;
  }
  // The best cut with which the item from `at` on costs `budget_left` at most, of a ticket that may cost `budget`. False if
  // there is none.
  bool find(const Tile& tile, const Position& at, int64_t budget_left, int64_t budget,
            Cut& cut) const {
    return find(tile, at, budget_left, budget, false, cut);
  }
  // The same for a ticket's first item, which may cost more than `budget` if no cut makes a shorter one.
  void force(const Tile& tile, const Position& at, int64_t budget, Cut& cut) const {
    find(tile, at, budget, budget, true, cut);
  }
  // Within the tile's first segment.
  void cut_range(const Tile& tile, const Position& at, int32_t offset, Cut& cut) const {
    cut_at(tile, at, tile.segment_begin, offset, offset - at.offset, 0, cut);
  }

 private:
  bool find(const Tile& tile, const Position& at, int64_t budget_left, int64_t budget,
            bool is_forced, Cut& cut) const;
  // most_reread: so many tokens the item behind the cut may read again, rather than that the cut makes partials.
  void cut_at(const Tile& tile, const Position& at, int32_t segment, int32_t offset, int64_t taken,
              int64_t most_reread, Cut& cut) const;

  const Packing& packing_;
  const SplitContext& context_;
};

}  // namespace pat
