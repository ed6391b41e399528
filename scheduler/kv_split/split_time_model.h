// The expected time of a stream-K split, in hundredths of tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// The time of a split without its merge. A chain is the work that one CTA does in sequence, in tokens. `slowest` is the
// longest chain, `total` the sum of all chains.
int64_t time_of_chains(const SplitTask& task, int32_t num_workers, int64_t slowest, int64_t total);

class SplitTimeModel {
 public:
  struct Expected {
    int64_t time;
    int64_t slowest;  // the longest chain
    int64_t total;    // of all chains
    bool has_partials;
  };
  Expected expect(const SplitContext& context, const SplitTask& task, const Split& split);

  // The longest chain of a single request. Without merges, no split has a shorter longest chain.
  int64_t longest_request(const SplitContext& context, const Packing& packing,
                          std::span<const Tile> tiles);
  // True if every split of the tiles takes at least SplitTask::time_to_beat.
  bool takes_too_long(const SplitContext& context, const SplitTask& task, const Packing& packing,
                      std::span<const Tile> tiles);

 private:
  std::vector<int64_t> chains_;
  std::vector<int32_t> num_partials_;  // per request
};

}  // namespace pat
