#include "kv_split/split_time_model.h"

#include <algorithm>
#include <limits>

namespace pat {

namespace {

// The constants are fitted to times of the kernels on an H100: 2,664 plans for 106 batches, up to 62 us each. A token
// takes 7.2 ns there. Within a batch, measured times differ from the model by 2.9% (root mean square).

// What each segment and each query row add to a chain, in tokens, besides the stages of KV.
constexpr int64_t kSegmentInChain = 13;
constexpr int64_t kRowInChain = 2;
// Weights of the slowest chain: the first if other chains keep the memory busy, the second if it runs alone.
constexpr int64_t kSlowestPercent = 100;
constexpr int64_t kAlonePercent = 226;
// Weights of the mean chain per worker, and of the distinct KV per worker, which device memory must deliver.
constexpr int64_t kMeanPercent = 97;
constexpr int64_t kDistinctPercent = 433;
// Penalties for a plan that shares nothing although requests have KV in common: one per plan, and one per token that is
// read again. Without these penalties, the planner chose plans without sharing that took up to 1.3 times as long as
// plans with sharing (H200, both kinds of plan for 101 small batches).
constexpr int64_t kSharingNothing = 83;
constexpr int64_t kRereadPercent = 200;
// Costs of merging: one per plan with partials, and one per partial row, divided by the workers. If some rows have more
// than kPartialsAtOnce partials, the last two are added: one per plan, and one per such row, divided by the workers.
constexpr int64_t kMerging = 321;
constexpr int64_t kPartialRowPercent = 675;
constexpr int64_t kMergingMany = 137;
constexpr int64_t kRowOfMany = 51;
// If a row has at most this many partials, one warp of merge_partials sums them.
constexpr int64_t kPartialsAtOnce = 12;

int64_t chain(const SplitContext& context, int64_t load, int64_t num_segments,
              int64_t num_requests) {
  return load + (kSegmentInChain - context.kv_load_of_segment()) * num_segments +
         kRowInChain * num_requests * context.tiles.group_size();
}

// The time to merge rows with up to kPartialsAtOnce partials.
int64_t time_of_merge(const SplitContext& context, int64_t partials) {
  return 100 * kMerging +
         kPartialRowPercent * partials * context.tiles.group_size() / context.num_workers;
}

}  // namespace

int64_t time_of_chains(const SplitTask& task, int32_t num_workers, int64_t slowest, int64_t total) {
  const int64_t shared = kMeanPercent * total + kDistinctPercent * task.num_distinct;
  const int64_t chains =
      std::max(kAlonePercent * slowest, kSlowestPercent * slowest + shared / num_workers);
  const int64_t reread = task.num_read - task.num_distinct;
  if (!task.shares_nothing || reread <= 0) return chains;
  return chains + 100 * kSharingNothing + kRereadPercent * reread / num_workers;
}

int64_t SplitTimeModel::longest_request(const SplitContext& context, const Packing& packing,
                                        std::span<const Tile> tiles) {
  int64_t longest = 0;
  for (const Tile& tile : tiles) {
    chains_.assign(tile.num_requests + 1, 0);
    for (int32_t s = tile.segment_begin; s < tile.segment_end; ++s) {
      const Segment& segment = packing.segments[s];
      const int64_t own = chain(context, context.kv_load_of(segment.num_tokens()), 1, 0);
      chains_[segment.first] += own;
      chains_[std::min(segment.end, tile.num_requests)] -= own;
    }
    int64_t own = 0;
    for (const int64_t change : chains_) longest = std::max(longest, own += change);
  }
  return longest;
}

bool SplitTimeModel::takes_too_long(const SplitContext& context, const SplitTask& task,
                                    const Packing& packing, std::span<const Tile> tiles) {
  if (task.time_to_beat == std::numeric_limits<int64_t>::max()) return false;
  int64_t total = 0;
  for (const Tile& tile : tiles) {
    total += chain(context, tile.kv_load, tile.segment_end - tile.segment_begin, tile.num_requests);
  }
  // No split has a smaller sum of chains than `total`, and the slowest chain is at least the mean. A split merges
  // either nothing or at least two partials.
  const int64_t mean = total / context.num_workers;
  const int64_t least = time_of_chains(task, context.num_workers, mean, total);
  if (least >= task.time_to_beat) return true;
  if (least + time_of_merge(context, 2) < task.time_to_beat) return false;
  const int64_t slowest = std::max(mean, longest_request(context, packing, tiles));
  return time_of_chains(task, context.num_workers, slowest, total) >= task.time_to_beat;
}

SplitTimeModel::Expected SplitTimeModel::expect(const SplitContext& context, const SplitTask& task,
                                                const Split& split) {
  Expected expected{.time = 0, .slowest = 0, .total = 0, .has_partials = false};
  tickets_.clear();
  for (const Ticket& ticket : split.tickets) {
    int64_t own = 0;
    for (int32_t p = ticket.item_begin; p < ticket.item_end; ++p) {
      const Split::WorkItem& item = split.work_items[p];
      int64_t kv_load = 0;
      for (int32_t s = item.segment_begin; s < item.segment_begin + item.num_segments; ++s) {
        kv_load += context.kv_load_of(split.segments[s].num_tokens());
      }
      own += chain(context, kv_load, item.num_segments, item.num_requests);
    }
    tickets_.push_back(own);
    expected.total += own;
  }
  expected.slowest = slowest_worker(tickets_, context.num_workers);
  expected.time = time_of_chains(task, context.num_workers, expected.slowest, expected.total);
  num_partials_.assign(task.num_requests, 0);
  for (const int32_t request : split.requests) ++num_partials_[request];
  int64_t partials = 0;
  int64_t of_many = 0;
  for (const int32_t own : num_partials_) {
    if (own > 1) partials += own;
    of_many += own > kPartialsAtOnce;
  }
  expected.has_partials = partials > 0;
  if (partials > 0) expected.time += time_of_merge(context, partials);
  if (of_many > 0) {
    const int64_t group = context.tiles.group_size();
    expected.time += 100 * (kMergingMany + kRowOfMany * of_many * group / context.num_workers);
  }
  return expected;
}

}  // namespace pat
