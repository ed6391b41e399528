#include "pack_scheduler.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>

#include "check.h"

namespace pat {

namespace {

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
      tiles_(config.group_size, config.max_block_q),
      packer_(config.policy, config.cost, tiles_),
      splitter_({.num_workers = config.num_workers, .min_piece_tokens = config.min_piece_tokens},
                config.cost, tiles_) {
  PAT_CHECK(config.growth_tokens >= 1, "growth_tokens must be at least 1, got ",
            config.growth_tokens);
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

void PackScheduler::plan(PrefixForest& forest, std::span<const int32_t> seq_lens) {
  Stopwatch stopwatch;
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    PAT_CHECK(seq_lens[request] >= 0, "seq_lens must not be negative, got ", seq_lens[request],
              " for request ", request);
  }
  forest.arrange(seq_lens);  // all input errors are found here, before the last plan is touched
  times_.forest = stopwatch.lap();

  packer_.pack(forest, seq_lens, packing_);
  times_.packing = stopwatch.lap();

  splitter_.split(packing_, split_);
  times_.split = stopwatch.lap();

  plan_.assemble(static_cast<int32_t>(seq_lens.size()), config_.group_size, packing_, split_);
  int64_t query_centric = 0;
  int64_t lower_bound = 0;
  for (const ForestNode& node : forest.nodes()) lower_bound += node.kv_end - node.kv_begin;
  lengths_.clear();
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    const int32_t seq_len = seq_lens[request];
    query_centric += seq_len;
    lower_bound += seq_len - forest.private_begin(static_cast<int32_t>(request));
    lengths_.push_back({.planned = seq_len, .longest = seq_len});
  }
  for (const Pack& pack : packing_.packs) {
    if (!pack.is_private) continue;
    LengthRange& range = lengths_[packing_.requests[pack.request_begin]];
    range.longest +=
        std::min(config_.growth_tokens, std::numeric_limits<int32_t>::max() - range.planned);
  }
  plan_.set_kv_tokens(query_centric, lower_bound);
  times_.assembly = stopwatch.lap();
}

LengthCheck PackScheduler::check_lengths(std::span<const int32_t> seq_lens) const {
  LengthCheck check{.served = seq_lens.size() == lengths_.size(), .total = 0, .longest = 0};
  for (const int32_t seq_len : seq_lens) {
    check.total += seq_len;
    check.longest = std::max(check.longest, seq_len);
  }
  for (size_t i = 0; check.served && i < lengths_.size(); ++i) {
    check.served = seq_lens[i] >= lengths_[i].planned && seq_lens[i] <= lengths_[i].longest;
  }
  return check;
}

int32_t PackScheduler::steps_left(std::span<const int32_t> seq_lens, int32_t longest) const {
  PAT_CHECK(seq_lens.size() == lengths_.size(), "the plan is for ", lengths_.size(),
            " requests, got lengths of ", seq_lens.size());
  int32_t steps = 0;
  bool any = false;
  for (size_t i = 0; i < lengths_.size(); ++i) {
    if (seq_lens[i] == 0) continue;
    const int32_t room = std::min(lengths_[i].longest, longest) - seq_lens[i];
    steps = any ? std::min(steps, room) : room;
    any = true;
  }
  return std::max(steps, 0);
}

PlanSummary PackScheduler::summarize() const {
  PlanSummary summary{.packs = static_cast<int32_t>(packing_.packs.size()),
                      .work_items = plan_.header().num_work_items,
                      .partials = plan_.header().num_partials};
  std::vector<int32_t> packs_of(lengths_.size(), 0);
  for (const Pack& pack : packing_.packs) {
    const size_t bin = std::bit_width(static_cast<uint32_t>(pack.num_requests)) - 1;
    if (summary.requests_per_pack.size() <= bin) summary.requests_per_pack.resize(bin + 1);
    ++summary.requests_per_pack[bin];
    for (const int32_t request : packing_.requests_of(pack)) ++packs_of[request];
  }
  for (const int32_t packs : packs_of) {
    if (packs > 1) summary.partials_before_split += packs;
  }
  splitter_.summarize_tiles(summary.tiles_by_body);
  for (const int32_t tiles : summary.tiles_by_body) summary.tiles += tiles;
  summary.tail = splitter_.tail(split_);
  return summary;
}

}  // namespace pat
