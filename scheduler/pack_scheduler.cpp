#include "pack_scheduler.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <utility>

#include "check.h"

namespace pat {

namespace {

// Narrow tiles are tried only if they might save at least 1 / kNarrowGain of the time. If they might save less, they
// mostly turn out to save nothing.
constexpr int64_t kNarrowGain = 10;
constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

// A plan is used until a request has grown by at least this many tokens, even if the CTAs are out of balance earlier.
// That imbalance costs less than a new plan, which takes 30 us on the host and, for the copy, 15 us on the GPU.
constexpr int64_t kLeastGrowth = 32;

class Stopwatch {
 public:
  int64_t lap() {
    const auto now = std::chrono::steady_clock::now();
    const auto elapsed = std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_);
    last_ = now;
    return elapsed.count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace

PackScheduler::PackScheduler(const SchedulerConfig& config)
    : config_(config),
      tiles_(tiles_of(config.latent), config.group_size, config.max_block_q, config.one_tile),
      packer_(config.policy, config.cost.packing, tiles_),
      splitter_({.num_workers = config.num_workers, .min_item_tokens = config.min_item_tokens},
                config.cost, tiles_),
      chunks_(config.num_workers, config.cost, tiles_),
      narrow_(narrow_of(config)),
      query_centric_(Policy::kQueryCentric, config.cost.packing, tiles_),
      window_(config.window, tiles_.requests_per_tile()) {
  config.cost.check();
  PAT_CHECK(config.growth_tokens >= 1, "growth_tokens must be at least 1, got ",
            config.growth_tokens);
  PAT_CHECK(config.window.window == 0 || !config.batch_invariant,
            "batch_invariant must be false with a window: cuts depend on others");
}

std::optional<PackScheduler::Narrow> PackScheduler::narrow_of(const SchedulerConfig& config) {
  int32_t narrow = 0;
  const TileTable& table = tiles_of(config.latent);
  for (const TileConfig& tile : table) {
    if (tile.block_q < config.max_block_q) narrow = std::max(narrow, tile.block_q);
  }
  if (narrow < config.group_size) return {};
  const TileSelection tiles(table, config.group_size, narrow);
  return Narrow{.tiles = tiles,
                .packer = Packer(Policy::kMemory, config.cost.packing, tiles),
                .splitter = KvSplitter(
                    {.num_workers = config.num_workers, .min_item_tokens = config.min_item_tokens},
                    config.cost, tiles)};
}

void PackScheduler::try_other_packings(const PrefixForest& forest,
                                       std::span<const int32_t> seq_lens, SplitTask task) {
  if (config_.policy != Policy::kMemory || config_.one_tile || !config_.by_time) return;
  if (split_.time == 0) return;
  const auto try_packing = [&](Packer& packer, KvSplitter& splitter, int64_t time_to_beat) {
    packer.pack(forest, seq_lens, other_packing_);
    task.time_to_beat = time_to_beat;
    splitter.split(other_packing_, task, other_split_);
    if (other_split_.time == 0 || other_split_.time >= split_.time) return;
    std::swap(packing_, other_packing_);
    std::swap(split_, other_split_);
  };
  const auto is_wide = [&](const Pack& pack) {
    return pack.num_requests > narrow_->tiles.requests_per_tile();
  };
  if (narrow_ && std::ranges::any_of(packing_.packs, is_wide)) {
    const int64_t time = split_.time;
    try_packing(narrow_->packer, narrow_->splitter, time - time / kNarrowGain);
  }
  if (forest.nodes().empty()) return;
  const int64_t num_tokens = std::accumulate(seq_lens.begin(), seq_lens.end(), int64_t{0});
  if (splitter_.least_time(task, num_tokens) < split_.time) {
    try_packing(query_centric_, splitter_, split_.time);
  }
}

void PackScheduler::plan(const PathsView& paths, std::span<const int32_t> seq_lens) {
  PAT_CHECK(paths.path_begin.size() == seq_lens.size() + 1,
            "path_begin must have num_requests + 1 = ", seq_lens.size() + 1, " entries, got ",
            paths.path_begin.size());
  Stopwatch stopwatch;
  forest_.build(paths);
  const int64_t build = stopwatch.lap();
  plan(forest_, seq_lens);
  times_.forest += build;
}

void PackScheduler::plan(PrefixForest& batch, std::span<const int32_t> seq_lens) {
  Stopwatch stopwatch;
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    PAT_CHECK(seq_lens[request] >= 0, "seq_lens must not be negative, got ", seq_lens[request],
              " for request ", request);
  }
  batch.arrange(seq_lens);
  const int32_t window = config_.window.window;
  if (window > 0) {
    window_.cut(batch, seq_lens);
    window_.rows().arrange(window_.row_lens());
  }
  const PrefixForest& forest = window > 0 ? window_.rows() : batch;
  const std::span<const int32_t> row_lens = window > 0 ? window_.row_lens() : seq_lens;
  int64_t num_distinct = 0;  // KV tokens
  for (const ForestNode& node : forest.nodes()) num_distinct += node.kv_end - node.kv_begin;
  for (size_t request = 0; request < row_lens.size(); ++request) {
    num_distinct += row_lens[request] - forest.private_begin(static_cast<int32_t>(request));
  }
  times_.forest = stopwatch.lap();

  if (config_.batch_invariant) {
    chunks_.plan(forest, row_lens, num_distinct, packing_, split_);
    times_.packing = stopwatch.lap();
    times_.split = 0;
  } else {
    packer_.pack(forest, row_lens, packing_);
    times_.packing = stopwatch.lap();

    const SplitTask task{.num_requests = static_cast<int32_t>(row_lens.size()),
                         .num_distinct = num_distinct};
    splitter_.split(packing_, task, split_);
    try_other_packings(forest, row_lens, task);
    times_.split = stopwatch.lap();
  }

  // Batch-invariant results need the same order of segments in every batch. With num_workers = 0, it is ascending.
  next_.plan.assemble(static_cast<int32_t>(row_lens.size()), config_.group_size, packing_, split_,
                      config_.batch_invariant ? 0 : config_.num_workers);
  int64_t query_centric = 0;
  next_.lengths.resize(seq_lens.size());
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    query_centric += row_lens[request];
    next_.lengths[request] = {.planned = seq_lens[request], .longest = seq_lens[request]};
  }
  int64_t growth = config_.growth_tokens;
  if (!config_.batch_invariant) {
    growth = std::min(growth, std::max(kLeastGrowth, split_.balanced_growth(config_.num_workers)));
  }
  for (const KvSegment& segment : next_.plan.kv_segments()) {
    if (segment.kv_end != kOpenEnd) continue;
    LengthRange& range = next_.lengths[segment.kv_request];
    int64_t longest = range.planned + growth;
    if (config_.batch_invariant) {
      longest = std::min(longest, ChunkGrid::last_length(range.planned));
    }
    if (window > 0) {
      // The window is full: it moves on with each token, so the row does not grow.
      if (longest >= window && !config_.window.chunked) longest = kMaxLength;
      longest = std::min<int64_t>(longest, window_.longest()[segment.kv_request]);
    }
    range.longest = static_cast<int32_t>(std::min(longest, kMaxLength));
  }
  next_.plan.set_kv_tokens(query_centric, num_distinct);
  if (window > 0) next_.cuts.assign(window_.cuts().begin(), window_.cuts().end());
  next_.expected_time = split_.time;
  std::swap(last_, next_);
  times_.assembly = stopwatch.lap();
}

LengthCheck PackScheduler::check_lengths(std::span<const int32_t> seq_lens) const {
  LengthCheck check{.served = seq_lens.size() == last_.lengths.size(), .total = 0, .longest = 0};
  const WindowRule& rule = config_.window;
  for (const int32_t seq_len : seq_lens) {
    check.total += rule.window > 0 ? rule.attended(seq_len) : seq_len;
    check.longest = std::max(check.longest, seq_len);
  }
  for (size_t i = 0; check.served && i < last_.lengths.size(); ++i) {
    check.served =
        seq_lens[i] >= last_.lengths[i].planned && seq_lens[i] <= last_.lengths[i].longest;
  }
  return check;
}

int32_t PackScheduler::steps_left(std::span<const int32_t> seq_lens, int32_t longest) const {
  PAT_CHECK(seq_lens.size() == last_.lengths.size(), "the plan is for ", last_.lengths.size(),
            " requests, got lengths of ", seq_lens.size());
  int64_t steps = std::numeric_limits<int64_t>::max();
  bool any = false;
  for (size_t i = 0; i < last_.lengths.size(); ++i) {
    PAT_CHECK(seq_lens[i] >= 0, "seq_lens must not be negative, got ", seq_lens[i], " for request ",
              i);
    if (seq_lens[i] == 0) continue;
    any = true;
    steps = std::min(steps, int64_t{std::min(last_.lengths[i].longest, longest)} - seq_lens[i]);
  }
  return any ? static_cast<int32_t>(std::clamp<int64_t>(steps, 0, kMaxLength)) : 0;
}

PlanBounds plan_bounds(int32_t max_requests, int32_t num_workers, const TileSelection& tiles) {
  PAT_CHECK(max_requests >= 1, "max_requests must be at least 1, got ", max_requests);
  PAT_CHECK(num_workers >= 1 && num_workers <= kMaxWorkers, "num_workers must be 1 to ",
            kMaxWorkers, ", got ", num_workers);
  // Packer::pack() keeps its packs within these two limits.
  const int64_t packed_requests = int64_t{kMaxPacksPerRequest} * max_requests;
  const int64_t packed_segments = int64_t{kMaxSegmentsPerRequest} * max_requests;
  // The number of tiles is bounded by this sum. The nodes' sets of holders are nested or disjoint, all different, and
  // have at least two requests, so there are fewer nodes than requests. Each node is at most one pack, and each request
  // has at most one private pack. All tiles of a pack are full, except perhaps the last one. SubtreePacker makes at
  // most as many packs as there are requests.
  const int64_t tiles_of_packs =
      2 * int64_t{max_requests} - 1 + packed_requests / tiles.requests_per_tile();
  const int64_t cut_requests = max_cut_requests(num_workers, tiles);
  const int64_t work_items = tiles_of_packs + cut_requests;
  const int64_t item_requests = packed_requests + cut_requests;
  const int64_t segments = packed_segments + kMaxSegmentsPerCut * cut_requests;
  PAT_CHECK(std::max({work_items, item_requests, segments}) <= std::numeric_limits<int32_t>::max(),
            "max_requests ", max_requests, " is too large: their plan may not fit into int32");
  return {.capacity = {.num_tickets = static_cast<int32_t>(work_items),
                       .num_work_items = static_cast<int32_t>(work_items),
                       .num_kv_segments = static_cast<int32_t>(segments),
                       .num_item_requests = static_cast<int32_t>(item_requests),
                       .num_gather_spans = static_cast<int32_t>(packed_segments),
                       .num_merges = max_requests},
          .num_partials = static_cast<int32_t>(item_requests)};
}

PlanBounds invariant_plan_bounds(int32_t max_requests, int32_t max_seq_len) {
  PAT_CHECK(max_requests >= 1, "max_requests must be at least 1, got ", max_requests);
  PAT_CHECK(max_seq_len >= 1, "max_seq_len must be at least 1, got ", max_seq_len);
  // Each chunk of a request is in one work item, and adds at most two segments to it.
  const int64_t chunks = int64_t{max_requests} * ChunkGrid::num_chunks(max_seq_len);
  PAT_CHECK(2 * chunks <= std::numeric_limits<int32_t>::max(), "max_requests ", max_requests,
            " of max_seq_len ", max_seq_len, " are too many: their plan may not fit into int32");
  const auto count = static_cast<int32_t>(chunks);
  return {.capacity = {.num_tickets = count,
                       .num_work_items = count,
                       .num_kv_segments = 2 * count,
                       .num_item_requests = count,
                       .num_gather_spans = 2 * count,
                       .num_merges = max_requests},
          .num_partials = count};
}

}  // namespace pat
