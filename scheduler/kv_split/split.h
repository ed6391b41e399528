// Result of splitting packs: work items, and the tickets in which CTAs draw them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "packing.h"

namespace pat {

// Cuts within a segment lie at multiples of this from its beginning.
inline constexpr int32_t kCutGranularity = 64;
// Most segments that a cut adds.
inline constexpr int32_t kMaxSegmentsPerCut = 8;

// A run of items that one CTA executes in a row.
struct Ticket {
  int32_t item_begin = 0;
  int32_t item_end = 0;
  // The first item is what another ticket has left of a tile. It is executed last: so tickets begin with the
  // beginnings of tiles, and read what these share at the same time.
  bool rest_comes_last = false;
};

struct Split {
  // A CTA's unit of work: some requests of a pack, and KV ranges for intervals of them. It has the requests that its
  // ranges are for, and no others. In a plan it is the WorkItem of plan_format.h.
  struct WorkItem {
    int32_t tile;           // index into the tile table
    int32_t request_begin;  // into Split::requests
    int32_t num_requests;
    int32_t segment_begin;  // into Split::segments; their intervals are of the item's requests
    int32_t num_segments;
    int64_t num_tokens;
    int64_t cost;
  };

  // In the order of the packs: a request's items ascend in position.
  std::vector<WorkItem> work_items;
  std::vector<int32_t> requests;
  std::vector<Segment> segments;
  // In the order in which they are drawn; each item is in one of them.
  std::vector<Ticket> tickets;
  // Expected time, to be compared with other splits of the same batch. 0 of much work, and of what
  // was not split.
  int64_t time = 0;

  void clear();
  void list_ticket_costs(std::vector<int64_t>& costs) const;
};

// Facts about a batch that a splitter needs beside its packs.
struct SplitTask {
  int32_t num_requests;
  int64_t num_unique;  // KV tokens, each counted once
  // Time of another split of the batch. A split that cannot take less is not made: no tickets.
  int64_t time_to_beat = std::numeric_limits<int64_t>::max();
  // Set by KvSplitter: KV tokens as often as tiles read them, and whether no tile has KV of several requests.
  int64_t num_read = 0;
  bool shares_nothing = false;
};

// Cost of the slowest worker over the mean of all, if each draws its next ticket when it is done. 1 without work.
double imbalance(std::span<const int64_t> ticket_costs, int32_t num_workers);

}  // namespace pat
