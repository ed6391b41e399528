// Little work: one ticket per worker.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/split_time_model.h"
#include "kv_split/split_writer.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// A contiguous cost-balanced split (Stream-K) with at most num_workers - 1 cuts. The budget of a ticket is the smallest,
// up to a few tokens, with which the packs fit; found by bisection, each step linear in the tiles. Tiles that read the
// same KV are cut at the same places, if that costs little: they then read it at the same time, and device memory once.
//
// A few such splits are made. The one that is expected to end first, merge included, is taken. They differ in how short
// items may be, and in whether cuts between requests read again whatever that costs, so that nothing is merged.
class StreamKSplit {
 public:
  // is_little: items may be shorter than the context's, and larger tickets are drawn first, as CTAs begin one after the
  // other.
  void split(const SplitContext& context, const SplitTask& task, const Packing& packing,
             const TileList& list, bool is_little, Split& out);

 private:
  struct AssignResult {
    int64_t kv_load;  // so far; what is read again not counted
    int64_t
        uncut;  // cost of a item that exceeds the budget, and that no cut can shorten; 0 without
    int64_t largest;  // cost of the largest ticket
    bool fits;        // all tiles are assigned
  };
  // Assigns the tiles to tickets that cost `budget` at most, as far as there are workers and no item is too long.
  // aligned: a tile with a long range that others read as well begins a ticket, unless it fits into one as a whole.
  static AssignResult assign(const SplitContext& context, const Packing& packing,
                             std::span<const Tile> tiles, int64_t budget, bool aligned,
                             Assignment& assignment);
  // Fills assignment_.
  void choose(const SplitContext& context, const Packing& packing, const TileList& list);
  // `out` becomes the split of the context, if that is expected to end earlier.
  SplitTimeModel::Expected try_context(const SplitContext& context, const SplitTask& task,
                                       const Packing& packing, const TileList& list, Split& out);
  void order_tickets(Split& split);

  SplitTimeModel time_model_;
  SplitWriter writer_;
  Assignment assignment_;
  Assignment trial_;
  Split trial_split_;
  std::vector<int64_t> ticket_costs_;
  std::vector<int32_t> order_;  // of tickets
  std::vector<Ticket> ordered_;
};

}  // namespace pat
