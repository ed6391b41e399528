#include "kv_split/cut_finder.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kv_split/split.h"

namespace pat {

namespace {

// Price of the partials that a cut makes, relative to PackingCosts::partial_row. It is above 1, because no other work
// overlaps with the merge.
constexpr double kPriceOfMerging = 1.5;
// A cut between two segments may leave up to 1 / kEmptyPart of the ticket empty.
constexpr int64_t kEmptyPart = 8;
// To avoid partials, the item after a cut may reread KV: at most 1 / kRereadPart of a ticket, or kLittleReread tokens if
// that is more.
constexpr int64_t kRereadPart = 3;
constexpr int64_t kLittleReread = 160;

}  // namespace

void CutFinder::cut_at(const Tile& tile, const Position& at, int32_t segment, int32_t offset,
                       int64_t taken, int64_t most_reread, Cut& cut) const {
  const std::vector<Segment>& segments = packing_.segments;
  const int32_t first = std::max(segments[segment].first, at.first);
  const int32_t both_requests = tile.num_requests - first;
  cut.next.segment = cut.next.base = segment;
  cut.next.offset = cut.next.base_offset = offset;
  cut.next.first = first;
  cut.next.assigned = at.assigned + taken - at.reread_load;
  cut.next.reread_load = 0;
  cut.last = tile.num_requests;
  cut.both_requests = both_requests;
  cut.is_end = false;
  if (offset == 0 && segments[segment - 1].first < first && first > at.first) {
    // The cut is between two requests. The next item may reread the KV that requests on both sides share.
    int64_t reread_load = 0;
    int32_t num_segments = 0;
    for (int32_t s = at.base; s < segment && num_segments <= kMaxSegmentsPerCut; ++s) {
      if (segments[s].end <= first) continue;
      reread_load +=
          context_.kv_load_of(segments[s].num_tokens() - (s == at.base ? at.base_offset : 0));
      ++num_segments;
    }
    const int64_t partials = int64_t{2} * both_requests * context_.tiles.group_size();
    const PackingCosts& costs = context_.costs->packing;
    if (num_segments <= kMaxSegmentsPerCut && reread_load <= most_reread &&
        (!context_.may_merge ||
         static_cast<double>(reread_load * costs.reread_token) <=
             kPriceOfMerging * static_cast<double>(partials * costs.partial_row))) {
      cut.next.base = at.base;
      cut.next.base_offset = at.base_offset;
      cut.next.reread_load = reread_load;
      cut.last = first;
    }
  }
  cut.cost =
      context_.cost(cut.last - at.first, taken + (offset > 0 ? context_.kv_load_of_segment() : 0));
}

bool CutFinder::find(const Tile& tile, const Position& at, int64_t budget_left, int64_t budget,
                     bool is_forced, Cut& cut) const {
  const int64_t most_reread = context_.may_merge
                                  ? std::max(budget / kCostUnit / kRereadPart, kLittleReread)
                                  : std::numeric_limits<int64_t>::max();
  const int64_t shortest = context_.min_item_tokens;
  const bool is_in_range = at.segment == tile.segment_begin && tile.is_read_again();
  const int32_t num_requests =
      aligned_ && is_in_range ? tile.widest_reader : tile.num_requests - at.first;
  const ItemCost& item = context_.item_costs[num_requests];
  const int64_t for_tokens = budget_left - item.fixed;
  const int64_t fit = for_tokens < 0 ? -1 : for_tokens / item.token;
  const int64_t left = tile.kv_load - at.assigned + at.reread_load;
  int64_t taken = at.reread_load;
  int32_t border = -1;  // last segment before which a cut fits the budget; -1: none
  int64_t border_taken = 0;
  for (int32_t s = at.segment; s < tile.segment_end; ++s) {
    const int32_t begin = s == at.segment ? at.offset : 0;
    const int64_t length = packing_.segments[s].num_tokens() - begin;
    const int64_t load = context_.kv_load_of(length);
    if (taken - at.reread_load >= shortest && left - taken >= shortest) {
      if (taken <= fit) {
        border = s;
        border_taken = taken;
      } else {  // reached only if is_forced and no cut fits
        cut_at(tile, at, s, 0, taken, most_reread, cut);
        return true;
      }
    }
    if (taken + load > fit) {
      if (border >= 0 &&
          fit - border_taken <= std::max<int64_t>(kCutGranularity, fit / kEmptyPart)) {
        cut_at(tile, at, border, 0, border_taken, most_reread, cut);
        return true;
      }
      const int64_t most = (length - shortest) / kCutGranularity * kCutGranularity;
      int64_t inside = std::min(std::max<int64_t>(fit - taken - context_.kv_load_of_segment(), 0) /
                                    kCutGranularity * kCutGranularity,
                                most);
      if (inside < shortest && is_forced && border < 0 && most >= shortest) inside = shortest;
      if (inside >= shortest) {
        cut_at(tile, at, s, begin + static_cast<int32_t>(inside), taken + inside, most_reread, cut);
        return true;
      }
      if (border >= 0) {
        cut_at(tile, at, border, 0, border_taken, most_reread, cut);
        return true;
      }
      if (!is_forced) return false;
    }
    taken += load;
  }
  take_rest(tile, at, cut);
  return true;
}

}  // namespace pat
