// Estimates the time of a stream-K split, in hundredths of the time of a token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// The time of a split without the merge. A chain is the work of one CTA, in tokens: all tickets that it draws.
// `slowest` is the longest chain, `total` the sum of all chains.
int64_t time_of_chains(const SplitTask& task, int32_t num_workers, int64_t slowest, int64_t total);

class SplitTimeModel {
 public:
  struct Expected {
    int64_t time;
    int64_t slowest;  // the longest chain
    int64_t total;    // sum of all chains
    bool has_partials;
  };
  Expected expect(const SplitContext& context, const SplitTask& task, const Split& split);

  // The longest chain that any single request needs. No split without partials has a shorter slowest chain.
  int64_t longest_request(const SplitContext& context, const Packing& packing,
                          std::span<const Tile> tiles);
  // True if no split of the tiles can take less than SplitTask::time_to_beat.
  bool takes_too_long(const SplitContext& context, const SplitTask& task, const Packing& packing,
                      std::span<const Tile> tiles);

 private:
  std::vector<int64_t> chains_;
  std::vector<int64_t> tickets_;       // each ticket's part of a chain
  std::vector<int32_t> num_partials_;  // per request of the batch
};

}  // namespace pat
