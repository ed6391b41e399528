// Calls the stages: paths and seq_lens -> plan. Also says whether the last plan still serves. No CUDA, no torch.
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
#include "packing.h"
#include "prefix_forest.h"
#include "tile_selection.h"
#include "window_cut.h"

namespace pat {

struct SchedulerConfig {
  int32_t group_size;   // query heads per KV head
  int32_t num_workers;  // CTAs per KV head
  int32_t max_block_q;  // largest tile of the device
  Policy policy;
  int32_t min_item_tokens;  // see SplitConfig
  // A plan serves at most until a request has grown by more than this many tokens since it was planned.
  int32_t growth_tokens;
  CostModel cost;
  // Each request's result depends on its own KV alone. policy and min_item_tokens then have no effect.
  bool batch_invariant = false;
  bool one_tile = false;  // the largest body executes all work items
  // With Policy::kMemory, a small step gets other packs if it is expected to end earlier with those.
  bool by_time = true;
  bool latent = false;  // the layers are latent attention, which has its own tile table
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
  bool served;      // whether the last plan serves the lengths
  int64_t total;    // sum of the lengths, each at most the window
  int32_t longest;  // 0 without requests
};

class PackScheduler {
 public:
  explicit PackScheduler(const SchedulerConfig& config);

  // Arranges a forest and builds a plan for its requests. With a window, the plan is for the rows of a WindowCut.
  // Throws std::invalid_argument on bad input, and std::length_error if the plan is too large for its format. The last
  // plan then stays in force.
  void plan(PrefixForest& forest, std::span<const int32_t> seq_lens);
  // The same, for paths that are not in a forest.
  void plan(const PathsView& paths, std::span<const int32_t> seq_lens);

  // Whether the last plan is right and still balanced for the same batch at these lengths: every request is at least as
  // long as when it was planned, and at most growth_tokens longer, or fewer where few requests are cut into short
  // pieces (Split::balanced_growth). A request without a private range must not grow, because no work item would read
  // its new tokens.
  LengthCheck check_lengths(std::span<const int32_t> seq_lens) const;

  // How many tokens every request may grow from these lengths before the last plan no longer serves, or a request is
  // longer than `longest`. The last plan must serve these lengths. Requests of length 0 are padding and do not grow.
  // Throws std::invalid_argument if a length is negative or the plan is for another number of requests.
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

  // Packs and splits with the next smaller tile. A small step may end earlier with it: more CTAs have work, and tiles
  // of few requests need fewer cuts or none.
  struct Narrow {
    TileSelection tiles;
    Packer packer;
    KvSplitter splitter;
  };
  static std::optional<Narrow> narrow_of(const SchedulerConfig& config);
  std::optional<Narrow> narrow_;
  // Makes packs that share nothing. These, too, may let a small step end earlier: each request has a CTA of its own,
  // and no partials.
  Packer query_centric_;
  // With Policy::kMemory, tries narrow tiles for a small step, and then a plan that shares nothing. Keeps what is
  // expected to end first.
  void try_other_packings(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                          SplitTask task);
  Packing packing_, other_packing_;
  Split split_, other_split_;

  PrefixForest forest_;  // for paths that are in no other forest
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

// What the plan of any batch of up to `max_requests` requests needs at most, except for the slot buffer.
struct PlanBounds {
  PlanCapacity capacity;
  int32_t num_partials;
};

// Throws std::invalid_argument if max_requests or num_workers is out of range, or the bounds exceed int32.
PlanBounds plan_bounds(int32_t max_requests, int32_t num_workers, const TileSelection& tiles);
// The same for batch-invariant plans, with requests of up to `max_seq_len` tokens.
PlanBounds invariant_plan_bounds(int32_t max_requests, int32_t max_seq_len);

}  // namespace pat
