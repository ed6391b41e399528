#include "kv_split/stream_k_split.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <numeric>

#include "kv_split/cut_finder.h"

namespace pat {

namespace {

// If there is little work, items may have a half or a quarter of the usual shortest length, so that more workers have
// work.
constexpr std::array<int64_t, 2> kShorterItems = {2, 4};
// Still shorter items are tried if perfect balance would save at least 1 / kUnevenPart of the time.
constexpr int64_t kUnevenPart = 12;
// Tiles that read the same range are cut at the same positions if that lengthens tickets by at most 1 / kAlignedPart.
constexpr int64_t kAlignedPart = 4;
// A finer split has up to this many tickets per worker, and must save at least 1 / kFinerGain of the expected time.
constexpr int32_t kMostTicketsEach = 8;
constexpr int64_t kFinerGain = 100;
// The search for a finer split ends if the slowest worker takes at most this many percent of the mean time. More cuts
// would make more partials and save little.
constexpr int64_t kEvenEnough = 108;
// Tickets are ordered by cost, rounded down to a multiple of 1 / kOrderPart of the largest cost. Ties keep their order.
constexpr int64_t kOrderPart = 8;

}  // namespace

StreamKSplit::AssignResult StreamKSplit::assign(const SplitContext& context, const Packing& packing,
                                                std::span<const Tile> tiles, int64_t budget,
                                                bool aligned, Assignment& assignment) {
  const CutFinder cut_finder(packing, context, aligned);
  assignment.clear();
  AssignResult result{.kv_load = 0, .uncut = 0, .largest = 0, .fits = false};
  const int64_t most_tickets = int64_t{context.tickets_each} * context.num_workers;
  int32_t ticket = 0;
  int64_t budget_left = budget;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    if (aligned && tile.is_read_again() && budget_left < budget && tile.uncut_cost > budget_left) {
      result.largest = std::max(result.largest, budget - budget_left);
      if (++ticket == most_tickets) return result;
      budget_left = budget;
    }
    if (tile.uncut_cost <= budget_left) {  // fast path of most tiles
      assignment.add(i, ticket);
      budget_left -= tile.uncut_cost;
      result.kv_load += tile.kv_load;
      continue;
    }
    TilePart part;
    part.begin = Position::begin_of(tile);
    for (;;) {
      const Position& at = part.begin;
      Cut& cut = part.cut;
      cut_finder.take_rest(tile, at, cut);
      bool fits = true;
      if (cut.cost > budget_left) {
        if (budget_left == budget) {
          cut_finder.force(tile, at, budget, cut);
        } else {
          fits = cut_finder.find(tile, at, budget_left, budget, cut);
        }
      }
      if (fits) {
        assignment.add(i, ticket, part);
        budget_left -= cut.cost;
        if (budget_left < 0) {
          result.uncut = cut.cost;
          return result;
        }
        result.kv_load += cut.next.assigned - at.assigned;
        if (cut.is_end) break;
        part.begin = cut.next;  // the next ticket continues here
      }
      result.largest = std::max(result.largest, budget - budget_left);
      if (++ticket == most_tickets) return result;
      budget_left = budget;
    }
  }
  result.largest = std::max(result.largest, budget - budget_left);
  result.fits = true;
  assignment.num_tickets = ticket + 1;
  return result;
}

bool StreamKSplit::choose(const SplitContext& context, const Packing& packing,
                          const TileList& list) {
  const std::vector<Tile>& tiles = list.tiles();
  const int64_t most_tickets = int64_t{context.tickets_each} * context.num_workers;
  const int64_t total = list.total_cost();
  int64_t kv_load = 0;
  int64_t low = (total + most_tickets - 1) / most_tickets;
  for (const Tile& tile : tiles) {
    kv_load += tile.kv_load;
    const bool is_cut = tile.num_tokens >= 2 * context.min_item_tokens;
    low = std::max(
        low, is_cut ? context.cost(tile.num_requests, context.min_item_tokens) : tile.uncut_cost);
  }
  bool aligned = false;
  // The precision of the search for the smallest budget. It is coarser for aligned tickets, which read from the L2 and
  // seldom keep others waiting.
  const auto step = [&](int64_t budget) {
    return std::max(kCostUnit * int64_t{kCutGranularity} / 4, budget / (aligned ? 32 : 64));
  };
  int64_t budget = low;
  AssignResult result = assign(context, packing, tiles, budget, false, assignment_);
  while (!result.fits) {
    low = budget;
    // If an item is too costly and cannot be cut, the next budget is at least the item's cost. Otherwise the budget
    // grows by at least a ticket's share of the load that was not assigned.
    const int64_t missing = (kv_load - result.kv_load) * (total / kv_load) / most_tickets;
    budget = std::max(low + step(low), result.uncut > 0 ? result.uncut : low + missing);
    result = assign(context, packing, tiles, budget, false, assignment_);
  }
  if (std::ranges::any_of(tiles, &Tile::is_read_again)) {
    const int64_t most = result.largest + result.largest / kAlignedPart;
    const AssignResult found = assign(context, packing, tiles, most, true, trial_);
    aligned = found.fits;
    if (aligned) {
      std::swap(assignment_, trial_);
      result = found;
    }
  }
  int64_t largest = result.largest;
  while (largest - low > step(low)) {
    budget = low + (largest - low) / 2;
    const AssignResult found = assign(context, packing, tiles, budget, aligned, trial_);
    if (found.fits) {
      std::swap(assignment_, trial_);
      largest = found.largest;
    } else {
      low = budget;
    }
  }
  return aligned;
}

void StreamKSplit::write(const SplitContext& context, const Packing& packing,
                         const TileList& list) {
  trial_split_.clear();
  trial_split_.tickets.assign(assignment_.num_tickets, {});
  add_work_items(packing, context, list.tiles(), assignment_, trial_split_);
}

SplitTimeModel::Expected StreamKSplit::try_context(const SplitContext& context,
                                                   const SplitTask& task, const Packing& packing,
                                                   const TileList& list, Split& out) {
  const bool is_aligned = choose(context, packing, list);
  write(context, packing, list);
  const SplitTimeModel::Expected expected = time_model_.expect(context, task, trial_split_);
  trial_split_.time = expected.time;
  if (trial_split_.time < out.time) {
    std::swap(out, trial_split_);
    is_aligned_ = is_aligned;
  }
  return expected;
}

bool StreamKSplit::split(const SplitContext& usual, const SplitTask& task, const Packing& packing,
                         const TileList& list, bool is_little, Split& out) {
  out.clear();
  out.time = std::numeric_limits<int64_t>::max();
  const auto time_of = [&](int64_t slowest, int64_t total) {
    return time_of_chains(task, usual.num_workers, slowest, total);
  };
  const bool may_read_again =
      static_cast<int32_t>(packing.requests.size()) <= task.num_requests && list.num_shared() > 0;
  int64_t longest = 0;
  for (const int64_t part : kShorterItems) {
    SplitContext context = usual;
    if (is_little) {
      const int64_t least = usual.min_item_tokens / part / kCutGranularity * kCutGranularity;
      context.min_item_tokens = std::max<int64_t>(least, kCutGranularity);
    }
    const SplitTimeModel::Expected expected = try_context(context, task, packing, list, out);
    if (expected.has_partials && may_read_again) {
      if (longest == 0) longest = time_model_.longest_request(context, packing, list.tiles());
      if (time_of(longest, expected.total) < out.time) {
        context.may_merge = false;
        try_context(context, task, packing, list, out);
      }
    }
    // Stops if the chains are nearly even, because shorter items would not help.
    const int64_t even = time_of(expected.total / usual.num_workers, expected.total);
    const int64_t uneven = time_of(expected.slowest, expected.total) - even;
    if (!is_little || uneven < expected.time / kUnevenPart) break;
  }
  if (is_little) order_tickets(out);
  return is_aligned_;
}

void StreamKSplit::split_finer(const SplitContext& usual, const SplitTask& task,
                               const Packing& packing, const TileList& list, Split& out) {
  int64_t longest = 0;  // cost of a tile whose range other tiles read as well
  for (const Tile& tile : list.tiles()) {
    if (tile.is_read_again()) longest = std::max(longest, tile.uncut_cost);
  }
  if (longest == 0) return;
  out.list_ticket_costs(ticket_costs_);
  const int64_t slowest = slowest_worker(ticket_costs_, usual.num_workers);
  const int64_t share = list.total_cost() / usual.num_workers;
  const int64_t most_cuts = max_cut_requests(usual.num_workers, usual.tiles);
  int64_t time_to_beat = time_model_.expect(usual, task, out).time;
  time_to_beat -= time_to_beat / kFinerGain;
  int64_t last_time = std::numeric_limits<int64_t>::max();
  int64_t tried = 0;  // pieces of the longest tile
  SplitContext context = usual;
  for (context.tickets_each = 2; context.tickets_each <= kMostTicketsEach; ++context.tickets_each) {
    const int64_t pieces = context.tickets_each * longest / share;
    // The slowest worker ends no earlier with as many pieces as before, nor with pieces that fill its tickets badly.
    if (pieces <= tried || context.tickets_each * (longest / pieces) >= slowest) continue;
    tried = pieces;
    if (!choose(context, packing, list)) break;
    write(context, packing, list);
    const auto cuts = static_cast<int64_t>(trial_split_.work_items.size() - list.tiles().size());
    const auto partials =
        static_cast<int64_t>(trial_split_.requests.size() - packing.requests.size());
    if (cuts > most_cuts || partials > most_cuts + packing.packing_slack) break;
    std::ranges::stable_sort(trial_split_.tickets, {}, [&](const Ticket& ticket) {
      const Split::WorkItem& first = trial_split_.work_items[ticket.item_begin];
      return trial_split_.segments[first.segment_begin].kv_begin;
    });
    const SplitTimeModel::Expected expected = time_model_.expect(usual, task, trial_split_);
    if (expected.time < time_to_beat) {
      time_to_beat = expected.time;
      std::swap(out, trial_split_);
    }
    const bool is_even = 100 * expected.slowest * usual.num_workers <= kEvenEnough * expected.total;
    if (is_even || expected.time >= last_time) break;
    last_time = expected.time;
  }
}

void StreamKSplit::order_tickets(Split& split) {
  split.list_ticket_costs(ticket_costs_);
  const int64_t largest = std::ranges::max(ticket_costs_);
  order_.resize(ticket_costs_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::stable_sort(order_, std::greater<>{}, [&](int32_t ticket) {
    return kOrderPart * ticket_costs_[ticket] / largest;
  });
  ordered_.clear();
  for (const int32_t ticket : order_) ordered_.push_back(split.tickets[ticket]);
  std::swap(split.tickets, ordered_);
}

}  // namespace pat
