// Much work: tickets that shrink with what is left.
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
// foresee. Tickets of shared packs, whose KV mostly comes out of the L2, are drawn among those of private ones, which
// wait for device memory: each uses what the other leaves. KV that several tiles read, and that is too long for the L2,
// is assigned chunk by chunk, each chunk to all of these tiles: they read it together, and device memory once.
class GuidedSelfScheduling {
 public:
  // Each tile is a ticket. False, with no particular assignment, if workers would end too far apart.
  bool choose_whole_tiles(const SplitContext& context, const TileList& list);
  // False, with no particular assignment, if workers would end too far apart, or that takes more cuts than an even split
  // might: a few tiles of many requests with very long KV. So the partials of a batch have a bound.
  bool choose(const SplitContext& context, const Packing& packing, const TileList& list);

  // Choices made; the tickets of both are numbered together.
  const Assignment& shared_work() const { return shared_work_; }
  const Assignment& private_work() const { return private_work_; }
  int32_t num_tickets() const { return static_cast<int32_t>(ticket_costs_.size()); }

 private:
  Assignment shared_work_;
  Assignment private_work_;  // of the private packs
  std::vector<int64_t> ticket_costs_;
};

}  // namespace pat
