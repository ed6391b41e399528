// Context of a split: the costs of work items, and how short items may be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cost_model.h"
#include "tile_selection.h"

namespace pat {

// Cost of a work item, in 1 / kCostUnit tokens.
struct ItemCost {
  int64_t fixed;
  int64_t token;
};

// By the number of requests, 0 to those of a tile.
std::vector<ItemCost> item_costs_of(const CostModel& cost, const TileSelection& tiles);

// Constant while tiles are assigned; who tries another one makes a copy.
//
// A load is what a CTA takes for KV, in tokens; a cost is that of a work item, in 1 / kCostUnit tokens.
struct SplitContext {
  // A CTA takes whole stages of a segment's KV, and as long as for so many more tokens to begin with it.
  static constexpr int64_t kStageTokens = 32;
  static constexpr int64_t kSegment = 4;

  int32_t num_workers;
  TileSelection tiles;
  const CostModel* costs;
  const ItemCost* item_costs;
  // True if loads are whole stages and segments. Where there is much to do, and nothing is shared or a long range, that
  // makes no difference.
  bool counts_stages;
  int64_t min_item_tokens;  // tokens; no cut makes a shorter one
  bool may_merge = true;    // false: cuts between requests read again whatever that costs

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

// Most requests that all cuts of a split concern, counted once per cut: each adds a partial. It bounds the cuts
// too. Where requests are in less packs than Packing::packing_slack allows for, their cuts may be more.
inline int64_t max_cut_requests(int32_t num_workers, const TileSelection& tiles) {
  return int64_t{num_workers} * tiles.requests_per_tile();
}

}  // namespace pat
