// Stages 2 and 3 of a batch-invariant plan: forest -> work items.
//
// The order of the sums of a request's result, and so each of its bits, depends on the request's length
// alone. Its KV is cut at the boundaries of the ChunkGrid and nowhere else, and each chunk is one partial. Within a
// chunk its tokens are taken in steps that begin at multiples of ChunkGrid::kStepTokens. Who else is in the work
// item, and which of the steps are shared with whom, changes nothing: other rows' steps leave a row as it is.
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
#include "tile_selection.h"

namespace pat {

class InvariantChunks {
 public:
  InvariantChunks(int32_t num_workers, const CostModel& cost, const TileSelection& tiles)
      : num_workers_(num_workers),
        cost_(cost),
        tiles_(tiles),
        item_costs_(item_costs_of(cost, tiles)) {}

  // For each chunk, divides the requests that have it, in tree order, into runs that fit into a tile: as SubtreeTiler
  // does, except one chunk, and so that no item is much longer than others. Linear in requests * chunks + segments, up
  // to the number of requests in a tile.
  //
  // In `packing`, the spans are what the plan needs; the packs are the work items' requests, for reports. Throws
  // std::length_error if the slots of all spans are more than int32 can count.
  void plan(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& packing,
            Split& split);

 private:
  // A request that has KV in the chunk.
  struct Holder {
    int32_t request;
    int32_t node;  // the deepest one that it shares with the holder before; -1: none
    int32_t end;   // of its KV in the chunk
    // Where what it shares with the holder before ends in the chunk, in whole steps. The chunk's begin: nothing is
    // shared.
    int32_t shared_end;
  };
  struct Stream {
    int32_t next;  // item
    int32_t end;
    TicketProgress progress;

    bool is_empty() const { return next == end; }
  };

  // All requests, in tree order.
  void list_requests(const PrefixForest& forest);
  // Keeps the holders that reach the chunk. False if there are none.
  bool enter_chunk(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin);
  // Fills run_ends_. longest: tokens of an item of several requests, at most.
  void choose_runs(int32_t begin, int64_t longest);
  // Adds a item of the holders [first, end).
  void add_item(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin,
                int32_t first, int32_t end, Packing& packing, Split& split);
  int32_t span_of(const PrefixForest& forest, int32_t node, int32_t kv_begin, int32_t kv_end,
                  int32_t request, Packing& packing);
  // Tickets that shrink with what is left. Those of shared items are drawn among the private ones, as KvSplitter has
  // it.
  void assign_tickets(Split& split) const;

  int32_t num_workers_;
  CostModel cost_;
  TileSelection tiles_;
  std::vector<ItemCost> item_costs_;

  std::vector<Holder> holders_;
  std::vector<int64_t>
      own_tokens_;  // per holder: of those before it, what each does not share with the one before
  std::vector<int64_t> best_;        // per holder: cost of the cheapest cuts before it
  std::vector<int32_t> run_begin_;   // per holder: where the last run before it begins
  std::vector<int32_t> candidates_;  // holders at which that run may begin, best first
  std::vector<int32_t> run_ends_;
  struct Reach {
    int32_t last;  // holder up to which
    int32_t end;   // KV is shared so far
    int32_t node;  // that has its end
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
