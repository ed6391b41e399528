#include "decode_plan.h"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace pat {

namespace {

void check_int32(int64_t value, const char* what) {
  if (value > std::numeric_limits<int32_t>::max()) {
    throw std::length_error(std::string(what) +
                            " of this plan do not fit into int32: " + std::to_string(value));
  }
}

template <typename T>
void copy_section(const std::vector<T>& section, int64_t offset, std::span<int32_t> out) {
  if (section.empty()) return;  // then data() may be null, which memcpy must not be given
  std::memcpy(out.data() + offset, section.data(), section.size() * sizeof(T));
}

}  // namespace

void DecodePlan::assemble(int32_t num_requests, int32_t group_size, const Packing& packing,
                          const Split& split) {
  gather_spans_.clear();
  slot_begin_.clear();
  int64_t num_shared_slots = 0;
  for (const Pack& pack : packing.packs) {
    slot_begin_.push_back(static_cast<int32_t>(num_shared_slots));
    if (pack.is_private) continue;
    const int32_t num_tokens = pack.kv_end - pack.kv_begin;
    gather_spans_.push_back({.request = packing.requests[pack.request_begin],
                             .kv_begin = pack.kv_begin,
                             .num_tokens = num_tokens,
                             .slot_begin = slot_begin_.back()});
    num_shared_slots += num_tokens;
    check_int32(num_shared_slots, "shared slots");
  }

  num_partials_.assign(num_requests, 0);
  kv_tokens_.planned = 0;
  for (const Piece& piece : split.pieces) {
    kv_tokens_.planned += piece.kv_end - piece.kv_begin;
    for (int32_t i = 0; i < piece.num_requests; ++i) {
      ++num_partials_[packing.requests[piece.request_begin + i]];
    }
  }
  assign_partials(packing, split);
  list_work_items(packing, split);

  header_ = {.magic = kPlanMagic,
             .version = kPlanVersion,
             .num_requests = num_requests,
             .group_size = group_size,
             .num_tickets = static_cast<int32_t>(ticket_begin_.size()) - 1,
             .num_work_items = static_cast<int32_t>(work_items_.size()),
             .num_item_requests = static_cast<int32_t>(item_requests_.size()),
             .num_gather_spans = static_cast<int32_t>(gather_spans_.size()),
             .num_merges = static_cast<int32_t>(merges_.size()),
             .num_partials = header_.num_partials,
             .num_shared_slots = static_cast<int32_t>(num_shared_slots),
             .reserved = {}};
}

// Partials of a request are dense and in the order of its pieces, so that merging reads one range, in a fixed
// order. A request with one piece needs none: its output is stored directly.
void DecodePlan::assign_partials(const Packing& packing, const Split& split) {
  merges_.clear();
  next_partial_.resize(num_partials_.size());
  int64_t next = 0;
  for (size_t request = 0; request < num_partials_.size(); ++request) {
    const int32_t count = num_partials_[request];
    next_partial_[request] = count == 1 ? kDirectStore : static_cast<int32_t>(next);
    if (count == 1) continue;
    merges_.push_back({.request = static_cast<int32_t>(request),
                       .partial_begin = static_cast<int32_t>(next),
                       .num_partials = count,
                       .reserved = 0});
    next += count;
    check_int32(next, "partials");
  }
  header_.num_partials = static_cast<int32_t>(next);

  item_requests_.clear();
  request_begin_.clear();
  for (const Piece& piece : split.pieces) {
    request_begin_.push_back(static_cast<int32_t>(item_requests_.size()));
    for (int32_t i = 0; i < piece.num_requests; ++i) {
      const int32_t request = packing.requests[piece.request_begin + i];
      int32_t& slot = next_partial_[request];
      item_requests_.push_back({.request = request, .partial_slot = slot});
      if (slot != kDirectStore) ++slot;
    }
  }
}

void DecodePlan::list_work_items(const Packing& packing, const Split& split) {
  work_items_.clear();
  ticket_begin_.assign(1, 0);
  for (const Ticket& ticket : split.tickets) {
    for (int32_t p = ticket.piece_begin; p < ticket.piece_end; ++p) {
      work_items_.push_back(work_item(packing, split.pieces[p], request_begin_[p]));
    }
    ticket_begin_.push_back(static_cast<int32_t>(work_items_.size()));
  }
}

WorkItem DecodePlan::work_item(const Packing& packing, const Piece& piece,
                               int32_t request_begin) const {
  const Pack& pack = packing.packs[piece.pack];
  const bool open = pack.is_private && piece.kv_end == pack.kv_end;
  const int32_t shift = pack.is_private ? 0 : slot_begin_[piece.pack] - pack.kv_begin;
  return {.tile = piece.tile,
          .num_requests = piece.num_requests,
          .request_begin = request_begin,
          .kv_request = pack.is_private ? packing.requests[pack.request_begin] : kSharedKv,
          .kv_begin = piece.kv_begin + shift,
          .kv_end = open ? kOpenEnd : piece.kv_end + shift,
          .reserved = {}};
}

PlanCapacity DecodePlan::required_capacity() const {
  return {.num_tickets = header_.num_tickets,
          .num_work_items = header_.num_work_items,
          .num_item_requests = header_.num_item_requests,
          .num_gather_spans = header_.num_gather_spans,
          .num_merges = header_.num_merges};
}

bool DecodePlan::fits(const PlanCapacity& capacity, int64_t num_partials,
                      int64_t num_shared_slots) const {
  return header_.num_tickets <= capacity.num_tickets &&
         header_.num_work_items <= capacity.num_work_items &&
         header_.num_item_requests <= capacity.num_item_requests &&
         header_.num_gather_spans <= capacity.num_gather_spans &&
         header_.num_merges <= capacity.num_merges && header_.num_partials <= num_partials &&
         header_.num_shared_slots <= num_shared_slots;
}

bool DecodePlan::write(const PlanCapacity& capacity, int64_t num_partials, int64_t num_shared_slots,
                       std::span<int32_t> out) const {
  if (!fits(capacity, num_partials, num_shared_slots)) return false;
  const PlanLayout layout = PlanLayout::of(capacity);
  if (static_cast<int64_t>(out.size()) < layout.size) {
    throw std::length_error("plan buffer too small: the layout needs " +
                            std::to_string(layout.size) + " int32, the buffer has " +
                            std::to_string(out.size()));
  }
  std::memcpy(out.data() + layout.header, &header_, sizeof(header_));
  copy_section(ticket_begin_, layout.ticket_begin, out);
  copy_section(work_items_, layout.work_items, out);
  copy_section(item_requests_, layout.item_requests, out);
  copy_section(gather_spans_, layout.gather_spans, out);
  copy_section(merges_, layout.merges, out);
  return true;
}

}  // namespace pat
