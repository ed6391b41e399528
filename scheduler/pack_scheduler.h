// The pipeline: paths and seq_lens -> plan, and whether the last plan still serves. No CUDA, no torch.
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

namespace pat {

struct SchedulerConfig {
  int32_t group_size;   // query heads per KV head
  int32_t num_workers;  // CTAs per KV head
  int32_t max_block_q;  // largest tile of the device
  Policy policy;
  int32_t min_item_tokens;  // shortest item that a cut makes
  // A plan serves until a request is more than this longer than when it was planned.
  int32_t growth_tokens;
  CostModel cost;
  // Each request's result depends on its own KV alone; policy and min_item_tokens have no effect then.
  bool batch_invariant = false;
  bool one_tile = false;  // all work items are executed in the largest body
  // Policy::kMemory: a small step has other packs where it is expected to end earlier with them.
  bool by_time = true;
  bool latent = false;  // the layers are latent attention: another tile table
};

// Wall time of the stages of the last plan(), in nanoseconds.
struct StageTimes {
  int64_t forest = 0;
  int64_t packing = 0;
  int64_t split = 0;
  int64_t assembly = 0;
};

struct LengthCheck {
  bool served;      // by the last plan
  int64_t total;    // sum of the lengths
  int32_t longest;  // 0 without requests
};

class PackScheduler {
 public:
  explicit PackScheduler(const SchedulerConfig& config);

  // Builds a plan for the requests of a forest, which is arranged for it. Throws std::invalid_argument on bad
  // input, and std::length_error if the plan is too large for its format. The last plan then stays in force.
  void plan(PrefixForest& forest, std::span<const int32_t> seq_lens);
  // The same for paths that no forest keeps.
  void plan(const PathsView& paths, std::span<const int32_t> seq_lens);

  // True if the last plan is right and still balanced for these lengths, given the same batch: every request
  // is at least as long as when it was planned, and at most growth_tokens longer. A request without a private
  // range may not grow at all: no work item would read the new tokens.
  LengthCheck check_lengths(std::span<const int32_t> seq_lens) const;

  // Tokens that every request may grow from these lengths, which the last plan serves, so that it still does and
  // none is longer than `longest`. Requests of length 0 are padding, and do not grow. Throws std::invalid_argument
  // for another number of requests and negative lengths.
  int32_t steps_left(std::span<const int32_t> seq_lens, int32_t longest) const;

  const DecodePlan& last_plan() const { return last_.plan; }
  const StageTimes& stage_times() const { return times_; }
  const TileTable& tile_table() const { return tiles_.table(); }
  // Split::time of the last plan.
  int64_t expected_time() const { return last_.split.time; }

 private:
  SchedulerConfig config_;
  TileSelection tiles_;
  Packer packer_;
  KvSplitter splitter_;
  InvariantChunks chunks_;

  // The same with tiles of half the requests. In a small step they may end earlier: more CTAs have work, and tiles of
  // few requests need fewer cuts, or none.
  struct Narrow {
    TileSelection tiles;
    Packer packer;
    KvSplitter splitter;
  };
  static std::optional<Narrow> narrow_of(const SchedulerConfig& config);
  std::optional<Narrow> narrow_;
  // Shares nothing. In a small step that may end earlier too: each request has a CTA of its own, and no partials.
  Packer query_centric_;
  // If next_ is a small step of `memory`: takes narrow tiles, or shares nothing, where that is expected to end earlier.
  void try_other_packings(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                          SplitTask task);
  Packing other_packing_;
  Split other_split_;

  PrefixForest forest_;  // of paths that come without one
  StageTimes times_;

  struct LengthRange {
    int32_t planned;
    int32_t longest;
  };
  struct Planned {
    Packing packing;
    Split split;
    DecodePlan plan;
    std::vector<LengthRange> lengths;  // per request
  };
  Planned last_;
  Planned next_;  // swapped with last_ when it is complete
};

// Bounds of the plan of any batch of up to `max_requests` requests, except the slot buffer.
struct PlanBounds {
  PlanCapacity capacity;
  int32_t num_partials;
};

// Throws std::invalid_argument if max_requests or num_workers is out of range, or the bounds exceed int32.
PlanBounds plan_bounds(int32_t max_requests, int32_t num_workers, const TileSelection& tiles);
// The same of batch-invariant plans, for requests of up to `max_seq_len` tokens.
PlanBounds invariant_plan_bounds(int32_t max_requests, int32_t max_seq_len);

}  // namespace pat
