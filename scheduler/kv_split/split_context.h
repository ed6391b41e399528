// What the functions of a split have in common: the costs of work items, and how short items may be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cost_model.h"
#include "tile_selection.h"

namespace pat {

// Cost of a work item, in 1 / kCostUnit tokens: a fixed cost, and the cost of each token of KV load.
struct ItemCost {
  int64_t fixed;
  int64_t token;
};

// The cost of an item, indexed by its number of requests: 0 to TileSelection::requests_per_tile().
inline std::vector<ItemCost> item_costs_of(const CostModel& cost, const TileSelection& tiles) {
  std::vector<ItemCost> costs{{.fixed = 0, .token = 0}};
  for (int32_t requests = 1; requests <= tiles.requests_per_tile(); ++requests) {
    const int64_t rows = int64_t{requests} * tiles.group_size();
    costs.push_back({.fixed = cost.split.item + cost.split.query_row * rows,
                     .token = cost.split.token_of(tiles.table()[tiles.select(requests)])});
  }
  return costs;
}

// What the assignment of tiles to tickets depends on. A load is the time that a CTA needs to load KV, in tokens. A cost
// is the time of a whole work item, in 1 / kCostUnit tokens.
struct SplitContext {
  // A CTA loads a segment in stages of this many tokens. Starting a segment takes as long as loading kSegment tokens.
  static constexpr int64_t kStageTokens = 32;
  static constexpr int64_t kSegment = 4;

  int32_t num_workers;
  int32_t tickets_each = 1;  // a stream-K split has at most this many tickets per worker
  TileSelection tiles;
  const CostModel* costs;
  const ItemCost* item_costs;
  // True if loads are in whole stages and include the starts of segments. False if there is much work, and either
  // nothing is shared or a shared range is long: whole stages and starts then make no difference.
  bool counts_stages;
  int64_t min_item_tokens;  // a cut must leave items of at least this length
  // The item after a cut between two requests either rereads their shared KV or leaves it to the item before the cut,
  // at the cost of partials. True: whichever costs less. False: it always rereads.
  bool may_merge = true;

  int64_t kv_load_of(int64_t num_tokens) const {
    if (!counts_stages || num_tokens <= 0) return num_tokens;
    return (num_tokens + kStageTokens - 1) / kStageTokens * kStageTokens + kSegment;
  }
  int64_t kv_load_of_segment() const { return counts_stages ? kSegment : 0; }
  int64_t cost(int32_t num_requests, int64_t load) const {
    const ItemCost& item = item_costs[num_requests];
    return item.fixed + std::max<int64_t>(load * item.token, costs->split.shortest);
  }
};

// Upper bound for the number of cuts of a split. At a cut, each request with KV on both sides gets one more partial.
// The number of these requests, summed over the cuts, is at most this bound plus Packing::packing_slack.
inline int64_t max_cut_requests(int32_t num_workers, const TileSelection& tiles) {
  return int64_t{num_workers} * tiles.requests_per_tile();
}

}  // namespace pat
