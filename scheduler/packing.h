// The result of stage 2 of the scheduler: packs, whose requests read KV ranges together.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan_format.h"

namespace pat {

// A KV range that an interval of a pack's requests attends to.
struct Segment {
  static constexpr int32_t kPrivate = -1;

  int32_t span;      // index in Packing::spans, or kPrivate: slots of the interval's only request
  int32_t kv_begin;  // a position, the same for all requests of the interval
  int32_t kv_end;    // end of the range when planned
  int32_t first;     // requests [first, end) of the pack
  int32_t end;
  bool is_open;       // the segment ends where its request ends, and grows with it
  bool is_read_once;  // no other tile reads any of the segment; false if unknown

  bool is_private() const { return span == kPrivate; }
  int32_t num_tokens() const { return kv_end - kv_begin; }
};

struct Pack {
  int32_t request_begin;  // index in Packing::requests
  int32_t num_requests;
  int32_t segment_begin;  // index in Packing::segments
  int32_t num_segments;
};

// The packs of a batch. A pack's segments are in pre-order: ancestors before descendants, requests ascending. So the
// segments of a request ascend in position, within a pack and from pack to pack. A pack with more requests than fit
// into a tile has only one segment.
struct Packing {
  std::vector<Pack> packs;
  std::vector<int32_t> requests;
  std::vector<Segment> segments;
  std::vector<GatherSpan> spans;  // shared ranges, in the order of the slot buffer
  int64_t packing_slack = 0;      // how many more entries kMaxPacksPerRequest allows in requests

  std::span<const int32_t> requests_of(const Pack& pack) const {
    return std::span(requests).subspan(pack.request_begin, pack.num_requests);
  }
  std::span<const Segment> segments_of(const Pack& pack) const {
    return std::span(segments).subspan(pack.segment_begin, pack.num_segments);
  }
  void clear() {
    packs.clear();
    requests.clear();
    segments.clear();
    spans.clear();
  }
  // Adds a span and returns its index. Throws std::length_error if int32 cannot count the slots of all spans.
  int32_t add_span(int32_t request, int32_t kv_begin, int32_t kv_end) {
    const int64_t slot_begin = num_slots();
    const int32_t num_tokens = kv_end - kv_begin;
    if (slot_begin + num_tokens > std::numeric_limits<int32_t>::max()) {
      throw std::length_error("shared slots of this plan do not fit into int32: " +
                              std::to_string(slot_begin + num_tokens));
    }
    spans.push_back({.request = request,
                     .kv_begin = kv_begin,
                     .num_tokens = num_tokens,
                     .slot_begin = static_cast<int32_t>(slot_begin)});
    return static_cast<int32_t>(spans.size()) - 1;
  }
  int64_t num_slots() const {
    return spans.empty() ? 0 : int64_t{spans.back().slot_begin} + spans.back().num_tokens;
  }
};

// On average over a batch, a request is in at most this many packs, private packs included. This bounds the partials,
// for which memory is reserved if CUDA graphs are used.
inline constexpr int32_t kMaxPacksPerRequest = 12;
// The packs of a batch have, on average, at most this many segments per request.
inline constexpr int32_t kMaxSegmentsPerRequest = 24;

}  // namespace pat
