// Stages 2 and 3 of the scheduler for batch-invariant plans: turns a forest into work items.
//
// The bits of a request's result depend on the order in which the kernels add. So this order may depend on nothing but
// the request's length. A request's KV is cut at the boundaries of the ChunkGrid and nowhere else, and each chunk is
// one partial. Within a chunk, the kernels' steps begin at multiples of ChunkGrid::kStepTokens. The other requests of a
// work item do not change a request's result, because a row skips the steps that belong to other rows only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "chunk_grid.h"
#include "cost_model.h"
#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/ticket_rule.h"
#include "packing.h"
#include "prefix_forest.h"
#include "run_finder.h"
#include "tile_selection.h"

namespace pat {

class InvariantChunks {
 public:
  InvariantChunks(int32_t num_workers, const CostModel& cost, const TileSelection& tiles)
      : num_workers_(num_workers),
        cost_(cost),
        tiles_(tiles),
        item_costs_(item_costs_of(cost, tiles)),
        runs_(cost.packing) {}

  // Divides the requests of each chunk, in tree order, into runs that fit into a tile, and avoids items that are much
  // longer than others. Takes time linear in requests * chunks + segments; in the worst case, that is multiplied by the
  // number of requests per tile.
  //
  // num_distinct: KV tokens of the batch, each counted once. Fills only the spans of `packing`. Throws
  // std::length_error if int32 cannot count the slots of all spans.
  void plan(const PrefixForest& forest, std::span<const int32_t> seq_lens, int64_t num_distinct,
            Packing& packing, Split& split);

 private:
  // A request that has KV in the chunk.
  struct Holder {
    int32_t request;
    int32_t node;  // deepest node shared with the previous holder; -1: none
    int32_t end;   // end of its KV in the chunk
    // End of the KV that this holder shares with the previous holder, rounded down to whole steps of the chunk. The
    // chunk's beginning if they share none.
    int32_t shared_end;
  };
  struct Stream {
    int32_t next;  // next work item to assign
    int32_t end;
    TicketProgress progress;

    bool is_empty() const { return next == end; }
  };

  // Fills holders_ with all requests, in tree order.
  void list_requests(const PrefixForest& forest);
  // Removes the holders that have no KV in the chunk from `begin` on. Returns false if no holder is left.
  bool enter_chunk(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin);
  // Fills run_ends_. longest: upper bound for the tokens of an item with several requests.
  void choose_runs(int32_t begin, int64_t longest);
  // Adds a work item for the holders [first, end).
  void add_item(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin,
                int32_t first, int32_t end, Packing& packing, Split& split);
  int32_t span_of(const PrefixForest& forest, int32_t node, int32_t kv_begin, int32_t kv_end,
                  int32_t request, Packing& packing);
  // Makes tickets that shrink with the remaining work. Shared and private work alternate, as in GuidedSelfScheduling.
  void assign_tickets(Split& split) const;

  int32_t num_workers_;
  CostModel cost_;
  TileSelection tiles_;
  std::vector<ItemCost> item_costs_;
  RunFinder runs_;

  std::vector<Holder> holders_;
  std::vector<int64_t> own_tokens_;  // running sum of what holders do not share with the one before
  std::vector<int32_t> run_ends_;
  struct Reach {
    int32_t last;  // the last holder that shares the range
    int32_t end;   // end of the range
    int32_t node;  // the node in which the range ends
  };
  std::vector<Reach> reaches_;
  struct KnownSpan {
    int32_t kv_begin;
    int32_t kv_end;
    int32_t span;
  };
  std::vector<KnownSpan> known_spans_;  // per node: the last span that ends in it
};

}  // namespace pat
