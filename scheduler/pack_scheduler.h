// Calls the scheduler's stages to turn paths and seq_lens into a plan, and tells whether the last plan is still usable.
// Uses neither CUDA nor torch.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cost_model.h"
#include "decode_plan.h"
#include "invariant_chunks.h"
#include "kv_split/kv_split.h"
#include "packer.h"
#include "prefix_forest.h"
#include "tile_selection.h"
#include "window_cut.h"

namespace pat {

struct SchedulerConfig {
  int32_t group_size;   // query heads per KV head
  int32_t num_workers;  // CTAs per KV head
  int32_t max_block_q;  // block_q of the largest tile that the device can run
  Policy policy;
  int32_t min_item_tokens;  // see SplitConfig::min_item_tokens
  // A plan must be replaced when a request has grown by more than this many tokens.
  int32_t growth_tokens;
  CostModel cost;
  // Makes each request's result depend on its own KV alone. policy and min_item_tokens then have no effect.
  bool batch_invariant = false;
  bool one_tile = false;  // all work items use the largest tile
  // With Policy::kMemory, a small step gets packs other than those that move the fewest bytes if it is estimated to end
  // earlier with them.
  bool by_time = true;
  bool latent = false;  // plans for latent attention, which has its own tile table
  WindowRule window = {};
};

// Wall time of the stages of the last plan(), in nanoseconds.
struct StageTimes {
  int64_t forest = 0;
  int64_t packing = 0;
  int64_t split = 0;
  int64_t assembly = 0;
};

struct LengthCheck {
  bool served;      // whether the last plan is usable for the lengths
  int64_t total;    // number of tokens to which all requests together attend
  int32_t longest;  // the greatest of the lengths; 0 if there are no requests
};

class PackScheduler {
 public:
  explicit PackScheduler(const SchedulerConfig& config);

  // Arranges a forest and builds a plan for its requests. With a window, the plan is for the rows of a WindowCut.
  // Throws std::invalid_argument on bad input, and std::length_error if the plan is too large for its format. After an
  // error, the previous plan is kept.
  void plan(PrefixForest& forest, std::span<const int32_t> seq_lens);
  // Builds a plan for paths that are not in a forest.
  void plan(const PathsView& paths, std::span<const int32_t> seq_lens);

  // Tells whether the last plan is still correct and balanced for the same batch at these lengths. No request may be
  // shorter than when planned, and none may have grown by more than growth_tokens or, if that is less, by more than
  // Split::balanced_growth(). A request without a private range must not grow, because no work item would read its new
  // tokens.
  LengthCheck check_lengths(std::span<const int32_t> seq_lens) const;

  // By how many tokens every request may grow from these lengths before the last plan becomes unusable or a request is
  // longer than `longest`. The last plan must be usable for these lengths. Requests of length 0 are padding and do not
  // grow. Throws std::invalid_argument if a length is negative or the plan is for another number of requests.
  int32_t steps_left(std::span<const int32_t> seq_lens, int32_t longest) const;

  const DecodePlan& last_plan() const { return last_.plan; }
  // WindowCut::cuts() of the last plan; empty without a window.
  std::span<const int32_t> last_cuts() const { return last_.cuts; }
  const StageTimes& stage_times() const { return times_; }
  const TileTable& tile_table() const { return tiles_.table(); }
  // Split::time of the last plan, for tests.
  int64_t expected_time() const { return last_.expected_time; }

 private:
  SchedulerConfig config_;
  TileSelection tiles_;
  Packer packer_;
  KvSplitter splitter_;
  InvariantChunks chunks_;

  // Packs and splits with the next smaller tile. A small step may end earlier with smaller tiles, because more CTAs
  // have work and the tiles need fewer cuts or none.
  struct Narrow {
    TileSelection tiles;
    Packer packer;
    KvSplitter splitter;
  };
  static std::optional<Narrow> narrow_of(const SchedulerConfig& config);
  std::optional<Narrow> narrow_;
  // Makes packs that share nothing. With them, a small step may end earlier, because each request then has its own CTA
  // and no partials.
  Packer query_centric_;
  // For a small step with Policy::kMemory, tries narrow tiles and then packs that share nothing. Keeps the packing and
  // the split with the shortest expected time.
  void try_other_packings(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                          SplitTask task);
  Packing packing_, other_packing_;
  Split split_, other_split_;

  PrefixForest forest_;  // for plans from paths without a forest
  WindowCut window_;
  StageTimes times_;

  struct LengthRange {
    int32_t planned;
    int32_t longest;
  };
  struct Planned {
    DecodePlan plan;
    std::vector<LengthRange> lengths;  // per request
    std::vector<int32_t> cuts;
    int64_t expected_time = 0;
  };
  Planned last_;
  Planned next_;  // becomes last_ when it is complete
};

// Upper bounds on the plan of any batch of up to `max_requests` requests, except for the slot buffer.
struct PlanBounds {
  PlanCapacity capacity;
  int32_t num_partials;
};

// Throws std::invalid_argument if max_requests or num_workers is out of range, or if int32 cannot hold the bounds.
PlanBounds plan_bounds(int32_t max_requests, int32_t num_workers, const TileSelection& tiles);
// Bounds of batch-invariant plans for requests of up to `max_seq_len` tokens. Throws like plan_bounds().
PlanBounds invariant_plan_bounds(int32_t max_requests, int32_t max_seq_len);

}  // namespace pat
