#include "packing.h"

#include "check.h"

namespace pat {

Policy policy_from_name(std::string_view name) {
  if (name == "memory") return Policy::kMemory;
  if (name == "paper") return Policy::kPaper;
  if (name == "per-node") return Policy::kPerNode;
  if (name == "query-centric") return Policy::kQueryCentric;
  throw_invalid("policy must be one of memory, paper, per-node, query-centric, got ", name);
}

bool Packer::merges(int32_t parent_tokens, int32_t parent_requests, int32_t child_requests,
                    bool leaves_single_partial) const {
  if (policy_ == Policy::kPerNode) return false;
  if (policy_ == Policy::kPaper) return 4 * int64_t{child_requests} >= parent_tokens;

  // Merging makes the child's tiles read the parent's range as well, and leaves the parent's pack fewer.
  const int32_t staying_tiles = tiles_.num_tiles(parent_requests - child_requests);
  const int64_t added_passes =
      tiles_.num_tiles(child_requests) + staying_tiles - tiles_.num_tiles(parent_requests);
  // Each row of the child has one partial less; two less if its output is then stored directly.
  const int64_t saved_partials =
      int64_t{child_requests} * tiles_.group_size() * (leaves_single_partial ? 2 : 1);
  const int64_t saved_pieces = tiles_.num_tiles(parent_requests) - staying_tiles;
  return added_passes * parent_tokens <=
         saved_partials * cost_.partial_row + saved_pieces * cost_.piece;
}

void Packer::pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out) {
  out.packs.clear();
  out.requests.clear();
  state_.clear();
  if (policy_ == Policy::kQueryCentric) {
    private_begin_.assign(seq_lens.size(), 0);
  } else {
    decide(forest, seq_lens);
  }
  emit(forest, seq_lens, out);
}

void Packer::decide(const PrefixForest& forest, std::span<const int32_t> seq_lens) {
  for (const ForestNode& node : forest.nodes()) {
    NodeState state{.pack_begin = node.kv_begin,
                    .remaining = node.num_holders,
                    .cursor = 0,
                    .left_parent = false};
    if (node.parent >= 0) {
      NodeState& parent = state_[node.parent];
      if (merges(node.kv_begin - parent.pack_begin, parent.remaining, node.num_holders, false)) {
        state.pack_begin = parent.pack_begin;
        state.left_parent = true;
        parent.remaining -= node.num_holders;
      }
    }
    state_.push_back(state);
  }
  private_begin_.resize(seq_lens.size());
  for (const int32_t request : forest.requests_in_tree_order()) {
    int32_t& begin = private_begin_[request];
    begin = forest.private_begin(request);
    const int32_t anchor = forest.anchor(request);
    // An empty private range is no child: there is nothing to read alone.
    if (anchor < 0 || seq_lens[request] == begin) continue;
    NodeState& parent = state_[anchor];
    if (merges(begin - parent.pack_begin, parent.remaining, 1, parent.pack_begin == 0)) {
      begin = parent.pack_begin;
      --parent.remaining;
    }
  }
}

void Packer::emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out) {
  int32_t next = 0;
  for (size_t n = 0; n < state_.size(); ++n) {
    state_[n].cursor = next;
    if (state_[n].remaining == 0) continue;
    out.packs.push_back({.kv_begin = state_[n].pack_begin,
                         .kv_end = forest.nodes()[n].kv_end,
                         .is_private = false,
                         .num_requests = state_[n].remaining,
                         .request_begin = next});
    next += state_[n].remaining;
  }
  out.requests.resize(next);
  for (const int32_t request : forest.requests_in_tree_order()) {
    // Up the path: a request is missing from a node's pack if the range below took it along.
    bool taken = private_begin_[request] < forest.private_begin(request);
    for (int32_t n = state_.empty() ? -1 : forest.anchor(request); n >= 0;
         n = forest.nodes()[n].parent) {
      if (!taken) out.requests[state_[n].cursor++] = request;
      taken = state_[n].left_parent;
    }
  }
  for (const int32_t request : forest.requests_in_tree_order()) {
    if (seq_lens[request] == private_begin_[request]) continue;
    out.packs.push_back({.kv_begin = private_begin_[request],
                         .kv_end = seq_lens[request],
                         .is_private = true,
                         .num_requests = 1,
                         .request_begin = static_cast<int32_t>(out.requests.size())});
    out.requests.push_back(request);
  }
}

}  // namespace pat
