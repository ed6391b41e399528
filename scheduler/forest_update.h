// Updates a forest from one batch to the next, and reads as few paths of SGLang's tree as possible.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>

#include "batch_change.h"
#include "prefix_forest.h"

namespace pat {

class PathReader {
 public:
  virtual ~PathReader() = default;
  // Returns the current paths of some requests of the new batch. `requests` has the places of these requests in the
  // batch. The paths are in the same order, and stay valid until the next call. May throw.
  virtual TreePaths read(std::span<const int32_t> requests) = 0;
};

// Numbers of requests. The names in the comments are those of the metric `batch_changes`.
struct UpdateCounts {
  int32_t joined;      // join
  int32_t left;        // leave
  int32_t moved;       // last_node_changed: in both batches, but the path may have changed
  int32_t read_again;  // split: the path was read again because the tree may have split a node
};

// Updates a forest that has the paths of batch `before`, so that it has the paths of batch `now`. Reads the paths of
// requests that joined or moved. If these paths show that the tree has split a node, rereads all kept paths that hold
// the node. If they only suggest that the tree may have split a node, rereads one kept path that holds the node. Reread
// paths may show more splits. So after two rounds that have shown splits, or after the third round, rereads all paths.
//
// Returns std::nullopt if the batches are equal and no request moved. Does not use the spans `before` and `now` after
// the first call of the reader, which may change them. Throws what the reader and PrefixForest::update() throw. After
// an exception, the next call must have an empty `before`.
std::optional<UpdateCounts> update_forest(PrefixForest& forest, std::span<const Request> before,
                                          std::span<const Request> now,
                                          const std::unordered_set<Request>& moved,
                                          PathReader& reader);

}  // namespace pat
