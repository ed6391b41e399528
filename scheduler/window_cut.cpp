#include "window_cut.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "check.h"

namespace pat {

namespace {

constexpr int32_t kAlone = -1;
constexpr int32_t kNever = std::numeric_limits<int32_t>::max();  // no length goes beyond it
constexpr int64_t kClassCost = 64;  // KV tokens that one more class must save

struct Row {
  int32_t node;  // the one by which the request may save most
  int32_t cut;   // where the row would be cut if it were alone in its class
  int32_t request;

  auto operator<=>(const Row&) const = default;
};

// The classes of a batch.
struct Classes {
  std::vector<int32_t> of;    // per request; kAlone: its row shares nothing
  std::vector<int32_t> cuts;  // per class

  void add(std::span<const Row> rows, int32_t cut) {
    if (rows.size() < 2) return;
    for (const Row& row : rows) of[row.request] = static_cast<int32_t>(cuts.size());
    cuts.push_back(cut);
  }
};

// The node of a path that saves most from `cut` on, if all its holders had this cut.
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

// Splits rows that hold one node, sorted by cut, into the runs that save most. A run has the cut of its last row.
void add_runs(std::span<const Row> rows, int32_t node_end, size_t rows_per_class,
              Classes& classes) {
  std::vector<int64_t> saved(rows.size() + 1, 0);  // by the first rows
  std::vector<size_t> begin(rows.size() + 1, 0);   // of the run that ends there
  for (size_t end = 1; end <= rows.size(); ++end) {
    const int64_t tokens = node_end - rows[end - 1].cut;
    saved[end] = saved[end - 1];
    begin[end] = end - 1;
    for (size_t size = 2; size <= std::min(end, rows_per_class); ++size) {
      const int64_t all = saved[end - size] + tokens * static_cast<int64_t>(size - 1) - kClassCost;
      if (all > saved[end]) {
        saved[end] = all;
        begin[end] = end - size;
      }
    }
  }
  for (size_t end = rows.size(); end > 0; end = begin[end]) {
    classes.add(rows.subspan(begin[end], end - begin[end]), rows[end - 1].cut);
  }
}

Classes classes_of(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                   const WindowRule& rule) {
  Classes classes{.of = std::vector<int32_t>(seq_lens.size(), kAlone), .cuts = {}};
  std::vector<Row> whole;  // rows whose window has all tokens, and will for a while
  std::vector<Row> rows;
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    const auto request = static_cast<int32_t>(i);
    const int64_t own = int64_t{seq_lens[i]} + rule.slack + rule.ahead - rule.window;
    const auto cut = static_cast<int32_t>(std::clamp<int64_t>(own, 0, kNever));
    if (seq_lens[i] == 0 || forest.private_begin(request) <= cut) continue;
    if (cut == 0) {
      whole.push_back({.node = 0, .cut = 0, .request = request});
    } else {
      const int32_t node = best_node(forest, forest.anchor(request), cut);
      rows.push_back({.node = node, .cut = cut, .request = request});
    }
  }
  classes.add(whole, 0);
  std::sort(rows.begin(), rows.end());
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    while (end < rows.size() && rows[end].node == rows[begin].node) ++end;
    add_runs(std::span(rows).subspan(begin, end - begin), forest.nodes()[rows[begin].node].kv_end,
             static_cast<size_t>(rule.rows_per_class), classes);
  }
  return classes;
}

}  // namespace

WindowCut cut_windows(PrefixForest& forest, std::span<const int32_t> seq_lens,
                      const WindowRule& rule) {
  PAT_CHECK(rule.window >= 1, "window must be at least 1, got ", rule.window);
  PAT_CHECK(rule.slack >= 0 && rule.ahead >= 0, "slack and ahead must not be negative, got ",
            rule.slack, " and ", rule.ahead);
  PAT_CHECK(rule.rows_per_class >= 1, "rows_per_class must be at least 1, got ",
            rule.rows_per_class);
  forest.arrange(seq_lens);
  const Classes classes = classes_of(forest, seq_lens, rule);
  const std::vector<ForestNode>& nodes = forest.nodes();
  const auto num_nodes = static_cast<int64_t>(nodes.size());
  WindowCut result;
  result.path_begin.push_back(0);
  result.cut.assign(seq_lens.size(), 0);
  result.longest.assign(seq_lens.size(), kNever);
  std::vector<int32_t> path;
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    if (const int32_t its = classes.of[i]; its != kAlone) {
      const int32_t cut = result.cut[i] = classes.cuts[its];
      const int64_t longest = int64_t{cut} + rule.window - rule.ahead;
      result.longest[i] = static_cast<int32_t>(std::min<int64_t>(longest, kNever));
      path.clear();
      for (int32_t n = forest.anchor(static_cast<int32_t>(i)); n >= 0 && nodes[n].kv_end > cut;
           n = nodes[n].parent) {
        path.push_back(n);
      }
      for (; !path.empty(); path.pop_back()) {
        const ForestNode& node = nodes[path.back()];
        result.node_id.push_back(its * num_nodes + path.back());
        result.kv_begin.push_back(std::max(node.kv_begin, cut) - cut);
        result.kv_end.push_back(node.kv_end - cut);
      }
    }
    result.path_begin.push_back(static_cast<int32_t>(result.node_id.size()));
  }
  return result;
}

}  // namespace pat
