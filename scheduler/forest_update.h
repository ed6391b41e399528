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
  // Returns the current paths of some requests of the new batch. requests: their places in the batch. The paths are in
  // the same order, and valid until the next call. May throw.
  virtual TreePaths read(std::span<const int32_t> requests) = 0;
};

struct UpdateCounts {
  int32_t joined;
  int32_t left;
  int32_t moved;
  int32_t read_again;
};

// Updates a forest with the paths of batch `before` to batch `now`. Reads the paths of requests that joined or moved.
// If these paths show that the tree has split nodes of kept paths, reads the kept paths again. If they only show that a
// split is possible, reads one path for each node that may be split. The paths that it reads again may show more
// splits. So after two rounds that have shown splits, or after the third round, it reads all paths.
//
// Returns nothing if the batches are equal and no request moved. Does not use the spans after the first call of the
// reader, which may change them. Throws what the reader and PrefixForest::update() throw. After that, `before` must be
// empty in the next call.
std::optional<UpdateCounts> update_forest(PrefixForest& forest, std::span<const Request> before,
                                          std::span<const Request> now,
                                          const std::unordered_set<Request>& moved,
                                          PathReader& reader);

}  // namespace pat
