// The result of the KV split: work items, and the tickets in which CTAs draw them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "packing.h"

namespace pat {

// A cut within a segment lies at a multiple of this from the segment's beginning, in tokens.
inline constexpr int32_t kCutGranularity = 64;
// A cut adds at most this many segments.
inline constexpr int32_t kMaxSegmentsPerCut = 8;

// A run of work items that one CTA executes in a row.
struct Ticket {
  int32_t item_begin = 0;
  int32_t item_end = 0;
  // The first item is the remainder of a tile that the previous ticket has cut. The CTA executes it last. So all
  // tickets start at tile beginnings and read the KV that tiles share at the same time.
  bool rest_comes_last = false;
};

struct Split {
  // A CTA's unit of work: some requests of a pack, and KV ranges for intervals of these requests. Each of its requests
  // has at least one range. Plans store it as the WorkItem of plan_format.h.
  struct WorkItem {
    int32_t tile;           // index into the tile table
    int32_t request_begin;  // into Split::requests
    int32_t num_requests;
    int32_t
        segment_begin;  // into Split::segments, whose intervals count from the item's first request
    int32_t num_segments;
    int64_t num_tokens;
    int64_t cost;
  };

  // In the order of the packs, so a request's items ascend in position.
  std::vector<WorkItem> work_items;
  std::vector<int32_t> requests;
  std::vector<Segment> segments;
  // In the order in which CTAs draw them. Each item is in one ticket.
  std::vector<Ticket> tickets;
  // Expected time in hundredths of tokens, to compare splits of one batch. 0 if there is much work, or if no split was
  // made.
  int64_t time = 0;

  void clear();
  void list_ticket_costs(std::vector<int64_t>& costs) const;
  // By how many tokens each request may grow before the split is out of balance. It is out of balance once a ticket
  // exceeds both the workers' mean and the longest ticket of planning time by more than a sixteenth of the latter.
  // Returns the largest integer if not all tickets are drawn at once, because tickets that are drawn later even out
  // such differences.
  int64_t balanced_growth(int32_t num_workers) const;
};

// What a splitter needs to know about a batch besides its packs.
struct SplitTask {
  int32_t num_requests;
  int64_t num_unique;  // KV tokens, each counted once
  // Expected time of another split of the batch. If no split can take less, the result has no tickets.
  int64_t time_to_beat = std::numeric_limits<int64_t>::max();
  // KvSplitter sets the next two fields.
  int64_t num_read = 0;         // KV tokens, counted once per tile that reads them
  bool shares_nothing = false;  // no tile has KV of several requests
};

// Cost of the slowest worker over the mean of all workers, if each draws a ticket whenever it is idle. 1 without work.
double imbalance(std::span<const int64_t> ticket_costs, int32_t num_workers);

}  // namespace pat
