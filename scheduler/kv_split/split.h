// The result of the KV split: work items, and the tickets by which CTAs draw them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "packing.h"

namespace pat {

// A cut within a segment is a multiple of this number of tokens away from the segment's beginning.
inline constexpr int32_t kCutGranularity = 64;
// A cut increases the number of segments of all work items together by at most this many.
inline constexpr int32_t kMaxSegmentsPerCut = 8;

// Consecutive work items that one CTA executes.
struct Ticket {
  int32_t item_begin = 0;
  int32_t item_end = 0;
  // True if the first item is the remainder of a tile that the previous ticket has cut. The CTA executes this item
  // last. So all tickets start at the beginning of a tile, and read the KV that tiles share at about the same time.
  bool rest_comes_last = false;
};

struct Split {
  // Some requests of a pack, and KV ranges for intervals of these requests. Each of the requests has at least one
  // range. In a plan, it becomes a pat::WorkItem.
  struct WorkItem {
    int32_t tile;           // index into the tile table
    int32_t request_begin;  // index in Split::requests
    int32_t num_requests;
    // Index in Split::segments. `first` and `end` of the item's segments count from the item's first request.
    int32_t segment_begin;
    int32_t num_segments;
    int64_t num_tokens;
    int64_t cost;
  };

  // In the order of the packs, so that a request's items ascend in position.
  std::vector<WorkItem> work_items;
  std::vector<int32_t> requests;
  std::vector<Segment> segments;
  // In the order in which CTAs draw tickets. Each item is in one ticket.
  std::vector<Ticket> tickets;
  // Expected time, to compare splits of the same batch. The unit is a hundredth of a token's time. 0 if there is much
  // work, or if no split was made.
  int64_t time = 0;

  void clear();
  void list_ticket_costs(std::vector<int64_t>& costs) const;
  // By how many tokens each request may grow before the split is out of balance. It is out of balance if a ticket is
  // longer than the workers' mean, and longer than the originally longest ticket, in both cases by more than 1/16 of
  // the originally longest ticket. Returns INT64_MAX if there are more tickets than workers, because tickets that are
  // drawn later even out such differences.
  int64_t balanced_growth(int32_t num_workers) const;
};

// What a splitter must know about a batch, in addition to its packs.
struct SplitTask {
  int32_t num_requests;
  int64_t num_distinct;  // KV tokens, each counted once
  // Expected time of another split of the batch. If no new split can take less time, the result has no tickets.
  int64_t time_to_beat = std::numeric_limits<int64_t>::max();
  // KvSplitter sets the next two fields itself.
  int64_t num_read = 0;         // KV tokens, counted once per tile that reads them
  bool shares_nothing = false;  // no tile has KV that several requests share
};

// Cost of the slowest worker, if each draws the next ticket whenever it is idle.
int64_t slowest_worker(std::span<const int64_t> ticket_costs, int32_t num_workers);
// True if that is at most `worst` times the mean of all workers, or if there is no work.
bool is_balanced(std::span<const int64_t> ticket_costs, int32_t num_workers, double worst);

}  // namespace pat
