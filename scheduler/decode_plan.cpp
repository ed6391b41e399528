#include "decode_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace pat {

namespace {

int32_t checked_int32(int64_t value, const char* what) {
  if (value > std::numeric_limits<int32_t>::max()) {
    throw std::length_error(std::string(what) +
                            " of this plan do not fit into int32: " + std::to_string(value));
  }
  return static_cast<int32_t>(value);
}

template <typename Entry>
void copy_section(const std::vector<Entry>& section, int64_t offset, std::span<int32_t> out) {
  if (section.empty()) return;  // its data() may be null, which memcpy must not get
  std::memcpy(out.data() + offset, section.data(), section.size() * sizeof(Entry));
}

}  // namespace

void DecodePlan::assemble(int32_t num_requests, int32_t group_size, const Packing& packing,
                          const Split& split, int32_t num_workers) {
  sections_.gather_spans = packing.spans;
  count_partials(num_requests, split);
  const int32_t num_partials = assign_partials(split);
  list_work_items(packing, split);
  if (num_workers > 0 && num_partials == 0) turn_items_around(num_workers);

  header_ = {};
  header_.magic = kPlanMagic;
  header_.version = kPlanVersion;
  header_.num_requests = num_requests;
  header_.group_size = group_size;
#define PAT_PLAN_COUNT(name, Entry, count, extra) \
  header_.count = checked_int32(static_cast<int64_t>(sections_.name.size()) - extra, #name);
  PAT_PLAN_SECTIONS(PAT_PLAN_COUNT)
#undef PAT_PLAN_COUNT
  header_.num_partials = num_partials;
  header_.num_shared_slots = static_cast<int32_t>(packing.num_slots());
  header_.num_kv_tokens = static_cast<int32_t>(
      std::min<int64_t>(kv_tokens_.planned, std::numeric_limits<int32_t>::max()));
  for (const WorkItem& item : sections_.work_items) {
    header_.largest_tile = std::max(header_.largest_tile, item.tile);
  }
}

void DecodePlan::count_partials(int32_t num_requests, const Split& split) {
  num_partials_.assign(num_requests, 0);
  kv_tokens_.planned = 0;
  for (const Split::WorkItem& item : split.work_items) kv_tokens_.planned += item.num_tokens;
  checked_int32(static_cast<int64_t>(split.requests.size()),
                "item requests");  // also bounds the number of partials
  for (const int32_t request : split.requests) ++num_partials_[request];
}

// The partials of a request follow one another in the order of its work items, so that merging reads one range in a
// fixed order. A request with one work item has no partial, because its output is stored directly.
int32_t DecodePlan::assign_partials(const Split& split) {
  sections_.merges.clear();
  next_partial_.resize(num_partials_.size());
  int32_t next = 0;
  for (size_t request = 0; request < num_partials_.size(); ++request) {
    const int32_t count = num_partials_[request];
    next_partial_[request] = count == 1 ? kDirectStore : next;
    if (count == 1) continue;
    sections_.merges.push_back({.request = static_cast<int32_t>(request),
                                .partial_begin = next,
                                .num_partials = count,
                                .reserved = 0});
    next += count;
  }

  sections_.item_requests.resize(split.requests.size());
  for (size_t i = 0; i < split.requests.size(); ++i) {
    const int32_t request = split.requests[i];
    int32_t& slot = next_partial_[request];
    sections_.item_requests[i] = {.request = request, .partial_slot = slot};
    slot += slot != kDirectStore;
  }
  return next;
}

void DecodePlan::list_work_items(const Packing& packing, const Split& split) {
  std::vector<KvSegment>& segments = sections_.kv_segments;
  std::vector<WorkItem>& items = sections_.work_items;
  segments.resize(split.segments.size());
  items.resize(split.work_items.size());
  sections_.ticket_begin.assign(1, {});
  int32_t num_items = 0;
  int32_t num_segments = 0;
  const auto add = [&](const Split::WorkItem& item) {
    items[num_items++] = {.tile = item.tile,
                          .num_requests = item.num_requests,
                          .request_begin = item.request_begin,
                          .segment_begin = num_segments,
                          .num_segments = item.num_segments,
                          .reserved = {}};
    for (int32_t s = 0; s < item.num_segments; ++s) {
      const Segment& segment = split.segments[item.segment_begin + s];
      segments[num_segments++] =
          kv_segment(packing, segment, split.requests[item.request_begin + segment.first]);
    }
  };
  for (const Ticket& ticket : split.tickets) {
    for (int32_t p = ticket.item_begin + ticket.rest_comes_last; p < ticket.item_end; ++p) {
      add(split.work_items[p]);
    }
    if (ticket.rest_comes_last) add(split.work_items[ticket.item_begin]);
    sections_.ticket_begin.push_back({.work_item = num_items, .kv_segment = num_segments});
  }
}

void DecodePlan::turn_items_around(int32_t num_workers) {
  const auto num_tickets = static_cast<int32_t>(sections_.ticket_begin.size()) - 1;
  for (int32_t t = 0; t < num_tickets; ++t) {
    // In the first round, each SM's first CTA draws a ticket before any SM's second CTA. So the items of the second
    // half of these tickets are turned around. In later rounds, the items of every other ticket are turned around.
    const bool is_first_draw = t < num_workers;
    if (is_first_draw ? 2 * t < num_workers : t % 2 == 1) continue;
    const int32_t end = sections_.ticket_begin[t + 1].work_item;
    for (int32_t i = sections_.ticket_begin[t].work_item; i < end; ++i) {
      const WorkItem& item = sections_.work_items[i];
      const auto first = sections_.kv_segments.begin() + item.segment_begin;
      const auto last = first + item.num_segments;
      const bool has_both = first->kv_request == kSharedKv && last[-1].kv_request != kSharedKv;
      if (has_both) std::reverse(first, last);
    }
  }
}

KvSegment DecodePlan::kv_segment(const Packing& packing, const Segment& segment,
                                 int32_t first_request) const {
  int32_t shift = 0;
  if (!segment.is_private()) {
    const GatherSpan& span = packing.spans[segment.span];
    shift = span.slot_begin - span.kv_begin;
  }
  return {.kv_request = segment.is_private() ? first_request : kSharedKv,
          .kv_begin = segment.kv_begin + shift,
          .kv_end = segment.is_open ? kOpenEnd : segment.kv_end + shift,
          .requests = KvSegment::interval(segment.first, segment.end) |
                      (segment.is_read_once ? KvSegment::kReadOnce : 0)};
}

bool DecodePlan::write(const PlanCapacity& capacity, int64_t num_partials, int64_t num_shared_slots,
                       std::span<int32_t> out) const {
  if (!capacity.holds(header_) || header_.num_partials > num_partials ||
      header_.num_shared_slots > num_shared_slots) {
    return false;
  }
  const PlanLayout layout = PlanLayout::of(capacity);
  if (static_cast<int64_t>(out.size()) < layout.size) {
    throw std::length_error("plan buffer too small: the layout needs " +
                            std::to_string(layout.size) + " int32, the buffer has " +
                            std::to_string(out.size()));
  }
  std::memcpy(out.data() + layout.header, &header_, sizeof(header_));
#define PAT_PLAN_COPY(name, Entry, count, extra) copy_section(sections_.name, layout.name, out);
  PAT_PLAN_SECTIONS(PAT_PLAN_COPY)
#undef PAT_PLAN_COPY
  return true;
}

}  // namespace pat
