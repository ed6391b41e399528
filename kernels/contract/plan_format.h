// CONTRACT between scheduler/ (writes), kernels/ and reference.py (read): the decode plan.
//
// A plan is one flat int32 buffer. Its sections lie at offsets that depend only on the capacities (PlanLayout), so a
// CUDA graph that captured the addresses stays valid when a new plan is written into the same buffer. A plan does not
// depend on the number of KV heads: every KV head executes the same work items. A ticket is a run of work items. CTAs
// draw tickets: draw d is ticket d / num_kv_heads for KV head d % num_kv_heads. So a ticket's KV heads are drawn one
// after the other, and CTAs read all heads of a token range at about the same time. The result does not depend on which
// CTA draws which ticket.
//
//   header         PlanHeader
//   ticket_begin   TicketBegin[num_tickets + 1]   ticket t has the items from ticket_begin[t] up to ticket_begin[t + 1]
//   work_items     WorkItem[num_work_items]
//   kv_segments    KvSegment[num_kv_segments]       the KV of each work item, in the order of the items
//   item_requests  ItemRequest[num_item_requests]   the requests of each work item
//   gather_spans   GatherSpan[num_gather_spans]     how the slot buffer of shared KV is filled
//   merges         MergeEntry[num_merges]           requests whose output is made of partials
//
// Terms. request: index into the batch of this step. position: index of a KV token in its request. slot: index into the
// KV pool. query row: a pair of a request and a query head of the KV head's group; row r of a work item belongs to the
// item's request r / group_size and the group's head r % group_size. segment: a KV range that a contiguous interval of
// a work item's requests attends to. A work item is a tile of query rows and the segments that the tile reads in order,
// with one online softmax per row. So one item can read several levels of a prefix tree and then the private tails,
// without partials between them. partial: a query head's result over the KV of one work item: the normalised output,
// rounded to 16 bits, and the natural-log LSE in fp32.
#pragma once

#include <cstdint>

namespace pat {

inline constexpr int32_t kPlanMagic = 0x54415000;  // "\0PAT"
inline constexpr int32_t kPlanVersion = 5;

// KvSegment::kv_end of a segment that ends where its request ends. The kernel reads that end from seq_lens, so a
// private tail grows without a new plan.
inline constexpr int32_t kOpenEnd = -1;
// KvSegment::kv_request of a shared range: kv_begin/kv_end index the plan's slot buffer, not a request.
inline constexpr int32_t kSharedKv = -1;
// ItemRequest::partial_slot of a request that is in only one work item. The CTA then stores the request's result
// directly to the output.
inline constexpr int32_t kDirectStore = -1;

// The sections after the header, in their order. Everything that depends on the list of sections is generated from it:
// the header's counts, capacities, layout, views, the scheduler's sections, and what Python knows about sections.
// SECTION(name, Entry, count, extra): section `name` has entries of type Entry; their number is the header's field
// `count` plus `extra`.
//
//   ticket_begin   ticket t has the items from ticket_begin[t] up to ticket_begin[t + 1], at least one
//   work_items     what the CTAs execute
//   kv_segments    the KV of each work item, in the order of the items
//   item_requests  the requests of each work item
//   gather_spans   how the slot buffer of shared KV is filled
//   merges         requests whose output is made of partials
#define PAT_PLAN_SECTIONS(SECTION)                          \
  SECTION(ticket_begin, TicketBegin, num_tickets, 1)        \
  SECTION(work_items, WorkItem, num_work_items, 0)          \
  SECTION(kv_segments, KvSegment, num_kv_segments, 0)       \
  SECTION(item_requests, ItemRequest, num_item_requests, 0) \
  SECTION(gather_spans, GatherSpan, num_gather_spans, 0)    \
  SECTION(merges, MergeEntry, num_merges, 0)

#define PAT_PLAN_COUNT(name, Entry, count, extra) +1
inline constexpr int32_t kNumPlanSections = 0 PAT_PLAN_SECTIONS(PAT_PLAN_COUNT);
#undef PAT_PLAN_COUNT

struct PlanHeader {
  int32_t magic;
  int32_t version;
  int32_t num_requests;
  int32_t group_size;  // query heads per KV head
#define PAT_PLAN_COUNT(name, Entry, count, extra) int32_t count;
  PAT_PLAN_SECTIONS(PAT_PLAN_COUNT)
#undef PAT_PLAN_COUNT
  int32_t num_partials;      // partial slots in use: [0, num_partials)
  int32_t num_shared_slots;  // entries of the slot buffer in use
  int32_t num_kv_tokens;     // KV tokens of all work items when planned; at most INT32_MAX
  int32_t largest_tile;      // index of the largest tile that a work item has
  int32_t reserved[2];
};

// The first work item of a ticket, and that item's first segment. With both indices here, a CTA loads items and
// segments at the same time: neither load waits for the other.
struct TicketBegin {
  int32_t work_item;
  int32_t kv_segment;
};

// A CTA's unit of work: the query rows of `num_requests` requests against the item's segments. Requests that share much
// KV are neighbours. The segments of all items follow one another without a gap, in the order of the items.
struct WorkItem {
  int32_t tile;  // index into the layer's TileTable; the tile holds all query rows
  int32_t num_requests;
  int32_t request_begin;  // index into item_requests
  int32_t segment_begin;  // index into kv_segments
  int32_t num_segments;   // at least one
  int32_t reserved[3];
};

// A KV range of a work item. The item's requests [first, end), counted from its first request, attend to the range.
// Every (request, position) of the batch lies in exactly one segment. Within an item, the segments of one request are
// in ascending or in descending order of position.
struct KvSegment {
  int32_t kv_request;  // request whose row of req_to_token the kernel reads, or kSharedKv
  int32_t kv_begin;    // position in kv_request, or index into the slot buffer
  int32_t kv_end;      // exclusive, or kOpenEnd; <= kv_begin if the segment is empty
  int32_t requests;    // first | end << 16 | kReadOnce

  // Set if no other work item reads any of the segment's KV, so that this KV need not stay in the L2. Results do not
  // depend on this hint.
  static constexpr int32_t kReadOnce = 1 << 15;

  static constexpr int32_t interval(int32_t first, int32_t end) { return first | end << 16; }
  constexpr int32_t first_request() const { return requests & (kReadOnce - 1); }
  constexpr bool is_read_once() const { return requests & kReadOnce; }
  constexpr int32_t end_request() const { return requests >> 16; }
};

struct ItemRequest {
  int32_t request;
  // Index of the partials that the item makes for the request, or kDirectStore.
  int32_t partial_slot;
};

// slots[slot_begin + i] = req_to_token[row of request][kv_begin + i] for i in [0, num_tokens). gather_slots makes this
// copy once per plan: the row of a finished request may be rewritten while steps with this plan run.
struct GatherSpan {
  int32_t request;
  int32_t kv_begin;
  int32_t num_tokens;
  int32_t slot_begin;
};

// Output of `request` = LSE-weighted sum of partials [partial_begin, partial_begin + num_partials), in this order (root
// to leaf, then ascending position). If num_partials is 0, the request has no KV: its output is 0 and its LSE -inf.
struct MergeEntry {
  int32_t request;
  int32_t partial_begin;
  int32_t num_partials;
  int32_t reserved;
};

static_assert(sizeof(PlanHeader) == 16 * sizeof(int32_t));
static_assert(sizeof(TicketBegin) == 2 * sizeof(int32_t));
static_assert(sizeof(WorkItem) == 8 * sizeof(int32_t));
static_assert(sizeof(KvSegment) == 4 * sizeof(int32_t));
static_assert(sizeof(ItemRequest) == 2 * sizeof(int32_t));
static_assert(sizeof(GatherSpan) == 4 * sizeof(int32_t));
static_assert(sizeof(MergeEntry) == 4 * sizeof(int32_t));

// Number of entries that each section of a plan buffer can hold. The fields are named like the header's counts.
struct PlanCapacity {
#define PAT_PLAN_COUNT(name, Entry, count, extra) int32_t count = 0;
  PAT_PLAN_SECTIONS(PAT_PLAN_COUNT)
#undef PAT_PLAN_COUNT

  // The capacity that exactly fits the plan with this header.
  static constexpr PlanCapacity of(const PlanHeader& header) {
    PlanCapacity capacity;
#define PAT_PLAN_COUNT(name, Entry, count, extra) capacity.count = header.count;
    PAT_PLAN_SECTIONS(PAT_PLAN_COUNT)
#undef PAT_PLAN_COUNT
    return capacity;
  }
  // entries: [kNumPlanSections], in the order of the sections. Each entry must fit into int32.
  template <typename Int>
  static constexpr PlanCapacity from_entries(const Int* entries) {
    PlanCapacity capacity;
#define PAT_PLAN_COUNT(name, Entry, count, extra) capacity.count = static_cast<int32_t>(*entries++);
    PAT_PLAN_SECTIONS(PAT_PLAN_COUNT)
#undef PAT_PLAN_COUNT
    return capacity;
  }
  constexpr bool holds(const PlanHeader& header) const {
#define PAT_PLAN_COUNT(name, Entry, count, extra) \
  if (header.count > count) return false;
    PAT_PLAN_SECTIONS(PAT_PLAN_COUNT)
#undef PAT_PLAN_COUNT
    return true;
  }
};

// Section offsets in int32 units, each a multiple of kPlanAlignment.
struct PlanLayout {
  static constexpr int64_t kPlanAlignment = 32;  // 128 bytes: one L2 line

  int64_t header;
#define PAT_PLAN_OFFSET(name, Entry, count, extra) int64_t name;
  PAT_PLAN_SECTIONS(PAT_PLAN_OFFSET)
#undef PAT_PLAN_OFFSET
  int64_t size;  // int32 units of the whole buffer

  static constexpr PlanLayout of(const PlanCapacity& capacity) {
    PlanLayout layout{};
    int64_t next = 0;
    auto section = [&next](int64_t num_entries, int64_t bytes_each) {
      const int64_t offset = next;
      const int64_t length = num_entries * (bytes_each / static_cast<int64_t>(sizeof(int32_t)));
      next = (offset + length + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment;
      return offset;
    };
    layout.header = section(1, sizeof(PlanHeader));
#define PAT_PLAN_OFFSET(name, Entry, count, extra) \
  layout.name = section(int64_t{capacity.count} + extra, sizeof(Entry));
    PAT_PLAN_SECTIONS(PAT_PLAN_OFFSET)
#undef PAT_PLAN_OFFSET
    layout.size = next;
    return layout;
  }
};

// Pointers to the sections of a plan in its buffer.
struct PlanView {
  const PlanHeader* header;
#define PAT_PLAN_POINTER(name, Entry, count, extra) const Entry* name;
  PAT_PLAN_SECTIONS(PAT_PLAN_POINTER)
#undef PAT_PLAN_POINTER

  static PlanView at(const int32_t* buffer, const PlanLayout& layout) {
    PlanView view{};
    view.header = reinterpret_cast<const PlanHeader*>(buffer + layout.header);
#define PAT_PLAN_POINTER(name, Entry, count, extra) \
  view.name = reinterpret_cast<const Entry*>(buffer + layout.name);
    PAT_PLAN_SECTIONS(PAT_PLAN_POINTER)
#undef PAT_PLAN_POINTER
    return view;
  }
};

}  // namespace pat
