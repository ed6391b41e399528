#include "packer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "check.h"

namespace pat {

namespace {

// Policy::kCompute: the tile sizes of FastTree's kernels, and the costs of padding and of partials. The paper (section
// 4.2) leaves these costs to profiling. Here a padded row, a padded token and a partial are weighted 20 : 10 : 3.
constexpr int64_t kManyRows = 64;
constexpr int64_t kFewRows = 16;
constexpr int64_t kTokensPerTile = 32;
constexpr int64_t kRowPaddingWeight = 20;
constexpr int64_t kTokenPaddingWeight = 10;
constexpr int64_t kPartialWeight = 3;

// Cost of a pack's padding: padding rows in its last tile, and padding tokens if the pack has fewer than kTokensPerTile
// tokens.
int64_t padding_cost(int64_t rows, int64_t tokens) {
  const int64_t tile_rows = rows > kFewRows ? kManyRows : kFewRows;
  const int64_t row_padding = (tile_rows - rows % tile_rows) % tile_rows;
  const int64_t token_padding = std::max<int64_t>(kTokensPerTile - tokens, 0);
  return kRowPaddingWeight * row_padding * tokens + kTokenPaddingWeight * token_padding * rows;
}

}  // namespace

Policy policy_from_name(std::string_view name) {
  std::string names;
  for (const auto& [known, policy] : kPolicies) {
    if (name == known) return policy;
    names.append(names.empty() ? "" : ", ").append(known);
  }
  throw_invalid("policy must be one of ", names, ", got ", name);
}

bool Packer::merges(const Edge& edge) const {
  if (raised_price_ > 0 && merging_moves_less(edge)) return true;
  if (policy_ == Policy::kPaper) return 4 * int64_t{edge.child_requests} >= edge.parent_tokens;
  return policy_ == Policy::kCompute && merging_computes_less(edge);
}

// True if merging moves fewer bytes by estimate. After a merge, the child's tiles read the parent's range too, but the
// parent's pack may need fewer tiles.
bool Packer::merging_moves_less(const Edge& edge) const {
  const int32_t staying_tiles = tiles_.num_tiles(edge.parent_requests - edge.child_requests);
  const int64_t added_passes = tiles_.num_tiles(edge.child_requests) + staying_tiles -
                               tiles_.num_tiles(edge.parent_requests);
  // Each row of the child saves one partial, or both partials if its output can then be stored directly.
  const int64_t saved_partials =
      int64_t{edge.child_requests} * tiles_.group_size() * (edge.leaves_single_partial ? 2 : 1);
  const int64_t saved_items = tiles_.num_tiles(edge.parent_requests) - staying_tiles;
  return added_passes * edge.parent_tokens * kCostUnit <=
         saved_partials * raised_price_ + saved_items * cost_.item;
}

bool Packer::merging_computes_less(const Edge& edge) const {
  const int64_t group = tiles_.group_size();
  const int64_t parent_rows = group * edge.parent_requests;
  const int64_t child_rows = group * edge.child_requests;
  const int64_t apart = padding_cost(parent_rows, edge.parent_tokens) +
                        padding_cost(child_rows, edge.child_tokens) + kPartialWeight * child_rows;
  const int64_t merged = padding_cost(parent_rows - child_rows, edge.parent_tokens) +
                         padding_cost(child_rows, int64_t{edge.parent_tokens} + edge.child_tokens);
  return apart > merged;
}

void Packer::pack(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out) {
  const int64_t most = kMaxPacksPerRequest * static_cast<int64_t>(seq_lens.size());
  if (policy_ == Policy::kMemory) {
    subtree_packer_.pack(forest, seq_lens, out);
    out.packing_slack = most - static_cast<int64_t>(out.requests.size());
    return;
  }
  out.clear();
  if (policy_ == Policy::kQueryCentric) {
    state_.clear();
    private_begin_.assign(seq_lens.size(), 0);
  } else {
    raised_price_ = 0;
    // The loop ends, because every request is in one pack once a partial costs more than any range.
    for (int64_t price = kCostUnit; decide(forest, seq_lens) > most;) {
      raised_price_ = price *= 2;
    }
  }
  emit(forest, seq_lens, out);
  out.packing_slack = std::max<int64_t>(most - static_cast<int64_t>(out.requests.size()), 0);
}

int64_t Packer::decide(const PrefixForest& forest, std::span<const int32_t> seq_lens) {
  state_.clear();
  int64_t num_packed = 0;
  for (const ForestNode& node : forest.nodes()) {
    NodeState state{.pack_begin = node.kv_begin,
                    .remaining = node.num_holders,
                    .cursor = 0,
                    .below = 0,
                    .passed = 0,
                    .left_parent = false};
    num_packed += node.num_holders;
    if (node.parent >= 0) {
      NodeState& parent = state_[node.parent];
      parent.below += node.num_holders;
      if (merges({.parent_tokens = node.kv_begin - parent.pack_begin,
                  .parent_requests = parent.remaining,
                  .child_tokens = node.kv_end - node.kv_begin,
                  .child_requests = node.num_holders,
                  .leaves_single_partial = false})) {
        state.pack_begin = parent.pack_begin;
        state.left_parent = true;
        parent.remaining -= node.num_holders;
        num_packed -= node.num_holders;
      }
    }
    state_.push_back(state);
  }
  private_begin_.resize(seq_lens.size());
  for (const int32_t request : forest.requests_in_tree_order()) {
    int32_t& begin = private_begin_[request];
    begin = forest.private_begin(request);
    const int32_t anchor = forest.anchor(request);
    if (seq_lens[request] == begin) continue;  // the request has no private range
    ++num_packed;
    if (anchor < 0) continue;
    NodeState& parent = state_[anchor];
    if (merges({.parent_tokens = begin - parent.pack_begin,
                .parent_requests = parent.remaining,
                .child_tokens = seq_lens[request] - begin,
                .child_requests = 1,
                .leaves_single_partial = parent.pack_begin == 0})) {
      begin = parent.pack_begin;
      --parent.remaining;
      --num_packed;
    }
  }
  return num_packed;
}

void Packer::emit(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& out) {
  int64_t next = 0;
  for (NodeState& state : state_) {
    state.cursor = static_cast<int32_t>(next);
    if (state.remaining == 0) continue;
    out.packs.push_back({.request_begin = state.cursor,
                         .num_requests = state.remaining,
                         .segment_begin = static_cast<int32_t>(out.packs.size()),
                         .num_segments = 1});
    next += state.remaining;
    if (next + static_cast<int64_t>(seq_lens.size()) > std::numeric_limits<int32_t>::max()) {
      throw std::length_error("the requests of all packs do not fit into int32");
    }
  }
  out.requests.resize(next);
  if (next > 0) emit_requests(forest, out);
  for (size_t n = 0; n < state_.size(); ++n) {
    if (state_[n].remaining == 0) continue;
    const Pack& pack = out.packs[out.segments.size()];
    const ForestNode& node = forest.nodes()[n];
    const int32_t kv_end = node.kv_end;
    const bool is_read_once = state_[n].pack_begin == node.kv_begin &&
                              pack.num_requests == node.num_holders &&
                              pack.num_requests <= tiles_.requests_per_tile();
    const int32_t span =
        out.add_span(out.requests[pack.request_begin], state_[n].pack_begin, kv_end);
    out.segments.push_back({.span = span,
                            .kv_begin = state_[n].pack_begin,
                            .kv_end = kv_end,
                            .first = 0,
                            .end = pack.num_requests,
                            .is_open = false,
                            .is_read_once = is_read_once});
  }
  for (const int32_t request : forest.requests_in_tree_order()) {
    if (seq_lens[request] == private_begin_[request]) continue;
    out.packs.push_back({.request_begin = static_cast<int32_t>(out.requests.size()),
                         .num_requests = 1,
                         .segment_begin = static_cast<int32_t>(out.segments.size()),
                         .num_segments = 1});
    out.segments.push_back(
        {.span = Segment::kPrivate,
         .kv_begin = private_begin_[request],
         .kv_end = seq_lens[request],
         .first = 0,
         .end = 1,
         .is_open = true,
         .is_read_once = private_begin_[request] == forest.private_begin(request)});
    out.requests.push_back(request);
  }
}

// In tree order, a node's holders follow one another: the holders of each child in turn, then the requests that end at
// the node. The node's pack has all of its holders, except holders of merged children and requests whose private range
// was merged.
void Packer::emit_requests(const PrefixForest& forest, Packing& out) {
  const std::vector<int32_t>& order = forest.requests_in_tree_order();
  const auto copy_up_to = [&](NodeState& state, const ForestNode& node, int32_t position) {
    if (state.remaining > 0) {
      const auto first = order.begin() + node.holder_begin + state.passed;
      const auto last = order.begin() + position;
      std::copy(first, last, out.requests.begin() + state.cursor);
      state.cursor += static_cast<int32_t>(last - first);
    }
    state.passed = position - node.holder_begin;
  };
  for (size_t n = 0; n < state_.size(); ++n) {
    const ForestNode& node = forest.nodes()[n];
    if (!state_[n].left_parent) continue;
    NodeState& parent = state_[node.parent];
    copy_up_to(parent, forest.nodes()[node.parent], node.holder_begin);
    parent.passed += node.num_holders;
  }
  // Adds the remaining holders of each node: holders of children that were not merged, and requests that end at the
  // node.
  for (size_t n = 0; n < state_.size(); ++n) {
    NodeState& state = state_[n];
    if (state.remaining == 0) continue;
    const ForestNode& node = forest.nodes()[n];
    copy_up_to(state, node, node.holder_begin + state.below);
    for (const int32_t request : forest.holders(node).subspan(state.below)) {
      if (private_begin_[request] == node.kv_end) out.requests[state.cursor++] = request;
    }
  }
}

}  // namespace pat
