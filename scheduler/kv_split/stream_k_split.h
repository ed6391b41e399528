// The split of a little work: one ticket per worker.
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

// Stream-K: a contiguous split, balanced by cost, with at most num_workers - 1 cuts. Bisection finds the smallest
// budget of a ticket, up to a few tokens, with which all tiles fit. Each step is linear in the tiles. Tiles that read
// one range are cut at the same places if that costs little. Such tiles then read the range at the same time, and from
// device memory once.
//
// split() makes a few such splits and takes the one that is expected to end first, merge included. The splits differ in
// how short items may be. In some, the item after a cut between two requests always reads again what both share, so
// that nothing is merged there.
class StreamKSplit {
 public:
  // is_little: items may be shorter than the context's, and CTAs draw larger tickets first, because they start one
  // after the other. Returns true if some tiles read the same range and the split cuts these tiles at the same places.
  bool split(const SplitContext& context, const SplitTask& task, const Packing& packing,
             const TileList& list, bool is_little, Split& out);

 private:
  struct AssignResult {
    int64_t kv_load;  // that was assigned, without what is read again
    int64_t uncut;  // cost of an item that exceeds the budget and that no cut can shorten; 0: none
    int64_t largest;  // cost of the largest ticket
    bool fits;        // all tiles are assigned
  };
  // Assigns the tiles to tickets of at most `budget` each, until there is no worker left or an item is too long.
  // aligned: a tile with a long range that other tiles read as well begins a ticket, unless the tile fits uncut into
  // the rest of the present ticket.
  static AssignResult assign(const SplitContext& context, const Packing& packing,
                             std::span<const Tile> tiles, int64_t budget, bool aligned,
                             Assignment& assignment);
  // Fills assignment_ with the best assignment. Returns whether it is aligned.
  bool choose(const SplitContext& context, const Packing& packing, const TileList& list);
  // Replaces `out`, and is_aligned_, by the split of this context if that is expected to end earlier.
  SplitTimeModel::Expected try_context(const SplitContext& context, const SplitTask& task,
                                       const Packing& packing, const TileList& list, Split& out);
  void order_tickets(Split& split);

  SplitTimeModel time_model_;
  SplitWriter writer_;
  Assignment assignment_;
  Assignment trial_;
  Split trial_split_;
  bool is_aligned_ = false;  // what the last split() returns
  std::vector<int64_t> ticket_costs_;
  std::vector<int32_t> order_;  // of tickets
  std::vector<Ticket> ordered_;
};

}  // namespace pat
