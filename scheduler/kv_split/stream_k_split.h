// The split for steps with little work, one ticket per worker, and for long ranges, a few tickets per worker.
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
// ticket budget for which all tiles fit, to within a few tokens. Each step takes time linear in the tiles. Tiles that
// read the same range are cut at the same positions if that costs little ("aligned"). They then read the range at the
// same time, and from device memory only once.
//
// split() makes a few such splits, and chooses the one with the shortest expected time, including the merge. They
// differ in how short items may be, and in whether cuts between two requests may make partials.
class StreamKSplit {
 public:
  // is_little: there is little work. Items may then be shorter than in `context`, and CTAs draw larger tickets first,
  // because CTAs start one after the other. Returns true if the split is aligned.
  bool split(const SplitContext& context, const SplitTask& task, const Packing& packing,
             const TileList& list, bool is_little, Split& out);
  // Replaces `out`, a split of much work, by an aligned split with a few tickets per worker if that is expected to end
  // earlier. CTAs draw the tickets in the order of their positions, so that they read a range from device memory once.
  void split_finer(const SplitContext& context, const SplitTask& task, const Packing& packing,
                   const TileList& list, Split& out);

 private:
  struct AssignResult {
    int64_t kv_load;  // assigned load, without repeated reads
    int64_t uncut;    // cost of an item that exceeds the budget and cannot be cut; 0: none
    int64_t largest;  // cost of the largest ticket
    bool fits;        // all tiles are assigned
  };
  // Assigns the tiles to tickets of at most `budget` each, until no worker is left or an item is too long. aligned: a
  // tile whose first range is also read by other tiles begins a ticket, unless it fits uncut into the current ticket.
  static AssignResult assign(const SplitContext& context, const Packing& packing,
                             std::span<const Tile> tiles, int64_t budget, bool aligned,
                             Assignment& assignment);
  // Fills assignment_ with the best assignment for `context`. Returns whether it is aligned.
  bool choose(const SplitContext& context, const Packing& packing, const TileList& list);
  // Makes the split for `context`. Stores it in `out` if its expected time is shorter than that of `out`.
  SplitTimeModel::Expected try_context(const SplitContext& context, const SplitTask& task,
                                       const Packing& packing, const TileList& list, Split& out);
  // Writes assignment_ to trial_split_.
  void write(const SplitContext& context, const Packing& packing, const TileList& list);
  void order_tickets(Split& split);

  SplitTimeModel time_model_;
  Assignment assignment_;
  Assignment trial_;
  Split trial_split_;
  bool is_aligned_ = false;  // whether the best split so far is aligned
  std::vector<int64_t> ticket_costs_;
  std::vector<int32_t> order_;  // indices of tickets
  std::vector<Ticket> ordered_;
};

}  // namespace pat
