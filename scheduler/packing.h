// Stage 2: forest -> packs. The requests of a pack read KV ranges together.
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

// How requests are divided into packs. subtree_tiles.h has the default, kMemory; Packer::merges() has the others. To
// add a policy, add it here and to kPolicies, give Packer::merges() its rule, and add its name to `POLICIES` of
// sglang_pat/support.py.
enum class Policy {
  kMemory,  // runs of neighbours in the tree, cut where that moves the fewest bytes: SubtreeTiler
  kPaper,  // PAT's Algorithm 1 as printed: merges a child with at least a request per 4 tokens of its parent
  kCompute,       // FastTree's cost model: merges if that saves padding of tiles, and partials
  kPerNode,       // never merges: every forest node is a pack of its own
  kQueryCentric,  // always merges: every request reads its KV alone, as without packing
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

// The packs of a batch have at most this many requests for each request of the batch, private packs included. This
// bounds the partials, for which CUDA graphs reserve memory.
inline constexpr int32_t kMaxPacksPerRequest = 12;

class Packer {
 public:
  Packer(Policy policy, const PackingCosts& cost, const TileSelection& tiles)
      : policy_(policy), cost_(cost), tiles_(tiles), tiler_(cost, tiles) {}

  // Every policy but `memory` is PAT's Algorithm 1 (section 5.1), generalised to any group size and to packs of several
  // tiles: one decision per edge, parents before children, in time linear in nodes, edges and packed requests.
  //
  // In very deep trees the result may exceed kMaxPacksPerRequest. pack() then doubles the price of partials and
  // repeats, until the limit holds. A higher price makes more children merge. The first children to merge are those
  // that save the most partials for each token that is then read again.
  //
  // Throws std::length_error if int32 cannot count the requests of all packs, or their shared slots.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  struct NodeState {
    // Where the node's pack begins: before the node if it was merged into its parent.
    int32_t pack_begin;
    int32_t remaining;  // requests still in the node's pack
    int32_t cursor;     // next free place in the pack's run of Packing::requests
    int32_t below;      // holders that also hold a child; they come first
    int32_t passed;     // how many of the first holders emit_requests() has handled
    bool left_parent;   // merged into its parent, whose pack then lacks the node's requests
  };

  // A child that may leave its parent's pack.
  struct Edge {
    int32_t parent_tokens;    // of the parent's pack, with the ranges that it was merged with
    int32_t parent_requests;  // of the parent's pack, the child's included
    int32_t child_tokens;
    int32_t child_requests;
    bool leaves_single_partial;  // once merged, the child's requests have no other partial
  };

  // Decides each edge. Returns the sum of the requests of all packs.
  int64_t decide(const PrefixForest& forest, std::span<const int32_t> seq_lens);
  void emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);
  // Fills Packing::requests for the packs of nodes, each pack in tree order.
  void emit_requests(const PrefixForest& forest, Packing& out);
  bool merges(const Edge& edge) const;
  bool merging_moves_less(const Edge& edge) const;
  bool merging_computes_less(const Edge& edge) const;

  Policy policy_;
  PackingCosts cost_;
  TileSelection tiles_;
  SubtreeTiler tiler_;
  int64_t raised_price_ =
      0;  // of a partial row, in 1 / kCostUnit tokens; 0: the policy alone decides
  std::vector<NodeState> state_;
  std::vector<int32_t> private_begin_;  // per request, after merging
};

}  // namespace pat
