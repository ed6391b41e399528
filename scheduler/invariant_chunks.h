// Stages 2 and 3 of a batch-invariant plan: forest -> work items.
//
// The order of the sums in a request's result, and so each of its bits, depends on the request's length alone. Its KV
// is cut at the boundaries of the ChunkGrid and nowhere else, and each chunk is one partial. Within a chunk, steps
// begin at multiples of ChunkGrid::kStepTokens. Other requests in the work item change nothing, because a row ignores
// the steps of other rows.
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

  // Divides the requests of each chunk, in tree order, into runs that fit into a tile. It cuts as SubtreeTiler does,
  // but also keeps items from being much longer than others. Takes time linear in requests * chunks + segments, up to a
  // factor of the requests in a tile.
  //
  // The plan needs the spans of `packing`, and nothing else of it. Throws std::length_error if int32 cannot count the
  // slots of all spans.
  void plan(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& packing,
            Split& split);

 private:
  // A request that has KV in the chunk.
  struct Holder {
    int32_t request;
    int32_t node;  // the deepest node that it shares with the previous holder; -1: none
    int32_t end;   // of its KV in the chunk
    // The end of the KV that it shares with the previous holder, in whole steps. If they share none: the chunk's
    // beginning.
    int32_t shared_end;
  };
  struct Stream {
    int32_t next;  // the next work item
    int32_t end;
    TicketProgress progress;

    bool is_empty() const { return next == end; }
  };

  // Fills holders_ with all requests, in tree order.
  void list_requests(const PrefixForest& forest);
  // Keeps only the holders that reach the chunk. False if there are none.
  bool enter_chunk(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin);
  // Fills run_ends_. longest: the most tokens of an item with several requests.
  void choose_runs(int32_t begin, int64_t longest);
  // Adds a work item of the holders [first, end).
  void add_item(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin,
                int32_t first, int32_t end, Packing& packing, Split& split);
  int32_t span_of(const PrefixForest& forest, int32_t node, int32_t kv_begin, int32_t kv_end,
                  int32_t request, Packing& packing);
  // Makes tickets that shrink with the work that is left. Shared and private work are interleaved, as in
  // GuidedSelfScheduling.
  void assign_tickets(Split& split) const;

  int32_t num_workers_;
  CostModel cost_;
  TileSelection tiles_;
  std::vector<ItemCost> item_costs_;

  std::vector<Holder> holders_;
  std::vector<int64_t>
      own_tokens_;  // per holder: the tokens that the holders before it do not share with their predecessors
  std::vector<int64_t> best_;        // per holder: cost of the cheapest cuts before it
  std::vector<int32_t> run_begin_;   // per holder: where the run that ends there begins
  std::vector<int32_t> candidates_;  // holders where that run may begin, best first
  std::vector<int32_t> run_ends_;
  struct Reach {
    int32_t last;  // the last holder that shares the range
    int32_t end;   // of the range
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
