#include "kv_split/kv_split.h"

#include <algorithm>

#include "check.h"

namespace pat {

namespace {

// These constants are fitted to runs of the trees of benchmarks/kernel/workloads.py on an H100. Costs are in tokens.

// Up to this cost per worker, each worker gets one ticket: second tickets would take more time than they save by better
// balance.
constexpr int64_t kOneTicketEach = 1300;
// The same limit if nothing is shared. It is higher, because all tickets then wait for device memory, which evens out
// their times.
constexpr int64_t kOneTicketEachUnshared = 5000;
// Tiles that read the same long range are cut at the same positions if the slowest worker then costs at most this many
// times the mean.
constexpr double kWorstAlignedImbalance = 1.08;
// Items may be shorter than usual if the work is less than this many items of the usual length per worker.
constexpr int64_t kItemsEach = 4;

}  // namespace

KvSplitter::KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles)
    : config_(config), cost_(cost), tiles_(tiles), item_costs_(item_costs_of(cost, tiles)) {
  PAT_CHECK(config.num_workers >= 1 && config.num_workers <= kMaxWorkers,
            "num_workers must be 1 to ", kMaxWorkers, ", got ", config.num_workers);
  PAT_CHECK(
      config.min_item_tokens >= kCutGranularity && config.min_item_tokens % kCutGranularity == 0,
      "min_item_tokens must be a positive multiple of ", kCutGranularity, ", got ",
      config.min_item_tokens);
}

void KvSplitter::split(const Packing& packing, SplitTask task, Split& out) {
  out.clear();
  int64_t num_tokens = 0;
  bool any_shared = false;
  for (const Pack& pack : packing.packs) {
    int64_t of_pack = 0;
    for (const Segment& segment : packing.segments_of(pack)) of_pack += segment.num_tokens();
    num_tokens += of_pack * tiles_.num_tiles(pack.num_requests);
    any_shared |= !packing.segments[pack.segment_begin].is_private();
  }
  task.num_read = num_tokens;
  task.shares_nothing = !any_shared;
  const bool is_little = num_tokens < kItemsEach * config_.num_workers * config_.min_item_tokens;
  const bool has_long_range = std::ranges::any_of(
      packing.spans, [](const GatherSpan& span) { return span.num_tokens >= kLongRange; });
  const SplitContext context{.num_workers = config_.num_workers,
                             .tiles = tiles_,
                             .costs = &cost_,
                             .item_costs = item_costs_.data(),
                             .counts_stages = is_little || (any_shared && !has_long_range),
                             .min_item_tokens = config_.min_item_tokens};
  list_.make(packing, context, false);
  const int64_t total = list_.total_cost();
  if (total == 0 || time_model_.takes_too_long(context, task, packing, list_.tiles())) return;
  const int64_t one_each = list_.num_shared() > 0 ? kOneTicketEach : kOneTicketEachUnshared;
  const bool is_much = total > kCostUnit * one_each * config_.num_workers;
  if (!is_much || has_long_range) {
    const bool is_aligned = stream_k_.split(context, task, packing, list_, is_little, out);
    if (!is_much) return;
    out.list_ticket_costs(ticket_costs_);
    if (is_aligned && is_balanced(ticket_costs_, config_.num_workers, kWorstAlignedImbalance)) {
      return;
    }
    list_.make(packing, context, true);
  }
  if ((!has_long_range && guided_.choose_whole_tiles(context, list_)) ||
      guided_.choose(context, packing, list_)) {
    out.clear();
    out.tickets.assign(guided_.num_tickets(), {});
    add_work_items(packing, context, list_.tiles(), guided_.shared_work(), out);
    add_work_items(packing, context, list_.tiles(), guided_.private_work(), out);
  } else if (!has_long_range) {
    stream_k_.split(context, task, packing, list_, is_little, out);
  }
  if (!has_long_range) return;
  out.list_ticket_costs(ticket_costs_);
  if (is_balanced(ticket_costs_, config_.num_workers, kWorstAlignedImbalance)) return;
  list_.make(packing, context, false);
  stream_k_.split_finer(context, task, packing, list_, out);
}

}  // namespace pat
