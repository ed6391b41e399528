// Cuts the paths of a batch for layers with a sliding window. What is left is an ordinary batch.
//
// A request attends to its last `window` tokens, and becomes a row of these. All rows of a class have the same cut. A
// row holds first the path from the cut on, then the tail, and last the tokens of the window that lie before the cut.
// Attention does not depend on the order of keys, so the row's plan stays valid until the window has passed the cut.
//
// Windows that are chunks do not slide: a request attends from the last multiple of `window` on. That multiple is its
// cut.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefix_forest.h"

namespace pat {

struct WindowRule {
  int32_t window = 0;  // tokens that a request attends to, its new one included; 0: all
  int32_t slack = 0;   // tokens by which each request may grow before the batch is cut again
  int32_t ahead = 0;   // tokens by which a request may be longer on the device than on the host
  bool chunked = false;

  // Tokens that a request of this length attends to.
  int32_t attended(int32_t length) const {
    if (chunked) return length == 0 ? 0 : (length - 1) % window + 1;
    return length < window ? length : window;
  }
};

// Calls reuse the buffers.
class WindowCut {
 public:
  // rows_per_class: the most rows of a class. For more rows the kernels would read shared KV again. Throws
  // std::invalid_argument if a number is out of range.
  WindowCut(const WindowRule& rule, int32_t rows_per_class);

  // Cuts the paths of a forest that is arranged for these lengths. Requests of length 0 are padding. Takes time linear
  // in path nodes, and in requests times rows_per_class.
  void cut(const PrefixForest& forest, std::span<const int32_t> seq_lens);

  // The paths from the cuts on, with positions that count from there.
  PrefixForest& rows() { return rows_; }
  std::span<const int32_t> row_lens() const { return row_lens_; }
  // Per request: the position of its cut, 0 if its row shares nothing.
  std::span<const int32_t> cuts() const { return cuts_; }
  // Per request: the length up to which the cut serves it. The largest integer if its row shares nothing and slides.
  std::span<const int32_t> longest() const { return longest_; }

 private:
  struct Row {
    int32_t node;  // the node by whose sharing the request may save most
    int32_t cut;   // where the row would be cut if it were alone in its class
    int32_t request;

    auto operator<=>(const Row&) const = default;
  };

  void add_runs(std::span<const Row> rows, int32_t node_end, const PrefixForest& forest);
  void add_class(const PrefixForest& forest, std::span<const Row> rows, int32_t cut);

  WindowRule rule_;
  size_t rows_per_class_;
  PrefixForest rows_;
  std::vector<int32_t> row_lens_;
  std::vector<int32_t> cuts_;
  std::vector<int32_t> longest_;
  // Used within cut() only.
  std::vector<Row> whole_;   // rows whose window has all tokens, and will for a while
  std::vector<Row> sorted_;  // the others
  std::vector<int64_t> saved_;
  std::vector<size_t> begin_;
  std::vector<int32_t> class_;
};

}  // namespace pat
