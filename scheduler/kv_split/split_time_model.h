// Expected time of an even split, in hundredths of tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/tile_list.h"
#include "packing.h"

namespace pat {

// Time of a split without its merge. A chain is what a CTA does one after the other, in tokens; slowest: the
// longest one, total: of all.
int64_t time_of_chains(const SplitTask& task, int32_t num_workers, int64_t slowest, int64_t total);

class SplitTimeModel {
 public:
  struct Expected {
    int64_t time;
    int64_t slowest;  // chain
    int64_t total;
    bool has_partials;
  };
  Expected expect(const SplitContext& context, const SplitTask& task, const Split& split);

  // The chain of the request that has the longest one: no split that merges nothing has a shorter one.
  int64_t longest_request(const SplitContext& context, const Packing& packing,
                          std::span<const Tile> tiles);
  // True if each split of the tiles takes as long as the task's time to beat, or longer.
  bool takes_too_long(const SplitContext& context, const SplitTask& task, const Packing& packing,
                      std::span<const Tile> tiles);

 private:
  std::vector<int64_t> chains_;
  std::vector<int32_t> num_partials_;  // per request
};

}  // namespace pat
