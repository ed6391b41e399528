// Takes a forest from one batch to the next, reading as few paths as the tree allows.
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
  // The paths that the tree has now of these requests, given by their places in the new batch: one each, in this
  // order. Valid until the next call. May throw.
  virtual TreePaths read(std::span<const int32_t> requests) = 0;
};

struct UpdateCounts {
  int32_t joined;
  int32_t left;
  int32_t moved;
  int32_t read_again;
};

// Goes from the batch `before`, whose paths the forest has, to `now`. The paths of requests that joined, or moved, are
// read. Where they show that the tree has split nodes of kept paths, these are read again; where they only leave that
// possible, one path for each such node. What is read then may show more splits: the third time, all are read.
//
// None if the batches are alike and nothing moved. The spans are not used after the first call of the reader. Throws
// what the reader and PrefixForest::update() throw; the next update must then be from an empty batch.
std::optional<UpdateCounts> update_forest(PrefixForest& forest, std::span<const Request> before,
                                          std::span<const Request> now,
                                          const std::unordered_set<Request>& moved,
                                          PathReader& reader);

}  // namespace pat
