// Stage 2 of the scheduler turns a forest into packs.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cost_model.h"
#include "packing.h"
#include "prefix_forest.h"
#include "subtree_packer.h"
#include "tile_selection.h"

namespace pat {

// How requests are divided into packs. The default, kMemory, is in subtree_packer.h, the others in Packer::merges(). To
// add a policy, add it here, to kPolicies and to Packer::merges(), and add its name to POLICIES in
// sglang_pat/support.py.
enum class Policy {
  kMemory,   // packs of neighbours in the tree, chosen to move the fewest bytes (SubtreePacker)
  kPaper,    // PAT's Algorithm 1 as printed: merges if 4 * child's requests >= parent's tokens
  kCompute,  // FastTree's cost model: merges a child if padding and partials then cost less
  kPerNode,  // never merges: every forest node is a pack
  kQueryCentric,  // always merges: every request is a pack
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

// If no policy has this name, throws std::invalid_argument with the allowed names.
Policy policy_from_name(std::string_view name);

class Packer {
 public:
  Packer(Policy policy, const PackingCosts& cost, const TileSelection& tiles)
      : policy_(policy), cost_(cost), tiles_(tiles), subtree_packer_(cost, tiles) {}

  // All policies but kMemory follow PAT's Algorithm 1 (section 5.1), generalised to any group size and to packs of
  // several tiles. They decide once per edge, parents before children, in time linear in nodes, edges and the requests
  // of all packs.
  //
  // In very deep trees, requests may be in more packs than kMaxPacksPerRequest allows. pack() then doubles the price of
  // partials and decides again, until the packs are within the limit. A higher price makes more children merge, first
  // the children that save the most partials per token that they then read again.
  //
  // Throws std::length_error if int32 cannot count the requests of all packs, or their shared slots.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  struct NodeState {
    // First position of the node's pack. It lies before the node if the node was merged into its parent.
    int32_t pack_begin;
    int32_t remaining;  // requests that are still in the node's pack
    int32_t cursor;     // the pack's next free place in Packing::requests
    int32_t below;      // number of holders that also hold a child; they come first in tree order
    int32_t passed;     // number of holders that emit_requests() has handled
    bool left_parent;   // the node was merged: its requests have left the parent's pack
  };

  // A child (a node or a private range) and its parent's pack. If the child is merged, its requests leave the parent's
  // pack, and the child's pack reads the parent's range too.
  struct Edge {
    int32_t parent_tokens;    // of the parent's pack, including merged ranges
    int32_t parent_requests;  // of the parent's pack, including the child's
    int32_t child_tokens;
    int32_t child_requests;
    bool leaves_single_partial;  // if the child is merged, each of its requests is in one pack only
  };

  // Decides for each edge whether to merge. Returns how many requests all packs have together.
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
  SubtreePacker subtree_packer_;
  // Price of a partial row, in 1 / kCostUnit tokens. 0: only the policy decides about merges.
  int64_t raised_price_ = 0;
  std::vector<NodeState> state_;
  std::vector<int32_t> private_begin_;  // per request: start of its private pack
};

}  // namespace pat
