// Stage 3 of the scheduler turns packs into work items. It cuts packs into tiles by requests, and tiles into work items
// by KV. It groups work items into tickets, which CTAs draw, so that all CTAs finish at about the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "cost_model.h"
#include "kv_split/guided_self_scheduling.h"
#include "kv_split/split.h"
#include "kv_split/split_context.h"
#include "kv_split/split_time_model.h"
#include "kv_split/split_writer.h"
#include "kv_split/stream_k_split.h"
#include "kv_split/tile_list.h"
#include "packing.h"
#include "tile_selection.h"

namespace pat {

struct SplitConfig {
  int32_t num_workers;  // CTAs per KV head
  // On each side, a cut leaves an item of at least this many tokens and, if the cut lies within a segment, at least
  // this many tokens of the segment. A quarter of this number is enough if workers would otherwise have fewer than four
  // items each. Must be a multiple of kCutGranularity.
  int32_t min_item_tokens;
};
inline constexpr int32_t kMaxWorkers = 1 << 16;

class KvSplitter {
 public:
  // Throws std::invalid_argument if num_workers is not 1 to kMaxWorkers, or min_item_tokens is not a positive
  // multiple of kCutGranularity.
  KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles);

  // Makes the first of these splits that is possible:
  // - StreamKSplit, if there is little work, or if tiles that read the same long range can be cut at the same positions
  //   and the workers are then balanced
  // - one ticket per tile, if no shared range is long and the workers are then balanced
  // - shrinking tickets by GuidedSelfScheduling, if the workers are then balanced
  // - StreamKSplit
  //
  // A cut is between two segments if the ticket is then nearly full, else within a segment. A request with KV on both
  // sides of a cut gets a partial from each side. At a cut between two requests, the item after the cut may instead
  // reread the KV that requests on both sides share, if that costs less.
  void split(const Packing& packing, SplitTask task, Split& out);

  // A lower bound for Split::time of any split whose items read `num_tokens` tokens and share none of them.
  int64_t least_time(SplitTask task, int64_t num_tokens) const {
    task.num_read = num_tokens;
    task.shares_nothing = true;
    const int32_t workers = config_.num_workers;
    return time_of_chains(task, workers, num_tokens / workers, num_tokens);
  }

 private:
  SplitConfig config_;
  CostModel cost_;
  TileSelection tiles_;
  std::vector<ItemCost> item_costs_;
  std::vector<int64_t> ticket_costs_;
  TileList list_;
  SplitTimeModel time_model_;
  StreamKSplit stream_k_;
  GuidedSelfScheduling guided_;
};

}  // namespace pat
