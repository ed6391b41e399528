#include "subtree_packer.h"

#include <algorithm>

namespace pat {

namespace {

// A node shares a segment with its parent if both have up to this many tokens and the same requests of the pack hold
// both, because each segment occupies whole stages of the kernels' rings. For longer nodes, the empty part of the last
// stage is negligible. Their segments have one node each, so that a node's slots are gathered once for all packs.
constexpr int32_t kShortNode = 255;
// In very deep trees, the packs would have too many segments. Then segments span at least this many levels, however
// long the nodes are. A segment begins at a level that is a multiple of the number of levels per segment, so that packs
// have most segments, and the slots of these segments, in common.
constexpr int32_t kFewestFusedLevels = 64;

bool is_short(const ForestNode& node) { return node.kv_end - node.kv_begin <= kShortNode; }

}  // namespace

void SubtreePacker::pack(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                         Packing& out) {
  find_common_nodes(forest);
  const auto shared_tokens = [&](int32_t place) {
    return common_[place] < 0 ? 0 : forest.nodes()[common_[place]].kv_end;
  };
  const auto fits = [most = tiles_.requests_per_tile()](int32_t first, int32_t last) {
    return last - first < most;
  };
  runs_.find(static_cast<int32_t>(common_.size()), shared_tokens, fits, run_ends_);
  even_out_runs();
  // The loop ends, because a pack has at most two segments per request once a segment may span all levels.
  for (int32_t levels = 0; !emit(forest, seq_lens, levels, out);) {
    levels = std::max(kFewestFusedLevels, 4 * levels);
  }
}

void SubtreePacker::find_common_nodes(const PrefixForest& forest) {
  const std::vector<ForestNode>& nodes = forest.nodes();
  common_before_.clear();
  depth_.clear();
  for (const ForestNode& node : nodes) {
    const bool is_first = node.parent >= 0 && node.holder_begin == nodes[node.parent].holder_begin;
    depth_.push_back(node.parent < 0 ? 0 : depth_[node.parent] + 1);
    common_before_.push_back(is_first ? common_before_[node.parent] : node.parent);
  }
  const std::vector<int32_t>& order = forest.requests_in_tree_order();
  common_.clear();
  for (size_t place = 0; place < order.size(); ++place) {
    const int32_t anchor = forest.anchor(order[place]);
    const bool is_first = anchor >= 0 && static_cast<size_t>(nodes[anchor].holder_begin) == place;
    common_.push_back(is_first ? common_before_[anchor] : anchor);
  }
}

bool SubtreePacker::emit(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                         int32_t fused_levels, Packing& out) {
  const std::vector<ForestNode>& nodes = forest.nodes();
  out.clear();
  known_spans_.assign(nodes.size(), {.top = -1, .span = -1});
  segment_top_.clear();
  segments_above_.clear();
  for (size_t n = 0; n < nodes.size(); ++n) {
    const int32_t parent = nodes[n].parent;
    const bool fuses =
        parent >= 0 && (fused_levels > 0 ? depth_[n] % fused_levels != 0
                                         : is_short(nodes[parent]) && is_short(nodes[n]));
    segment_top_.push_back(fuses ? segment_top_[parent] : static_cast<int32_t>(n));
    segments_above_.push_back((parent < 0 ? 0 : segments_above_[parent]) + !fuses);
  }
  const int64_t most = int64_t{kMaxSegmentsPerRequest} * static_cast<int64_t>(seq_lens.size());
  if (num_common_segments() > most) return false;
  int32_t begin = 0;
  for (const int32_t end : run_ends_) {
    emit_pack(forest, seq_lens, begin, end, out);
    if (static_cast<int64_t>(out.segments.size()) > most) return false;
    begin = end;
  }
  return true;
}

void SubtreePacker::even_out_runs() {
  std::vector<int32_t>& ends = run_ends_;
  const auto all_share = [&](int32_t node, int32_t begin, int32_t end) {
    return std::all_of(common_.begin() + begin, common_.begin() + end,
                       [&](int32_t common) { return common == node; });
  };
  int32_t begin = 0;
  for (size_t first = 0, last = 0; first < ends.size(); begin = ends[last], first = ++last) {
    if (first + 1 == ends.size()) break;
    const int32_t node = common_[ends[first]];
    if (node < 0 || !all_share(node, begin + 1, ends[first])) continue;
    while (last + 1 < ends.size() && all_share(node, ends[last], ends[last + 1])) ++last;
    const auto num_runs = static_cast<int64_t>(last - first + 1);
    const int64_t num_places = ends[last] - begin;
    for (size_t i = first; i < last; ++i) {
      ends[i] =
          begin + static_cast<int32_t>(num_places * static_cast<int64_t>(i - first + 1) / num_runs);
    }
  }
}

int64_t SubtreePacker::num_common_segments() const {
  int64_t num_segments = 0;
  int32_t begin = 0;
  for (const int32_t end : run_ends_) {
    if (end - begin > 1) {  // on a path, the uppermost node has the smallest index
      const auto common = std::min_element(common_.begin() + begin + 1, common_.begin() + end);
      num_segments += segments_above_[*common];
    }
    begin = end;
  }
  return num_segments;
}

int32_t SubtreePacker::span_of(const PrefixForest& forest, int32_t top, int32_t bottom,
                               int32_t request, Packing& out) {
  KnownSpan& known = known_spans_[bottom];
  if (known.top != top) {
    known.top = top;
    known.span = out.add_span(request, forest.nodes()[top].kv_begin, forest.nodes()[bottom].kv_end);
  }
  return known.span;
}

void SubtreePacker::emit_pack(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                              int32_t begin, int32_t end, Packing& out) {
  const std::vector<ForestNode>& nodes = forest.nodes();
  const std::vector<int32_t>& order = forest.requests_in_tree_order();
  const auto segment_begin = static_cast<int32_t>(out.segments.size());
  const auto request_begin = static_cast<int32_t>(out.requests.size());
  const int32_t num_requests = end - begin;
  const auto last_holder = [&](int32_t node) {
    return std::min(nodes[node].holder_begin + nodes[node].num_holders, end) - begin;
  };
  // True if all holders are in the pack. Then only this pack reads the node and the nodes below it.
  const auto has_all_holders = [&](int32_t node) {
    const int32_t holder = nodes[node].holder_begin;
    return holder >= begin && holder + nodes[node].num_holders <= end;
  };
  for (int32_t place = begin; place < end; ++place) {
    const int32_t request = order[place];
    const int32_t first = place - begin;
    out.requests.push_back(request);
    int32_t private_begin = forest.private_begin(request);
    bool is_private_once = true;
    // This request is the pack's first holder of the nodes from its anchor up to `known`, which is not included.
    int32_t node = forest.anchor(request);
    const int32_t known = first == 0 ? -1 : common_[place];
    if (num_requests == 1 && node >= 0) {
      node = known;
      private_begin = 0;
      is_private_once = false;
    }
    for (; node != known && last_holder(node) == first + 1; node = nodes[node].parent) {
      private_begin = nodes[node].kv_begin;  // no other request of the pack holds the node
      is_private_once = false;
    }
    ranges_.clear();
    while (node != known) {
      const int32_t last = last_holder(node);
      int32_t top = node;
      if (last - first == num_requests) {
        // All requests of the pack hold this node and its ancestors, so the walk can skip to the segment's first node.
        top = segment_top_[node];
      } else {
        while (segment_top_[top] != top && nodes[top].parent != known &&
               last_holder(nodes[top].parent) == last) {
          top = nodes[top].parent;
        }
      }
      ranges_.push_back({.top = top, .bottom = node, .last = last});
      node = nodes[top].parent;
    }
    for (; !ranges_.empty(); ranges_.pop_back()) {
      const auto& [top, bottom, last] = ranges_.back();
      out.segments.push_back({.span = span_of(forest, top, bottom, request, out),
                              .kv_begin = nodes[top].kv_begin,
                              .kv_end = nodes[bottom].kv_end,
                              .first = first,
                              .end = last,
                              .is_open = false,
                              .is_read_once = has_all_holders(top)});
    }
    if (seq_lens[request] == private_begin) continue;
    out.segments.push_back({.span = Segment::kPrivate,
                            .kv_begin = private_begin,
                            .kv_end = seq_lens[request],
                            .first = first,
                            .end = first + 1,
                            .is_open = true,
                            .is_read_once = is_private_once});
  }
  const auto num_segments = static_cast<int32_t>(out.segments.size()) - segment_begin;
  if (num_segments == 0) {  // a padding row
    out.requests.resize(request_begin);
    return;
  }
  out.packs.push_back({.request_begin = request_begin,
                       .num_requests = num_requests,
                       .segment_begin = segment_begin,
                       .num_segments = num_segments});
}

}  // namespace pat
