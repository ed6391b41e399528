// Policy::kMemory: packs that hold whole subtrees. A pack is a run of requests in tree order, with the KV ranges of all
// their ancestors.
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
  bool is_open;       // it grows with its request: a private segment that no cut has ended
  bool is_read_once;  // no other pack or tile reads any of the segment, as far as is known

  bool is_private() const { return span == kPrivate; }
  int32_t num_tokens() const { return kv_end - kv_begin; }
};

struct Pack {
  int32_t request_begin;  // into Packing::requests
  int32_t num_requests;
  int32_t segment_begin;  // into Packing::segments
  int32_t num_segments;
};

// A pack's segments are in pre-order: ancestors before descendants, requests ascending. So the segments of a request
// ascend in position, and so do its packs. A pack with more requests than a tile holds has one segment.
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

// The packs of a batch have at most this many segments for each request of the batch.
inline constexpr int32_t kMaxSegmentsPerRequest = 24;

class SubtreeTiler {
 public:
  SubtreeTiler(const PackingCosts& cost, const TileSelection& tiles) : cost_(cost), tiles_(tiles) {}

  // Divides the requests, in tree order, into runs that fit into a tile. A cut between two neighbours costs a work
  // item, and reading again what both share. Everything else is read once, wherever the cuts lie. Finds the cheapest
  // cuts in time linear in nodes, requests and segments. Requests that share nothing are never in one run.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  // Finds, for each place in tree order, the deepest node that its request shares with the one before.
  void find_common_nodes(const PrefixForest& forest);
  void choose_cuts(const PrefixForest& forest);
  // Where all neighbours of several runs share the same node, every place of a cut costs the same. Makes these runs
  // equally long, so that their tiles take equally long over what they share.
  void even_out_runs();
  int64_t cost_of_cut(const PrefixForest& forest, int32_t place) const;
  // Nodes that the same requests of a pack hold share a segment: short nodes, or, if `fused_levels` is not 0, up to
  // that many levels. Returns false if the batch then has too many segments.
  bool emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t fused_levels,
            Packing& out);
  // Counts the segments that all requests of their pack read, over all packs. In a deep tree, these are nearly all
  // segments.
  int64_t num_common_segments() const;
  void emit_pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin,
                 int32_t end, Packing& out);
  int32_t span_of(const PrefixForest& forest, int32_t top, int32_t bottom, int32_t request,
                  Packing& out);

  PackingCosts cost_;
  TileSelection tiles_;

  std::vector<int32_t> depth_;  // per node
  std::vector<int32_t>
      common_before_;  // per node: the node that its first holder shares with the request before
  std::vector<int32_t> common_;     // per place in tree order: the common node; -1: none
  std::vector<int64_t> best_;       // per place: cost of the cheapest cuts before it
  std::vector<int32_t> run_begin_;  // per place: where the run that ends there begins
  std::vector<int32_t>
      candidates_;  // places where that run may begin, best first; then the ends of all runs
  // Per node: the first node of a segment that ends with this node, if the same requests of a pack hold both.
  std::vector<int32_t> segment_top_;
  std::vector<int32_t>
      segments_above_;  // per node: segments from the root to its end, under the same condition
  struct Range {
    int32_t top;     // node
    int32_t bottom;  // node
    int32_t last;    // end of the pack's requests that hold it
  };
  std::vector<Range> ranges_;  // a request's segments, the last one first
  struct KnownSpan {
    int32_t top;  // node at which the span begins; -1: none yet
    int32_t span;
  };
  std::vector<KnownSpan> known_spans_;  // per node: the last span that ends with it
};

}  // namespace pat
