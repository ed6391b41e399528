// The split for steps with much work: tickets that shrink with the remaining work.
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

// Guided self-scheduling: the first tickets are large. The last are small, to even out differences that the cost model
// does not predict. Tickets of shared packs read mostly from the L2, and tickets of private packs from device memory,
// so both kinds alternate. A range that several tiles read and that is too long for the L2 is cut into chunks. All of
// these tiles get a chunk before any of them gets the next chunk. So they read a chunk at about the same time, and from
// device memory only once.
class GuidedSelfScheduling {
 public:
  // Makes each tile a ticket. Returns false, with an undefined assignment, if workers would then end too far apart.
  bool choose_whole_tiles(const SplitContext& context, const TileList& list);
  // Makes shrinking tickets. Returns false, with an undefined assignment, if workers would then end too far apart, or
  // if this takes more cuts than max_cut_requests() allows. That limit bounds the partials of a batch. A few tiles of
  // many requests with very long KV would exceed it.
  bool choose(const SplitContext& context, const Packing& packing, const TileList& list);

  // The assignments of the last choice. Ticket numbers are unique across both.
  const Assignment& shared_work() const { return shared_work_; }
  const Assignment& private_work() const { return private_work_; }
  int32_t num_tickets() const { return static_cast<int32_t>(ticket_costs_.size()); }

 private:
  Assignment shared_work_;
  Assignment private_work_;
  std::vector<int64_t> ticket_costs_;
};

}  // namespace pat
