// Stage 4 of the scheduler turns packs and work items into the plan of plan_format.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/split.h"
#include "packing.h"
#include "plan_format.h"

namespace pat {

// KV tokens of one KV head that a step reads, at the lengths for which it is planned. When requests grow, each of the
// three numbers grows by the same number of tokens as all requests together.
struct KvTokens {
  int64_t query_centric = 0;  // sum of seq_lens, as if every request read its KV alone
  int64_t planned = 0;        // read by the work items; a range counts once per item
  int64_t lower_bound = 0;    // distinct tokens
};

class DecodePlan {
 public:
  // num_workers: CTAs per KV head, or 0. In half of the tickets, items with both shared KV and private tails read the
  // tails first. Otherwise all CTAs would read shared KV from the L2 at the same time, while device memory is idle, and
  // then tails, while the tensor cores are idle. If num_workers is 0 or the plan has partials, all items read in
  // ascending order: with partials, tickets mostly start at different places of the shared KV anyway.
  //
  // Throws std::length_error if int32 cannot count the item requests, partials or shared slots. The plan is then
  // incomplete.
  void assemble(int32_t num_requests, int32_t group_size, const Packing& packing,
                const Split& split, int32_t num_workers);

  // Writes the used part of each section to `out`, at the offsets for `capacity`. Returns false and writes nothing if
  // the plan needs a larger capacity, more partials or more shared slots than given. Throws std::length_error if `out`
  // is too short for `capacity`.
  bool write(const PlanCapacity& capacity, int64_t num_partials, int64_t num_shared_slots,
             std::span<int32_t> out) const;

  const PlanHeader& header() const { return header_; }
  const KvTokens& kv_tokens() const { return kv_tokens_; }
  std::span<const KvSegment> kv_segments() const { return sections_.kv_segments; }

  // PackScheduler sets these two counts, because it knows the forest.
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

  // Fills num_partials_, and counts the tokens that the work items read.
  void count_partials(int32_t num_requests, const Split& split);
  // Fills the sections merges and item_requests, the latter in the order of the work items. Returns the number of
  // partials.
  int32_t assign_partials(const Split& split);
  // Fills work_items, kv_segments and ticket_begin in the order in which CTAs draw them.
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
