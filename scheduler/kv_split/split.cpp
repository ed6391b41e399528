#include "kv_split/split.h"

#include <algorithm>
#include <functional>
#include <limits>
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

int64_t Split::balanced_growth(int32_t num_workers) const {
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  if (static_cast<int64_t>(tickets.size()) > num_workers) return kUnlimited;
  struct Load {
    int64_t tokens = 0;
    int64_t num_open = 0;  // segments that grow; padding has none
  };
  std::vector<Load> loads;
  Load total;
  int64_t longest = 0;
  for (const Ticket& ticket : tickets) {
    Load& load = loads.emplace_back();
    for (int32_t p = ticket.item_begin; p < ticket.item_end; ++p) {
      const WorkItem& item = work_items[p];
      load.tokens += item.num_tokens;
      for (const Segment& segment :
           std::span(segments).subspan(item.segment_begin, item.num_segments)) {
        load.num_open += segment.is_open && segment.num_tokens() > 0;
      }
    }
    total.tokens += load.tokens;
    total.num_open += load.num_open;
    longest = std::max(longest, load.tokens);
  }
  const int64_t slack = longest / 16;
  int64_t growth = kUnlimited;
  for (const Load& load : loads) {
    if (load.num_open == 0) continue;
    int64_t most = (longest + slack - load.tokens) / load.num_open;
    // How many tokens the ticket is below the workers' mean plus `slack`, multiplied by num_workers.
    const int64_t room = total.tokens + (slack - load.tokens) * num_workers;
    const int64_t faster = load.num_open * num_workers - total.num_open;
    if (room >= 0) most = std::max(most, faster > 0 ? room / faster : kUnlimited);
    growth = std::min(growth, most);
  }
  return growth;
}

int64_t slowest_worker(std::span<const int64_t> ticket_costs, int32_t num_workers) {
  if (static_cast<int64_t>(ticket_costs.size()) <= num_workers) {
    return ticket_costs.empty() ? 0 : std::ranges::max(ticket_costs);
  }
  // The smallest load is on top, because the worker that finishes first draws the next ticket.
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> loads(
      {}, std::vector<int64_t>(num_workers, 0));
  int64_t slowest = 0;
  for (const int64_t cost : ticket_costs) {
    const int64_t load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    slowest = std::max(slowest, load);
  }
  return slowest;
}

bool is_balanced(std::span<const int64_t> ticket_costs, int32_t num_workers, double worst) {
  int64_t total = 0;
  int64_t largest = 0;
  int64_t most = 0;  // upper bound of the slowest worker's cost, multiplied by num_workers
  for (const int64_t cost : ticket_costs) {
    // The worker that draws the ticket has at most the mean cost so far, because it is the first that is idle.
    most = std::max(most, total + cost * num_workers);
    largest = std::max(largest, cost);
    total += cost;
  }
  if (total == 0) return true;
  const auto allows = [&](int64_t slowest) {
    return static_cast<double>(slowest) * num_workers / static_cast<double>(total) <= worst;
  };
  if (allows(most / num_workers)) return true;
  return allows(largest) && allows(slowest_worker(ticket_costs, num_workers));
}

}  // namespace pat
