// Stage 2: forest -> packs. A pack is a set of requests that read KV ranges together.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cost_model.h"
#include "plan_format.h"
#include "prefix_forest.h"
#include "subtree_tiles.h"
#include "tile_selection.h"

namespace pat {

// Rule by which requests are divided into packs. The default, kMemory, is in subtree_tiles.h; the others are in
// Packer::merges(). A new one is a value here, a name below, and a name in `POLICIES` of sglang_pat/support.py.
enum class Policy {
  kMemory,  // runs of neighbours in the tree, cut where that moves the fewest bytes; see SubtreeTiler
  kPaper,  // PAT's Algorithm 1 as printed: a child takes its parent's range along where 4 * requests >= its length
  kCompute,  // FastTree's cost model: where tiles are padded less, and partials avoided
  kPerNode,  // never: every forest node is a pack of its own
  kQueryCentric,  // always: every request reads its whole KV alone, as decode attention without packing does
};

struct NamedPolicy {
  std::string_view name;
  Policy policy;
};
inline constexpr NamedPolicy kPolicies[] = {{"memory", Policy::kMemory},
                                            {"paper", Policy::kPaper},
                                            {"compute", Policy::kCompute},
                                            {"per-node", Policy::kPerNode},
                                            {"query-centric", Policy::kQueryCentric}};

// Throws std::invalid_argument naming the allowed values.
Policy policy_from_name(std::string_view name);

// Most packs that a request takes part in, its private one included, in the mean of a batch. It bounds the
// partials of a batch, for which CUDA graphs reserve memory.
inline constexpr int32_t kMaxPacksPerRequest = 12;

class Packer {
 public:
  Packer(Policy policy, const PackingCosts& cost, const TileSelection& tiles)
      : policy_(policy), cost_(cost), tiles_(tiles), tiler_(cost, tiles) {}

  // Every policy but `memory` is PAT's Algorithm 1 (section 5.1), generalised to any group size and to packs of several
  // tiles: one decision per edge, parents before children. Linear in nodes + edges + packed requests.
  //
  // In very deep trees that may exceed kMaxPacksPerRequest. Then it is repeated with partials at twice the price,
  // four times, and so on, until it does not: edges leave in the order of what they cost.
  //
  // Throws std::length_error if the requests of all packs, or their shared slots, are more than int32 can count.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  struct NodeState {
    // Begin of the node's pack: before the node itself if it was merged upwards.
    int32_t pack_begin;
    int32_t remaining;  // requests still in the node's pack
    int32_t cursor;     // next free place in the pack's run of Packing::requests
    int32_t below;      // holders that go on to a child; they come first
    int32_t passed;     // holders, from the first one on, that emit_requests() is done with
    bool left_parent;   // merged upwards: its requests are not in the parent's pack
  };

  // A child that may leave its parent's pack.
  struct Edge {
    int32_t parent_tokens;    // of the parent's pack, ranges it was merged with included
    int32_t parent_requests;  // in the parent's pack, the child's included
    int32_t child_tokens;
    int32_t child_requests;
    bool leaves_single_partial;  // merged, the child's requests have no other partial
  };

  // Decides for each edge. Returns how many requests all packs have together.
  int64_t decide(const PrefixForest& forest, std::span<const int32_t> seq_lens);
  void emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);
  // Fills Packing::requests of the packs of nodes, each in tree order.
  void emit_requests(const PrefixForest& forest, Packing& out);
  bool merges(const Edge& edge) const;
  bool merging_moves_less(const Edge& edge) const;
  bool merging_computes_less(const Edge& edge) const;

  Policy policy_;
  PackingCosts cost_;
  TileSelection tiles_;
  SubtreeTiler tiler_;
  int64_t raised_price_ = 0;  // of a partial row, in 1 / kCostUnit tokens; 0: the policy decides
  std::vector<NodeState> state_;
  std::vector<int32_t> private_begin_;  // per request, after merging
};

}  // namespace pat
