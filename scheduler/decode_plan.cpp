#include "decode_plan.h"

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
  if (section.empty()) return;  // then data() may be null, which memcpy must not be given
  std::memcpy(out.data() + offset, section.data(), section.size() * sizeof(Entry));
}

}  // namespace

void DecodePlan::assemble(int32_t num_requests, int32_t group_size, const Packing& packing,
                          const Split& split) {
  const int32_t num_shared_slots = list_gather_spans(packing);
  count_partials(num_requests, packing, split);
  const int32_t num_partials = assign_partials(packing, split);
  list_work_items(packing, split);

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
  header_.num_shared_slots = num_shared_slots;
}

int32_t DecodePlan::list_gather_spans(const Packing& packing) {
  sections_.gather_spans.clear();
  slot_begin_.clear();
  int64_t num_shared_slots = 0;
  for (const Pack& pack : packing.packs) {
    slot_begin_.push_back(static_cast<int32_t>(num_shared_slots));
    if (pack.is_private) continue;
    const int32_t num_tokens = pack.kv_end - pack.kv_begin;
    sections_.gather_spans.push_back({.request = packing.requests[pack.request_begin],
                                      .kv_begin = pack.kv_begin,
                                      .num_tokens = num_tokens,
                                      .slot_begin = slot_begin_.back()});
    num_shared_slots = checked_int32(num_shared_slots + num_tokens, "shared slots");
  }
  return static_cast<int32_t>(num_shared_slots);
}

void DecodePlan::count_partials(int32_t num_requests, const Packing& packing, const Split& split) {
  num_partials_.assign(num_requests, 0);
  kv_tokens_.planned = 0;
  int64_t num_item_requests = 0;
  for (const Piece& piece : split.pieces) {
    kv_tokens_.planned += piece.kv_end - piece.kv_begin;
    num_item_requests += piece.num_requests;
    for (int32_t i = 0; i < piece.num_requests; ++i) {
      ++num_partials_[packing.requests[piece.request_begin + i]];
    }
  }
  checked_int32(num_item_requests, "item requests");  // hence the partials, which are fewer
}

// Partials of a request are dense and in the order of its pieces, so that merging reads one range, in a fixed
// order. A request with one piece needs none: its output is stored directly.
int32_t DecodePlan::assign_partials(const Packing& packing, const Split& split) {
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

  sections_.item_requests.clear();
  request_begin_.clear();
  for (const Piece& piece : split.pieces) {
    request_begin_.push_back(static_cast<int32_t>(sections_.item_requests.size()));
    for (int32_t i = 0; i < piece.num_requests; ++i) {
      const int32_t request = packing.requests[piece.request_begin + i];
      int32_t& slot = next_partial_[request];
      sections_.item_requests.push_back({.request = request, .partial_slot = slot});
      if (slot != kDirectStore) ++slot;
    }
  }
  return next;
}

void DecodePlan::list_work_items(const Packing& packing, const Split& split) {
  auto& [ticket_begin, work_items, kv_segments, item_requests, gather_spans, merges] = sections_;
  work_items.clear();
  kv_segments.clear();
  ticket_begin.assign(1, {});
  for (const Ticket& ticket : split.tickets) {
    for (int32_t p = ticket.piece_begin; p < ticket.piece_end; ++p) {
      const Piece& piece = split.pieces[p];
      work_items.push_back({.tile = piece.tile,
                            .num_requests = piece.num_requests,
                            .request_begin = request_begin_[p],
                            .segment_begin = static_cast<int32_t>(kv_segments.size()),
                            .num_segments = 1,
                            .reserved = {}});
      kv_segments.push_back(kv_segment(packing, piece));
    }
    ticket_begin.push_back({.work_item = static_cast<int32_t>(work_items.size()),
                            .kv_segment = static_cast<int32_t>(kv_segments.size())});
  }
}

KvSegment DecodePlan::kv_segment(const Packing& packing, const Piece& piece) const {
  const Pack& pack = packing.packs[piece.pack];
  const bool open = pack.is_private && piece.kv_end == pack.kv_end;
  const int32_t shift = pack.is_private ? 0 : slot_begin_[piece.pack] - pack.kv_begin;
  return {.kv_request = pack.is_private ? packing.requests[pack.request_begin] : kSharedKv,
          .kv_begin = piece.kv_begin + shift,
          .kv_end = open ? kOpenEnd : piece.kv_end + shift,
          .requests = KvSegment::interval(0, piece.num_requests)};
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
