// Policy::kMemory. A pack has some requests that are neighbours in tree order, and all KV ranges of these requests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost_model.h"
#include "packing.h"
#include "prefix_forest.h"
#include "run_finder.h"
#include "tile_selection.h"

namespace pat {

class SubtreePacker {
 public:
  SubtreePacker(const PackingCosts& cost, const TileSelection& tiles)
      : tiles_(tiles), runs_(cost) {}

  // Divides the requests, in tree order, into the cheapest runs that fit into a tile. Each run is a pack. Takes time
  // linear in nodes, requests and segments.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  // For each place in tree order, finds the deepest node that its request shares with the request before it.
  void find_common_nodes(const PrefixForest& forest);
  // If all neighbours in some consecutive runs share the same node, a cut between any two of them costs the same. Makes
  // such runs equally long, so that their tiles need the same time for the shared KV.
  void even_out_runs();
  // Fills `out` with the chosen runs. A node shares a segment with its parent if the same requests of a pack hold both
  // nodes. In addition, both nodes must be short if `fused_levels` is 0, or else be in the same group of `fused_levels`
  // levels. Returns false if the batch then has too many segments.
  bool emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t fused_levels,
            Packing& out);
  // Counts, over all packs, the segments that all requests of their pack read. In a deep tree, these are nearly all
  // segments.
  int64_t num_common_segments() const;
  void emit_pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, int32_t begin,
                 int32_t end, Packing& out);
  int32_t span_of(const PrefixForest& forest, int32_t top, int32_t bottom, int32_t request,
                  Packing& out);

  TileSelection tiles_;
  RunFinder runs_;

  std::vector<int32_t> depth_;  // per node: its level, 0 for a root
  // Per node: the deepest node that its first holder shares with the request before, in tree order; -1: none.
  std::vector<int32_t> common_before_;
  std::vector<int32_t> common_;  // per place in tree order: see find_common_nodes(); -1: none
  std::vector<int32_t> run_ends_;
  // Per node: first node of the segment that ends with this node, if the same requests of a pack hold both nodes.
  std::vector<int32_t> segment_top_;
  std::vector<int32_t> segments_above_;  // per node: such segments from the root to this node
  struct Range {
    int32_t top;     // first node
    int32_t bottom;  // last node
    int32_t last;    // end of the pack's requests that hold both
  };
  std::vector<Range> ranges_;  // a request's segments in reverse order
  struct KnownSpan {
    int32_t top;  // first node of the span; -1: no span yet
    int32_t span;
  };
  std::vector<KnownSpan> known_spans_;  // per node: latest span that ends with it
};

}  // namespace pat
