#include "kv_split/split.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace pat {

void Split::clear() {
  work_items.clear();
  requests.clear();
  segments.clear();
  tickets.clear();
  time = 0;
}

void Split::list_ticket_costs(std::vector<int64_t>& costs) const {
  costs.clear();
  for (const Ticket& ticket : tickets) {
    int64_t& cost = costs.emplace_back(0);
    for (int32_t p = ticket.item_begin; p < ticket.item_end; ++p) cost += work_items[p].cost;
  }
}

double imbalance(std::span<const int64_t> ticket_costs, int32_t num_workers) {
  // Ascending: the next ticket goes to the worker that is done first.
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> loads(
      {}, std::vector<int64_t>(num_workers, 0));
  int64_t total = 0;
  int64_t slowest = 0;
  for (const int64_t cost : ticket_costs) {
    const int64_t load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    total += cost;
    slowest = std::max(slowest, load);
  }
  if (total == 0) return 1;
  return static_cast<double>(slowest) * num_workers / static_cast<double>(total);
}

}  // namespace pat
