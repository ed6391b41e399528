// The split of much work: tickets that shrink with the work that is left.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_split/cut_finder.h"
#include "kv_split/split_context.h"
#include "kv_split/split_writer.h"
#include "kv_split/ticket_rule.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// Guided self-scheduling: the first tickets are large, and the last are small enough to even out what costs cannot
// foresee. Tickets of shared packs read mostly from the L2, and tickets of private packs from device memory, so tickets
// of both kinds are drawn alternately. A range that several tiles read and that is too long for the L2 is assigned
// chunk by chunk to all of these tiles. They read each chunk together, and from device memory once.
class GuidedSelfScheduling {
 public:
  // Makes each tile a ticket. False if workers would then end too far apart; the assignment is then undefined.
  bool choose_whole_tiles(const SplitContext& context, const TileList& list);
  // False if workers would end too far apart, or if this takes more cuts than a stream-K split may have; the assignment
  // is then undefined. The limit on cuts bounds the partials of a batch. A few tiles of many requests with very long KV
  // exceed it.
  bool choose(const SplitContext& context, const Packing& packing, const TileList& list);

  // The assignments of the last choice. Their tickets share one numbering.
  const Assignment& shared_work() const { return shared_work_; }
  const Assignment& private_work() const { return private_work_; }
  int32_t num_tickets() const { return static_cast<int32_t>(ticket_costs_.size()); }

 private:
  Assignment shared_work_;
  Assignment private_work_;
  std::vector<int64_t> ticket_costs_;
};

}  // namespace pat
