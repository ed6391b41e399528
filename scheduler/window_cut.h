// Cuts the paths of a batch for layers with a sliding window. What is left is an ordinary batch.
//
// A request attends to its last `window` tokens. Its row begins at a cut, which the rows of its class have in common:
// the path from the cut on, the tail, and at the end the tokens of the window that lie before the cut. Attention does
// not depend on the order of keys. So the row's plan stays while the window moves on, up to the cut.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefix_forest.h"

namespace pat {

struct WindowRule {
  int32_t window;          // tokens that a request attends to, its new one included
  int32_t slack;           // tokens by which each request may grow before the batch is cut again
  int32_t ahead;           // tokens by which a request may be longer on the device than on the host
  int32_t rows_per_class;  // beyond it, the kernels read shared KV again
};

struct WindowCut {
  // The paths from the cuts on, with positions that count from there. Another class has other node ids.
  std::vector<int32_t> path_begin;
  std::vector<int64_t> node_id;
  std::vector<int32_t> kv_begin;
  std::vector<int32_t> kv_end;
  // Per request: the position of its cut, 0 if its row shares nothing.
  std::vector<int32_t> cut;
  // Per request: the length up to which the cut serves it, the largest integer if its row shares nothing.
  std::vector<int32_t> longest;

  PathsView paths() const { return {path_begin, node_id, kv_begin, kv_end}; }
};

// Arranges the forest, and cuts its paths. Requests of length 0 are padding. Throws as PrefixForest::arrange() does, and
// if the rule has a number that is out of range. Takes time linear in path nodes, and in requests times rows_per_class.
WindowCut cut_windows(PrefixForest& forest, std::span<const int32_t> seq_lens,
                      const WindowRule& rule);

}  // namespace pat
