// Packs that hold whole subtrees: runs of requests in tree order, each with the KV ranges of all its ancestors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost_model.h"
#include "plan_format.h"
#include "prefix_forest.h"
#include "tile_selection.h"

namespace pat {

// One KV range of a pack, for an interval of its requests.
struct Segment {
  static constexpr int32_t kPrivate = -1;

  int32_t
      span;  // into Packing::spans, or kPrivate: read live from the row of the interval's one request
  int32_t kv_begin;  // positions, equal for all requests of the interval
  int32_t kv_end;    // at planning time
  int32_t first;     // requests [first, end) of the pack
  int32_t end;
  bool
      is_open;  // it ends where its request does, however long that becomes; a private segment that no cut has ended
  bool is_read_once;  // no other pack or tile reads any of it, as far as is known

  bool is_private() const { return span == kPrivate; }
  int32_t num_tokens() const { return kv_end - kv_begin; }
};

struct Pack {
  int32_t request_begin;  // into Packing::requests
  int32_t num_requests;
  int32_t segment_begin;  // into Packing::segments
  int32_t num_segments;
};

// A pack's segments are in pre-order: ancestors before descendants, requests ascending. So the segments of one
// request ascend in position. A request's packs do too. A pack of more requests than a tile holds has one segment.
struct Packing {
  std::vector<Pack> packs;
  std::vector<int32_t> requests;
  std::vector<Segment> segments;
  std::vector<GatherSpan> spans;  // shared ranges, one after the other in the slot buffer
  int64_t packing_slack = 0;  // how many more `requests` there might be: see kMaxPacksPerRequest

  std::span<const int32_t> requests_of(const Pack& pack) const {
    return std::span(requests).subspan(pack.request_begin, pack.num_requests);
  }
  std::span<const Segment> segments_of(const Pack& pack) const {
    return std::span(segments).subspan(pack.segment_begin, pack.num_segments);
  }
  void clear();
  // Returns the span's index. Throws std::length_error if the slots of all spans are more than int32 can count.
  int32_t add_span(int32_t request, int32_t kv_begin, int32_t kv_end);
  int64_t num_slots() const {
    return spans.empty() ? 0 : int64_t{spans.back().slot_begin} + spans.back().num_tokens;
  }
};

// Most segments that the packs of a batch have, for each of its requests.
inline constexpr int32_t kMaxSegmentsPerRequest = 24;

class SubtreeTiler {
 public:
  SubtreeTiler(const PackingCosts& cost, const TileSelection& tiles) : cost_(cost), tiles_(tiles) {}

  // Divides the requests, in tree order, into runs that fit into a tile. A cut between two neighbours costs an item,
  // and reading again what both share; all else is read once, however the requests are divided. The cheapest cuts are
  // found in time linear in nodes + requests + segments. Requests that share nothing are never in one run.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  // For each place in tree order: the deepest node that the request shares with the one before.
  void find_common_nodes(const PrefixForest& forest);
  void choose_cuts(const PrefixForest& forest);
  int64_t cost_of_cut(const PrefixForest& forest, int32_t place) const;
  // Nodes that the same requests of a pack hold share a segment if they are short, or, if `fused_levels` is not 0, up
  // to so many of them. Returns false if these are too many segments for the batch.
  bool emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t fused_levels,
            Packing& out);
  // Number of segments, over all packs, that all requests of a pack are for. In a deep tree, nearly all.
  int64_t num_common_segments() const;
  void emit_pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin,
                 int32_t end, Packing& out);
  int32_t span_of(const PrefixForest& forest, int32_t top, int32_t bottom, int32_t request,
                  Packing& out);

  PackingCosts cost_;
  TileSelection tiles_;

  std::vector<int32_t> depth_;  // per node
  std::vector<int32_t>
      common_before_;            // per node: what its first holder shares with the request before
  std::vector<int32_t> common_;  // per place in tree order; -1: nothing
  std::vector<int64_t> best_;    // per place: cost of the cheapest cuts before it
  std::vector<int32_t> run_begin_;   // per place: where the last run before it begins
  std::vector<int32_t> candidates_;  // places at which that run may begin, best first
  // Per node: where the segment that ends with it begins, if the same requests hold all of that.
  std::vector<int32_t> segment_top_;
  std::vector<int32_t> segments_above_;  // per node: from the root to its end, in the same case
  struct Range {
    int32_t top;     // node
    int32_t bottom;  // node
    int32_t last;    // requests of the pack before this one hold it
  };
  std::vector<Range> ranges_;  // a request's segments, the last one first
  struct KnownSpan {
    int32_t top;  // node at which the span begins; -1: none yet
    int32_t span;
  };
  std::vector<KnownSpan> known_spans_;  // per node: the last span that ends with it
};

}  // namespace pat
