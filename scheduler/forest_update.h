// Takes a forest from one batch to the next, and reads as few paths as the tree allows.
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
  // Returns the present paths of requests, in the order of `requests`, which has their places in the new batch. The
  // paths are valid until the next call. May throw.
  virtual TreePaths read(std::span<const int32_t> requests) = 0;
};

struct UpdateCounts {
  int32_t joined;
  int32_t left;
  int32_t moved;
  int32_t read_again;
};

// Goes from the batch `before`, whose paths the forest has, to `now`. Reads the paths of requests that joined or moved.
// If these paths show that the tree has split nodes of kept paths, reads those paths again. If they only make a split
// possible, reads one path per node that may be split. The paths that are read again may show more splits. Once two
// rounds of reading have shown splits, or after the third round, reads all paths.
//
// Returns nothing if the batches are equal and no request moved. Does not use the spans after the first call of the
// reader. Throws what the reader and PrefixForest::update() throw; the next update must then be from an empty batch.
std::optional<UpdateCounts> update_forest(PrefixForest& forest, std::span<const Request> before,
                                          std::span<const Request> now,
                                          const std::unordered_set<Request>& moved,
                                          PathReader& reader);

}  // namespace pat
