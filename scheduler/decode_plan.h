// Stage 4: packs and items -> the plan of plan_format.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/split.h"
#include "packing.h"
#include "plan_format.h"

namespace pat {

// KV tokens of one KV head that one step reads, at planning time. Every later step adds the growth of seq_lens
// to each of the three.
struct KvTokens {
  int64_t query_centric = 0;  // every request reads its own KV: sum of seq_lens
  int64_t planned = 0;  // loads of all work items; a range is counted once per tile that reads it
  int64_t lower_bound = 0;  // every distinct token once
};

class DecodePlan {
 public:
  // num_workers: half of so many tickets as are drawn at first, and of all later ones, run through items that have both
  // shared KV and private tails from the tails up. Else all CTAs would read what is shared at the same time, out of the
  // L2, and then all of them tails: while they do the one, device memory is idle, and while they do the other, the
  // tensor cores. 0: a row's segments ascend in all items. So they do in plans with partials, too: there most tickets
  // begin with other places of what is shared anyway.
  //
  // Throws std::length_error if item requests, partials or shared slots do not fit into int32. The plan is then
  // incomplete.
  void assemble(int32_t num_requests, int32_t group_size, const Packing& packing,
                const Split& split, int32_t num_workers);

  // Writes the plan at the offsets of `capacity`, only the used part of each section. Returns false, with nothing
  // written, if the plan needs more than that, than so many partials or than a slot buffer of that length. Throws
  // std::length_error if `out` is shorter than the layout.
  bool write(const PlanCapacity& capacity, int64_t num_partials, int64_t num_shared_slots,
             std::span<int32_t> out) const;

  const PlanHeader& header() const { return header_; }
  const KvTokens& kv_tokens() const { return kv_tokens_; }

  // Set by the scheduler, which knows the forest.
  void set_kv_tokens(int64_t query_centric, int64_t lower_bound) {
    kv_tokens_.query_centric = query_centric;
    kv_tokens_.lower_bound = lower_bound;
  }

 private:
  struct Sections {
#define PAT_PLAN_ENTRIES(name, Entry, count, extra) std::vector<Entry> name;
    PAT_PLAN_SECTIONS(PAT_PLAN_ENTRIES)
#undef PAT_PLAN_ENTRIES
  };

  // Fills num_partials_, and counts the tokens that are read.
  void count_partials(int32_t num_requests, const Split& split);
  // Fills merges and item_requests, the latter in the order of the items. Returns the number of partials.
  int32_t assign_partials(const Split& split);
  // Fills work_items, kv_segments and tickets, in the order in which they are drawn.
  void list_work_items(const Packing& packing, const Split& split);
  void turn_items_around(int32_t num_workers);
  KvSegment kv_segment(const Packing& packing, const Segment& segment, int32_t first_request) const;

  PlanHeader header_{};
  KvTokens kv_tokens_;
  Sections sections_;

  std::vector<int32_t> num_partials_;  // per request
  std::vector<int32_t> next_partial_;  // per request
};

}  // namespace pat
