#include <algorithm>
#include <map>

#include "batches.h"
#include "plan_checks.h"
#include "runner.h"
#include "window_cut.h"

namespace pat::testing {
namespace {

WindowCut cut_batch(const Batch& batch, const WindowRule& rule) {
  PrefixForest forest;
  const PathArrays arrays = batch.arrays();
  forest.build(arrays.view());
  return cut_windows(forest, batch.seq_lens, rule);
}

// The batch that is left, for the checks of plans.
Batch rows_of(const WindowCut& cut, const Batch& batch, int32_t window) {
  Batch rows;
  for (size_t i = 0; i < batch.seq_lens.size(); ++i) {
    rows.paths.emplace_back();
    for (int32_t n = cut.path_begin[i]; n < cut.path_begin[i + 1]; ++n) {
      rows.paths.back().push_back({cut.node_id[n], cut.kv_begin[n], cut.kv_end[n]});
    }
    rows.seq_lens.push_back(std::min(batch.seq_lens[i], window));
  }
  return rows;
}

// The node of a path at a position.
int64_t node_at(const Path& path, int32_t position) {
  const auto found =
      std::ranges::find_if(path, [&](const Node& node) { return position < node.kv_end; });
  CHECK(found != path.end());
  return found->id;
}

TEST(rows_share_only_what_their_windows_share) {
  Random random(20);
  int64_t num_shared = 0;
  for (int round = 0; round < 3000; ++round) {
    const Batch batch = one_in(random, 4) ? extreme_batch(random) : random_batch(random, {});
    const WindowRule rule = {.window = static_cast<int32_t>(draw(random, 1, 3000)),
                             .slack = static_cast<int32_t>(draw(random, 0, 70)),
                             .ahead = static_cast<int32_t>(draw(random, 0, 8)),
                             .rows_per_class = static_cast<int32_t>(draw(random, 1, 40))};
    const WindowCut cut = cut_batch(batch, rule);
    const Batch rows = rows_of(cut, batch, rule.window);
    std::map<int64_t, std::pair<int32_t, int64_t>>
        seen;  // node -> its cut, and a node of the batch
    for (size_t i = 0; i < rows.paths.size(); ++i) {
      const Path& path = rows.paths[i];
      const int32_t length = batch.seq_lens[i];
      if (path.empty()) {
        CHECK_EQ(cut.cut[i], 0);
        CHECK(cut.longest[i] > length || length == INT32_MAX);
        continue;
      }
      CHECK(length - rule.window <= cut.cut[i]);
      CHECK(length + rule.slack <= cut.longest[i]);
      CHECK_EQ(cut.longest[i], cut.cut[i] + rule.window - rule.ahead);
      CHECK(cut.cut[i] + path.back().kv_end <= batch.paths[i].back().kv_end);
      for (const Node& node : path) {
        const int64_t last = node_at(batch.paths[i], cut.cut[i] + node.kv_end - 1);
        const auto [same, is_new] = seen.try_emplace(node.id, cut.cut[i], last);
        CHECK_EQ(same->second.first, cut.cut[i]);
        CHECK_EQ(same->second.second, last);
        num_shared += !is_new;
      }
    }
    SchedulerConfig made = random_config(random);
    PackScheduler scheduler(made);
    scheduler.plan(cut.paths(), rows.seq_lens);
    check_plan(scheduler, made, rows);
  }
  CHECK(num_shared > 10'000);
}

TEST(rows_within_their_windows_stay_as_they_are) {
  Random random(21);
  for (int round = 0; round < 200; ++round) {
    const Batch batch = random_batch(random, {});
    const int32_t longest = std::ranges::max(batch.seq_lens);
    const WindowCut cut =
        cut_batch(batch, {.window = longest + 8, .slack = 4, .ahead = 4, .rows_per_class = 2});
    PackScheduler whole(config()), rows(config());
    const PathArrays arrays = batch.arrays();
    whole.plan(arrays.view(), batch.seq_lens);
    rows.plan(cut.paths(), batch.seq_lens);
    CHECK(plan_bytes(whole) == plan_bytes(rows));
  }
}

TEST(a_rule_that_is_out_of_range) {
  const Batch batch = make_batch({{-1, 10}}, {{0, 3}, {0, 5}});
  CHECK_THROWS(cut_batch(batch, {0, 1, 1, 8}), "window must be at least 1, got 0");
  CHECK_THROWS(cut_batch(batch, {4, -1, 1, 8}),
               "slack and ahead must not be negative, got -1 and 1");
  CHECK_THROWS(cut_batch(batch, {4, 1, 1, 0}), "rows_per_class must be at least 1, got 0");
}

}  // namespace
}  // namespace pat::testing
