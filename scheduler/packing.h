// Stage 2 of the scheduler turns a forest into packs. The requests of a pack read KV ranges together.
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

// How requests are divided into packs. The default, kMemory, is in subtree_tiles.h; the others are in Packer::merges().
// To add a policy, add it here, to kPolicies and to Packer::merges(), and add its name to POLICIES in
// sglang_pat/support.py.
enum class Policy {
  kMemory,        // packs of neighbours in the tree, chosen to move the fewest bytes (SubtreeTiler)
  kPaper,         // PAT's Algorithm 1 as printed: merges a child if requests >= parent's tokens / 4
  kCompute,       // FastTree's cost model: merges if padding and partials then cost less
  kPerNode,       // never merges: every forest node is a pack
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

// Throws std::invalid_argument, which lists the allowed values, if there is no such policy.
Policy policy_from_name(std::string_view name);

// A request of a batch is in at most this many packs on average, private packs included. This bounds the partials, for
// which CUDA graphs reserve memory.
inline constexpr int32_t kMaxPacksPerRequest = 12;

class Packer {
 public:
  Packer(Policy policy, const PackingCosts& cost, const TileSelection& tiles)
      : policy_(policy), cost_(cost), tiles_(tiles), tiler_(cost, tiles) {}

  // All policies but kMemory follow PAT's Algorithm 1 (section 5.1), generalised to any group size and to packs of
  // several tiles. They decide once per edge, parents before children, in time linear in nodes, edges and packed
  // requests.
  //
  // In very deep trees the packs may exceed kMaxPacksPerRequest. pack() then repeats with a doubled price of partials
  // until they do not. A higher price makes more children merge. The children that save the most partials per repeated
  // token merge first.
  //
  // Throws std::length_error if int32 cannot count the requests of all packs, or their shared slots.
  void pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out);

 private:
  struct NodeState {
    // First position of the node's pack. It lies before the node if the node was merged into its parent.
    int32_t pack_begin;
    int32_t remaining;  // requests that are still in the node's pack
    int32_t cursor;     // the pack's next free place in Packing::requests
    int32_t below;      // holders that also hold a child, which come first
    int32_t passed;     // number of holders that emit_requests() has handled
    bool left_parent;   // merged: the parent's pack lacks the node's requests
  };

  // A child node whose requests may leave the parent's pack, because the child is merged.
  struct Edge {
    int32_t parent_tokens;    // of the parent's pack, including merged ranges
    int32_t parent_requests;  // of the parent's pack, including the child's
    int32_t child_tokens;
    int32_t child_requests;
    bool leaves_single_partial;  // if merged, the child's requests have no other partial
  };

  // Decides for each edge whether to merge. Returns the sum of the requests of all packs.
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
  // Price of a partial row, in 1 / kCostUnit tokens. 0: only the policy decides about merges.
  int64_t raised_price_ = 0;
  std::vector<NodeState> state_;
  std::vector<int32_t> private_begin_;  // per request: begin of its private pack
};

}  // namespace pat
