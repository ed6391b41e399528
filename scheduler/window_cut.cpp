#include "window_cut.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "check.h"

namespace pat {

namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max();  // no length exceeds it
constexpr int64_t kClassCost = 64;  // KV tokens that an additional class must save

// Of the nodes on the path that ends at `last`, returns the node that would save the most KV tokens from `cut` on if
// all holders of the node had this cut.
int32_t best_node(const PrefixForest& forest, int32_t last, int32_t cut) {
  const std::vector<ForestNode>& nodes = forest.nodes();
  int32_t best = last;
  int64_t most = 0;
  for (int32_t n = last; n >= 0 && nodes[n].kv_end > cut; n = nodes[n].parent) {
    const int64_t tokens = nodes[n].kv_end - std::max(nodes[n].kv_begin, cut);
    const int64_t saved = tokens * (nodes[n].num_holders - 1);
    if (saved > most) std::tie(best, most) = std::pair(n, saved);
  }
  return best;
}

}  // namespace

WindowCut::WindowCut(const WindowRule& rule, int32_t rows_per_class)
    : rule_(rule), rows_per_class_(static_cast<size_t>(std::max(2, rows_per_class))) {
  PAT_CHECK(rule.window >= 0, "window must not be negative, got ", rule.window);
  PAT_CHECK(rule.slack >= 0 && rule.ahead >= 0, "slack and ahead must not be negative, got ",
            rule.slack, " and ", rule.ahead);
  PAT_CHECK(!rule.chunked || rule.ahead == 0, "ahead must be 0 with chunks, got ", rule.ahead);
}

void WindowCut::add_class(const PrefixForest& forest, std::span<const Row> rows, int32_t cut) {
  if (rows.size() < 2) return;
  const int64_t longest = int64_t{cut} + rule_.window - rule_.ahead;
  class_.clear();
  for (const Row& row : rows) {
    class_.push_back(row.request);
    cuts_[row.request] = cut;
    longest_[row.request] = static_cast<int32_t>(std::min<int64_t>(longest, kNever));
  }
  rows_.add_cut_paths(forest, class_, cut);
}

// Divides `rows` into the runs that save the most tokens. All rows hold the same node and are sorted by cut. Each run
// becomes a class, with the cut of its last row.
void WindowCut::add_runs(std::span<const Row> rows, int32_t node_end, const PrefixForest& forest) {
  // Returns the tokens that the class of rows [begin, end) saves.
  const auto saved_by = [&](size_t begin, size_t end) {
    return int64_t{node_end - rows[end - 1].cut} * static_cast<int64_t>(end - begin - 1) -
           kClassCost;
  };
  saved_.assign(rows.size() + 1, 0);  // per place: the most tokens that the rows before it can save
  for (size_t end = 1; end <= rows.size(); ++end) {
    int64_t most = saved_[end - 1];
    for (size_t begin = end - std::min(end, rows_per_class_); begin + 1 < end; ++begin) {
      most = std::max(most, saved_[begin] + saved_by(begin, end));
    }
    saved_[end] = most;
  }
  // Finds the runs again, from the last one on. This takes less time than storing them above, because the loop above
  // then needs a branch that the CPU mispredicts.
  for (size_t end = rows.size(), begin; end > 0; end = begin) {
    begin = end - 1;
    if (saved_[begin] == saved_[end]) continue;
    do --begin;
    while (saved_[begin] + saved_by(begin, end) < saved_[end]);
    add_class(forest, rows.subspan(begin, end - begin), rows[end - 1].cut);
  }
}

void WindowCut::cut(const PrefixForest& forest, std::span<const int32_t> seq_lens) {
  rows_.clear(static_cast<size_t>(forest.num_requests()));
  cuts_.assign(seq_lens.size(), 0);
  longest_.assign(seq_lens.size(), kNever);
  row_lens_.clear();
  whole_.clear();
  others_.clear();
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    const auto request = static_cast<int32_t>(i);
    row_lens_.push_back(rule_.attended(seq_lens[i]));
    int64_t own = int64_t{seq_lens[i]} + rule_.slack + rule_.ahead - rule_.window;
    if (rule_.chunked) {
      own = seq_lens[i] - row_lens_.back();
      longest_[i] = static_cast<int32_t>(std::min<int64_t>(own + rule_.window, kNever));
    }
    const auto cut = static_cast<int32_t>(std::clamp<int64_t>(own, 0, kNever));
    if (seq_lens[i] == 0 || forest.private_begin(request) <= cut) continue;
    if (rule_.chunked) {
      others_.push_back({.node = 0, .cut = cut, .request = request});
    } else if (cut == 0) {
      whole_.push_back({.node = 0, .cut = 0, .request = request});
    } else {
      const int32_t node = best_node(forest, forest.anchor(request), cut);
      others_.push_back({.node = node, .cut = cut, .request = request});
    }
  }
  add_class(forest, whole_, 0);
  sort_rows(forest.nodes().size());
  const std::span<const Row> rows = others_;
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    if (rule_.chunked) {
      while (end < rows.size() && rows[end].cut == rows[begin].cut) ++end;
      add_class(forest, rows.subspan(begin, end - begin), rows[begin].cut);
      continue;
    }
    while (end < rows.size() && rows[end].node == rows[begin].node) ++end;
    add_runs(rows.subspan(begin, end - begin), forest.nodes()[rows[begin].node].kv_end, forest);
  }
}

// Sorts others_ by node and cut. Does not compare rows: the CPU mispredicts comparisons between the rows of a new batch.
void WindowCut::sort_rows(size_t num_nodes) {
  int32_t least = kNever, most = 0;
  for (const Row& row : others_)
    std::tie(least, most) = std::pair(std::min(least, row.cut), std::max(most, row.cut));
  for (int32_t shift = 0; (int64_t{most} - least) >> shift > 0; shift += 8) {
    sort_rows_by([=](const Row& row) { return (row.cut - least) >> shift & 255; }, 256);
  }
  sort_rows_by([](const Row& row) { return row.node; }, num_nodes);
}

// Keeps the order of rows with equal keys. Keys are below num_keys.
template <typename Key>
void WindowCut::sort_rows_by(Key key, size_t num_keys) {
  next_.assign(num_keys + 1, 0);
  for (const Row& row : others_) ++next_[key(row) + 1];
  std::partial_sum(next_.begin(), next_.end(), next_.begin());
  sorted_.resize(others_.size());
  for (const Row& row : others_) sorted_[next_[key(row)]++] = row;
  std::swap(others_, sorted_);
}

}  // namespace pat
