// Finds where a tile is cut: between two segments, or within a segment.
#pragma once

#include <cstdint>

#include "kv_split/split_context.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// How much of a tile has been assigned to tickets.
struct Position {
  int32_t segment;  // first segment that is not assigned fully
  int32_t offset;   // tokens of that segment that are assigned
  int32_t first;    // first request whose KV is not assigned fully
  // Segment and offset at which the next item begins. From there up to `segment` and `offset`, the next item rereads
  // KV: the ranges that requests from `first` on share with requests of earlier items.
  int32_t base;
  int32_t base_offset;
  int64_t assigned;     // assigned load, without repeated reads
  int64_t reread_load;  // load of the KV that the next item rereads

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
  int64_t cost;           // cost of the item before the cut
  int32_t last;           // one past the last request of the item before the cut
  int32_t both_requests;  // number of requests that have KV on both sides of the cut
  bool is_end;            // the item ends the tile
};

struct TilePart {  // a part of a tile, up to a cut
  Position begin;
  Cut cut;
};

// Finds cuts. Functions write into the caller's Cut, which saves time, because a plan tries hundreds of cuts.
class CutFinder {
 public:
  // aligned: all tiles that read the same range are cut at the same positions, however many requests each tile has.
  CutFinder(const Packing& packing, const SplitContext& context, bool aligned = false)
      : packing_(packing), context_(context), aligned_(aligned) {}

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
  // Finds the best cut for which the item from `at` to the cut costs at most `budget_left`, the rest of a ticket's
  // `budget`. Returns false if there is no such cut.
  bool find(const Tile& tile, const Position& at, int64_t budget_left, int64_t budget,
            Cut& cut) const {
    return find(tile, at, budget_left, budget, false, cut);
  }
  // Finds the best cut for a ticket's first item. The item may cost more than `budget` if no cut makes it cheap enough.
  void force(const Tile& tile, const Position& at, int64_t budget, Cut& cut) const {
    find(tile, at, budget, budget, true, cut);
  }
  // Makes the cut at token `offset` of the tile's first segment.
  void cut_range(const Tile& tile, const Position& at, int32_t offset, Cut& cut) const {
    cut_at(tile, at, tile.segment_begin, offset, offset - at.offset, 0, cut);
  }

 private:
  bool find(const Tile& tile, const Position& at, int64_t budget_left, int64_t budget,
            bool is_forced, Cut& cut) const;
  // Makes the cut at token `offset` of a segment. most_reread: upper bound for the load that the next item may reread
  // to avoid partials.
  void cut_at(const Tile& tile, const Position& at, int32_t segment, int32_t offset, int64_t taken,
              int64_t most_reread, Cut& cut) const;

  const Packing& packing_;
  const SplitContext& context_;
  bool aligned_;
};

}  // namespace pat
