// Stage 3: packs -> work items. Packs are cut into tiles by requests, and tiles into work items by KV. CTAs draw
// tickets, which are runs of work items, so that all CTAs finish together.
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
  // A cut leaves at least this many tokens on both sides, both of the item and of the segment that it lies in. If
  // workers would then have less than four items each, a quarter of this number is enough. The number is a multiple of
  // kCutGranularity.
  int32_t min_item_tokens;
};
inline constexpr int32_t kMaxWorkers = 1 << 16;

class KvSplitter {
 public:
  // Throws std::invalid_argument if num_workers is not 1 to kMaxWorkers, or min_item_tokens is not a positive
  // multiple of kCutGranularity.
  KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles);

  // StreamKSplit splits a little work evenly, and more work if it can cut tiles that read one long range at the same
  // places and workers then end close enough together. Otherwise each tile becomes a ticket, again if workers then end
  // close enough together. If they do not, GuidedSelfScheduling makes tickets that shrink with the work that is left.
  //
  // A cut lies between two segments if the ticket is then nearly full, else within one. A request on both sides of a
  // cut gets a partial from each. Where the cut lies between two requests, the item after the cut may instead read
  // again what the requests of both sides share, if that costs less.
  void split(const Packing& packing, SplitTask task, Split& out);

  // A lower bound of Split::time for any split whose items read `num_tokens` tokens and share none.
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
  SplitWriter writer_;
};

}  // namespace pat
