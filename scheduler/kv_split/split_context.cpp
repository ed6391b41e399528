#include "kv_split/split_context.h"

namespace pat {

std::vector<ItemCost> item_costs_of(const CostModel& cost, const TileSelection& tiles) {
  std::vector<ItemCost> costs{{.fixed = 0, .token = 0}};
  for (int32_t requests = 1; requests <= tiles.requests_per_tile(); ++requests) {
    const int64_t rows = int64_t{requests} * tiles.group_size();
    costs.push_back({.fixed = cost.split.item + cost.split.query_row * rows,
                     .token = cost.split.token_of(tiles.table()[tiles.select(requests)])});
  }
  return costs;
}

}  // namespace pat
