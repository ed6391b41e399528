// Stage 3: packs -> work items. Packs are cut into tiles by requests and into items by KV, and bundled into tickets
// that the CTAs draw, so that all finish together.
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
  // No cut makes a item shorter than this, nor a part of a segment, as long as that leaves four items for each
  // worker, else than a quarter of it; a multiple of kCutGranularity, which is the least in any case.
  int32_t min_item_tokens;
};
inline constexpr int32_t kMaxWorkers = 1 << 16;

class KvSplitter {
 public:
  // Throws std::invalid_argument if num_workers is not 1 to kMaxWorkers, or min_item_tokens is not a positive
  // multiple of kCutGranularity.
  KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles);

  // A little work is split evenly (StreamKSplit); of more, each tile is a ticket if that is even enough, or tickets shrink
  // with what is left (GuidedSelfScheduling).
  //
  // A cut lies between two segments where that leaves a ticket nearly as full, else within one. Requests that both
  // sides are for get a partial from each. Between two requests there is another way: the second side reads what they
  // share again, if that costs less.
  void split(const Packing& packing, SplitTask task, Split& out);

  // No split of work items that read so many tokens, and share none, takes less. To be compared with Split::time.
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
  TileList list_;
  SplitTimeModel time_model_;
  StreamKSplit stream_k_;
  GuidedSelfScheduling guided_;
  SplitWriter writer_;
};

}  // namespace pat
