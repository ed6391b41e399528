// Cuts the paths of a batch for layers with a window. What is left of each request, its row, is planned like a request
// of an ordinary batch.
//
// A request attends to its last `window` tokens, which form its row. Rows that share KV are put into classes. The rows
// of a class have the same cut, a position that lies in the windows of all of them. A row begins with the tokens from
// the cut on. The window's tokens before the cut come after them, which is allowed because attention does not depend on
// the order of keys. So when the window moves on, the shared KV keeps its place in the row, and the plan stays valid
// until the start of the window has passed the cut.
//
// Chunked windows do not move on with each token. A request's cut is the last multiple of `window` below the request's
// length. The request attends to the tokens from its cut on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefix_forest.h"

namespace pat {

struct WindowRule {
  int32_t window = 0;  // tokens that a request attends to, including its new one; 0: all
  int32_t slack = 0;   // tokens by which requests may grow before they need another cut
  int32_t ahead = 0;   // tokens by which a request may be longer on the device than on the host
  bool chunked = false;

  // Number of tokens that a request of this length attends to.
  int32_t attended(int32_t length) const {
    if (chunked) return length == 0 ? 0 : (length - 1) % window + 1;
    return length < window ? length : window;
  }
};

// Assigns the requests of a batch to classes and cuts their paths. cut() reuses its buffers.
class WindowCut {
 public:
  // rows_per_class: upper bound for the rows of a class; 1 counts as 2. The kernels would read the shared KV of a
  // larger class more than once. Throws std::invalid_argument if a number of the rule is out of range.
  WindowCut(const WindowRule& rule, int32_t rows_per_class);

  // Cuts the paths of a forest that has been arranged for seq_lens. Requests of length 0 are padding. Takes time linear
  // in path nodes, and in requests times rows_per_class.
  void cut(const PrefixForest& forest, std::span<const int32_t> seq_lens);

  // The cut paths. Positions on a path count from its cut.
  PrefixForest& rows() { return rows_; }
  std::span<const int32_t> row_lens() const { return row_lens_; }
  // Per request: position of its cut, or 0 if its row shares nothing.
  std::span<const int32_t> cuts() const { return cuts_; }
  // Per request: the length up to which its cut is valid. INT32_MAX if the row shares nothing, unless windows are
  // chunked.
  std::span<const int32_t> longest() const { return longest_; }

 private:
  struct Row {
    int32_t node;  // the shared node that would save the most tokens; see best_node()
    int32_t cut;   // the cut that the row would have if it were alone in its class
    int32_t request;
  };

  void sort_rows(size_t num_nodes);
  template <typename Key>
  void sort_rows_by(Key key, size_t num_keys);
  void add_runs(std::span<const Row> rows, int32_t node_end, const PrefixForest& forest);
  void add_class(const PrefixForest& forest, std::span<const Row> rows, int32_t cut);

  WindowRule rule_;
  size_t rows_per_class_;
  PrefixForest rows_;
  std::vector<int32_t> row_lens_;
  std::vector<int32_t> cuts_;
  std::vector<int32_t> longest_;
  // Buffers of cut().
  std::vector<Row> whole_;    // rows that stay shorter than the window for `slack` more tokens
  std::vector<Row> others_;   // the other rows
  std::vector<Row> sorted_;   // others_, sorted by a key
  std::vector<size_t> next_;  // per key: place of its next row in sorted_
  std::vector<int64_t> saved_;
  std::vector<int32_t> class_;
};

}  // namespace pat
