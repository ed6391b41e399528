#include "kv_split/guided_self_scheduling.h"

#include <algorithm>
#include <span>

#include "kv_split/split.h"

namespace pat {

namespace {

// A cut must leave items that cost at least this many times as much as the cut's partials.
constexpr int64_t kItemPerCut = 32;
// Tiles stay uncut if the slowest worker then costs at most this many times the mean. Cuts would balance the workers,
// but would make partials.
constexpr double kWorstUncutImbalance = 1.05;
constexpr int64_t kMostUncutTiles = 8;  // per worker; more tiles are balanced without cuts
// CTAs with equal work finish up to 12% apart, and shrinking tickets even that out. If the tickets' costs are out of
// balance by more than 12%, StreamKSplit is better.
constexpr double kWorstGuidedImbalance = 1.12;
// A chunk has at most this many tokens, so that it is still in the L2 when the last tile starts to read it.
constexpr int64_t kLongestChunk = 4096;

// Assigns tiles [begin, end) of the tile list to tickets.
class Stream {
 public:
  Stream(const SplitContext& context, const Packing& packing, const TileList& list, size_t begin,
         size_t end, Assignment& assignment)
      : progress{.total = list.total_cost(begin, end), .done = 0},
        context_(context),
        packing_(packing),
        tiles_(list.tiles()),
        cut_finder_(packing, context),
        assignment_(assignment),
        tile_(begin),
        end_(end) {
    assignment_.clear();
    begin_tile();
  }

  bool is_empty() const { return tile_ == end_; }
  bool chunk_is_next() const { return tiles_[tile_].is_chunked; }
  // Assigns the next tiles, or parts of them, to a ticket, and returns the ticket's cost. The next tile is not chunked.
  int64_t assign_ticket(int64_t budget, int32_t ticket);
  // Assigns the next chunk to a ticket. cuts_left: how many more cuts between chunks are allowed.
  int64_t assign_chunk(int64_t budget, int64_t cuts_left, int32_t ticket);

  TicketProgress progress;
  int64_t cuts = 0;
  int64_t cut_requests = 0;  // number of requests with KV on both sides of a cut, summed over cuts

 private:
  void begin_tile() {
    if (!is_empty()) part_.begin = Position::begin_of(tiles_[tile_]);
  }
  // The fewest tokens that a cut should leave on each side.
  int64_t shortest_item(int32_t num_requests) const {
    const int64_t rows = int64_t{num_requests} * context_.tiles.group_size();
    const int64_t partials = rows * context_.costs->packing.partial_row / kCostUnit;
    return std::max<int64_t>(context_.min_item_tokens, kItemPerCut * partials);
  }
  void count(const Cut& cut) {
    progress.done += cut.cost;
    cuts += !cut.is_end;
    cut_requests += cut.both_requests;
  }

  const SplitContext& context_;
  const Packing& packing_;
  const std::vector<Tile>& tiles_;
  CutFinder cut_finder_;
  Assignment& assignment_;
  size_t tile_;
  size_t end_;
  TilePart part_;  // next part of tile_; its cut is not known yet
  // Tiles [readers_begin_, readers_end_) read the current chunk: positions [chunk_begin_, chunk_end_) of their first
  // segment. chunk_end_ is 0 if there is no current chunk.
  size_t readers_begin_ = 0;
  size_t readers_end_ = 0;
  int32_t chunk_begin_ = 0;
  int32_t chunk_end_ = 0;
};

int64_t Stream::assign_chunk(int64_t budget, int64_t cuts_left, int32_t ticket) {
  const Tile& tile = tiles_[tile_];
  const auto length = static_cast<int32_t>(tile.num_tokens);
  if (chunk_end_ == 0) {
    readers_begin_ = readers_end_ = tile_;
    while (readers_end_ < end_ && TileList::is_same_range(packing_, tile, tiles_[readers_end_])) {
      ++readers_end_;
    }
  }
  if (tile_ == readers_begin_) {
    chunk_begin_ = chunk_end_;
    const int64_t left = length - chunk_begin_;
    const auto readers = static_cast<int64_t>(readers_end_ - readers_begin_);
    const ItemCost& item = context_.item_costs[tile.num_requests];
    int64_t chunk = std::min((budget - item.fixed) / item.token, kLongestChunk);
    chunk = std::max({chunk, shortest_item(tile.num_requests), left / (cuts_left / readers + 1)});
    const int64_t chunks =
        std::max<int64_t>(left / chunk, 1);  // equally long, unless the budget shrinks
    chunk = chunks == 1 ? left : left / chunks / kCutGranularity * kCutGranularity;
    chunk_end_ = chunk_begin_ + static_cast<int32_t>(chunk);
  }
  TilePart part;
  part.begin = Position::begin_of(tile);
  part.begin.offset = part.begin.base_offset = chunk_begin_;
  part.begin.assigned = chunk_begin_;
  if (chunk_end_ == length) {
    cut_finder_.take_rest(tile, part.begin, part.cut);
  } else {
    cut_finder_.cut_range(tile, part.begin, chunk_end_, part.cut);
  }
  assignment_.add(tile_, ticket, part);
  count(part.cut);
  if (++tile_ == readers_end_) {
    if (part.cut.is_end) {
      chunk_end_ = 0;
      begin_tile();
    } else {
      tile_ = readers_begin_;
    }
  }
  return part.cut.cost;
}

int64_t Stream::assign_ticket(int64_t budget, int32_t ticket) {
  int64_t budget_left = budget;
  while (!is_empty()) {
    const Tile& tile = tiles_[tile_];
    if (tile.is_chunked) break;  // choose() begins the next ticket with it
    const Position& at = part_.begin;
    Cut& cut = part_.cut;
    cut_finder_.take_rest(tile, at, cut);
    if (cut.cost > budget_left) {
      if (budget_left < budget) break;       // the next ticket still has all of its budget
      if (cut.cost > budget + budget / 2) {  // a smaller excess is not worth a cut
        const int32_t num_requests = tile.num_requests - at.first;
        const int64_t shortest = shortest_item(num_requests);
        cut_finder_.force(tile, at, std::max(budget, context_.cost(num_requests, shortest)), cut);
      }
    }
    // A tile that was not cut is added as a whole. A tile with `is_rest` may have requests without KV. It is added as a
    // part, because parts leave such requests out.
    if (cut.is_end && at.assigned == 0 && !tile.is_rest) {
      assignment_.add(tile_, ticket);
    } else {
      assignment_.add(tile_, ticket, part_);
    }
    budget_left -= cut.cost;
    count(cut);
    if (!cut.is_end) {
      part_.begin = cut.next;
      break;
    }
    ++tile_;
    begin_tile();
  }
  return budget - budget_left;
}

}  // namespace

bool GuidedSelfScheduling::choose_whole_tiles(const SplitContext& context, const TileList& list) {
  const std::vector<Tile>& tiles = list.tiles();
  const auto most = static_cast<size_t>(kMostUncutTiles * context.num_workers);
  if (list.num_shared() < tiles.size() || tiles.size() > most) return false;
  shared_work_.clear();
  private_work_.clear();
  ticket_costs_.clear();
  for (size_t i = 0; i < tiles.size(); ++i) {
    shared_work_.add(i, static_cast<int32_t>(i));
    ticket_costs_.push_back(tiles[i].uncut_cost);
  }
  return is_balanced(ticket_costs_, context.num_workers, kWorstUncutImbalance);
}

bool GuidedSelfScheduling::choose(const SplitContext& context, const Packing& packing,
                                  const TileList& list) {
  ticket_costs_.clear();
  const int64_t total = list.total_cost();
  Stream shared_work(context, packing, list, 0, list.num_shared(), shared_work_);
  Stream private_work(context, packing, list, list.num_shared(), list.tiles().size(),
                      private_work_);
  // Counts the cuts that TileList has made between long ranges and the rest of their tiles.
  private_work.cuts = list.num_parted();
  private_work.cut_requests = list.parted_requests();
  const int64_t most_cuts = max_cut_requests(context.num_workers, context.tiles);
  const int64_t most_cut_requests = most_cuts + packing.packing_slack;
  while (!shared_work.is_empty() || !private_work.is_empty()) {
    const int64_t left =
        std::max<int64_t>(total - shared_work.progress.done - private_work.progress.done, 0);
    const bool is_shared =
        private_work.is_empty() ||
        (!shared_work.is_empty() && shared_is_next(shared_work.progress, private_work.progress));
    Stream& from = is_shared ? shared_work : private_work;
    const int64_t budget = ticket_budget(left, context.num_workers, list.num_shared() == 0);
    if (from.chunk_is_next()) {
      // Chunks may use three quarters of the cuts that are left.
      const int64_t cuts_left =
          std::max<int64_t>(
              std::min(most_cuts - shared_work.cuts - private_work.cuts,
                       (most_cut_requests - shared_work.cut_requests - private_work.cut_requests) /
                           context.tiles.requests_per_tile()),
              0) *
          3 / 4;
      ticket_costs_.push_back(from.assign_chunk(budget, cuts_left, num_tickets()));
    } else {
      ticket_costs_.push_back(from.assign_ticket(budget, num_tickets()));
    }
    if (shared_work.cuts + private_work.cuts > most_cuts ||
        shared_work.cut_requests + private_work.cut_requests > most_cut_requests) {
      return false;
    }
  }
  return is_balanced(ticket_costs_, context.num_workers, kWorstGuidedImbalance);
}

}  // namespace pat
