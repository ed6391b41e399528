#include "kv_split/split_writer.h"

#include <algorithm>
#include <bit>

namespace pat {

namespace {

static_assert(std::max(kTileTable.largest_block_q(), kLatentTileTable.largest_block_q()) <= 64,
              "a bit of uint64_t for each request of a tile");

// count: 0 to 64.
uint64_t bits_below(int32_t count) { return count == 0 ? 0 : ~uint64_t{0} >> (64 - count); }

// Adds a whole tile as a work item. The item has all requests of the tile, because each of them has a segment.
void add_whole(const Packing& packing, const Tile& tile, Split& out) {
  out.work_items.push_back({.tile = tile.tile,
                            .request_begin = static_cast<int32_t>(out.requests.size()),
                            .num_requests = tile.num_requests,
                            .segment_begin = static_cast<int32_t>(out.segments.size()),
                            .num_segments = tile.segment_end - tile.segment_begin,
                            .num_tokens = tile.num_tokens,
                            .cost = tile.uncut_cost});
  const auto requests = packing.requests.begin() + tile.request_begin;
  out.requests.insert(out.requests.end(), requests, requests + tile.num_requests);
  for (int32_t s = tile.segment_begin; s < tile.segment_end; ++s) {
    Segment& segment = out.segments.emplace_back(packing.segments[s]);
    segment.end = std::min(segment.end, tile.num_requests);  // tiles of a pack share its segments
  }
}

// Adds a part of a tile as a work item.
void add_part(const Packing& packing, const SplitContext& context, const Tile& tile,
              const TilePart& part, Split& out) {
  const auto& [at, cut] = part;
  const auto segment_begin = static_cast<int32_t>(out.segments.size());
  const auto request_begin = static_cast<int32_t>(out.requests.size());
  int64_t num_tokens = 0;
  int64_t kv_load = 0;
  uint64_t held = 0;  // a bit per request from at.first on: whether a segment belongs to it
  const auto add_segment = [&](int32_t s, int32_t from, int32_t to) {
    Segment segment = packing.segments[s];
    segment.is_open &= to == segment.num_tokens();
    // A segment with requests outside the item is read by another item too.
    segment.is_read_once &= at.first <= segment.first && segment.end <= cut.last;
    segment.kv_end = segment.kv_begin + to;
    segment.kv_begin += from;
    segment.first = std::max(segment.first, at.first) - at.first;
    segment.end = std::min(segment.end, cut.last) - at.first;
    held |= bits_below(segment.end) & ~bits_below(segment.first);
    num_tokens += to - from;
    kv_load += context.kv_load_of(to - from);
    out.segments.push_back(segment);
  };
  for (int32_t s = at.base; s < at.segment; ++s) {
    if (packing.segments[s].end <= at.first) continue;
    add_segment(s, s == at.base ? at.base_offset : 0, packing.segments[s].num_tokens());
  }
  for (int32_t s = at.segment; s < cut.next.segment; ++s) {
    add_segment(s, s == at.segment ? at.offset : 0, packing.segments[s].num_tokens());
  }
  if (cut.next.offset > 0) {
    const int32_t s = cut.next.segment;
    add_segment(s, s == at.segment ? at.offset : 0, cut.next.offset);
  }

  // Leaves out the requests to which no segment belongs.
  const auto requests = packing.requests.begin() + tile.request_begin + at.first;
  const int32_t num_first = std::countr_one(held);
  if (held == bits_below(num_first)) {
    out.requests.insert(out.requests.end(), requests, requests + num_first);
  } else {
    for (uint64_t left = held; left != 0; left &= left - 1) {
      out.requests.push_back(requests[std::countr_zero(left)]);
    }
    for (size_t s = segment_begin; s < out.segments.size(); ++s) {
      Segment& segment = out.segments[s];
      segment.first = std::popcount(held & bits_below(segment.first));
      segment.end = std::popcount(held & bits_below(segment.end));
    }
  }
  const int32_t num_requests = static_cast<int32_t>(out.requests.size()) - request_begin;
  out.work_items.push_back(
      {.tile = context.tiles.select(num_requests),
       .request_begin = request_begin,
       .num_requests = num_requests,
       .segment_begin = segment_begin,
       .num_segments = static_cast<int32_t>(out.segments.size()) - segment_begin,
       .num_tokens = num_tokens,
       .cost = context.cost(num_requests, kv_load)});
}

}  // namespace

void add_work_items(const Packing& packing, const SplitContext& context,
                    std::span<const Tile> tiles, const Assignment& assignment, Split& out) {
  for (const AssignedPart& assigned : assignment.assigned_parts) {
    const auto index = static_cast<int32_t>(out.work_items.size());
    Ticket& ticket = out.tickets[assigned.ticket];
    const bool is_first = ticket.item_end == 0;
    if (is_first) ticket.item_begin = index;
    ticket.item_end = index + 1;
    const Tile& tile = tiles[assigned.tile];
    if (assigned.part < 0) {
      add_whole(packing, tile, out);
    } else {
      const TilePart& part = assignment.parts[assigned.part];
      ticket.rest_comes_last |= is_first && part.begin.assigned > 0;
      add_part(packing, context, tile, part, out);
    }
  }
}

}  // namespace pat
