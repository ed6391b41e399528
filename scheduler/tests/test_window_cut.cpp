#include <algorithm>
#include <array>
#include <map>

#include "batches.h"
#include "plan_checks.h"
#include "runner.h"
#include "window_cut.h"

namespace pat::testing {
namespace {

WindowCut cut_batch(const Batch& batch, const WindowRule& rule, int32_t rows_per_class) {
  PrefixForest forest;
  const PathArrays arrays = batch.arrays();
  forest.build(arrays.view());
  forest.arrange(batch.seq_lens);
  WindowCut cut(rule, rows_per_class);
  cut.cut(forest, batch.seq_lens);
  return cut;
}

// Returns the rows of a WindowCut as a batch, for the checks of plans.
Batch rows_of(WindowCut& cut) {
  Batch rows;
  for (size_t i = 0; i < cut.row_lens().size(); ++i) {
    rows.paths.emplace_back();
    for (const PrefixForest::PathNode& node : cut.rows().path(static_cast<int32_t>(i))) {
      rows.paths.back().push_back({node.id, node.kv_begin, node.kv_end});
    }
    rows.seq_lens.push_back(cut.row_lens()[i]);
  }
  return rows;
}

// Returns the id of the path's node that contains a position.
int64_t node_at(const Path& path, int32_t position) {
  const auto found =
      std::ranges::find_if(path, [&](const Node& node) { return position < node.kv_end; });
  CHECK(found != path.end());
  return found->id;
}

// Returns the lengths after each request but padding has grown by `tokens`.
std::vector<int32_t> grown(std::vector<int32_t> lens, int32_t tokens) {
  for (int32_t& length : lens) length += length > 0 ? tokens : 0;
  return lens;
}

TEST(rows_share_only_what_their_windows_share) {
  Random random(20);
  int64_t num_shared = 0;
  for (int round = 0; round < 3000; ++round) {
    const Batch batch = one_in(random, 4) ? extreme_batch(random) : random_batch(random, {});
    SchedulerConfig made = random_config(random);
    made.batch_invariant = false;
    made.window = {.window = static_cast<int32_t>(draw(random, 1, 3000)),
                   .slack = static_cast<int32_t>(draw(random, 0, 70)),
                   .ahead = static_cast<int32_t>(draw(random, 0, 8))};
    made.window.chunked = one_in(random, 3);
    if (made.window.chunked) made.window.ahead = 0;
    const auto [window, slack, ahead, chunked] = made.window;
    WindowCut cut = cut_batch(batch, made.window, made.max_block_q / made.group_size);
    const Batch rows = rows_of(cut);
    std::map<int64_t, std::pair<int32_t, int64_t>> seen;  // id in rows: (cut, id in the batch)
    for (size_t i = 0; i < rows.paths.size(); ++i) {
      const Path& path = rows.paths[i];
      const int32_t length = batch.seq_lens[i];
      const int32_t chunk = length == 0 ? 0 : (length - 1) / window * window;
      CHECK_EQ(rows.seq_lens[i], chunked ? length - chunk : std::min(length, window));
      if (path.empty()) {
        CHECK_EQ(cut.cuts()[i], 0);
        CHECK(cut.longest()[i] > length || length == INT32_MAX ||
              (chunked && length % window == 0));
        continue;
      }
      if (chunked) {
        CHECK_EQ(cut.cuts()[i], chunk);
      } else {
        CHECK(length - window <= cut.cuts()[i]);
        CHECK(length + slack <= cut.longest()[i]);
      }
      CHECK_EQ(cut.longest()[i], cut.cuts()[i] + window - ahead);
      CHECK(cut.cuts()[i] + path.back().kv_end <= batch.paths[i].back().kv_end);
      for (const Node& node : path) {
        const int64_t last = node_at(batch.paths[i], cut.cuts()[i] + node.kv_end - 1);
        const auto [same, is_new] = seen.try_emplace(node.id, cut.cuts()[i], last);
        CHECK_EQ(same->second.first, cut.cuts()[i]);
        CHECK_EQ(same->second.second, last);
        num_shared += !is_new;
      }
    }
    PackScheduler scheduler(made);
    const PathArrays arrays = batch.arrays();
    scheduler.plan(arrays.view(), batch.seq_lens);
    check_plan(scheduler, made, rows);
    CHECK(std::ranges::equal(scheduler.last_cuts(), cut.cuts()));
    const int32_t left = scheduler.steps_left(batch.seq_lens, INT32_MAX - 1);
    CHECK(scheduler.check_lengths(grown(batch.seq_lens, left)).served);
    for (size_t i = 0; i < rows.paths.size(); ++i) {
      CHECK(batch.seq_lens[i] == 0 || left <= cut.longest()[i] - batch.seq_lens[i]);
    }
    const int32_t longest = std::ranges::max(batch.seq_lens);
    if (longest > 0 && longest + int64_t{left} < INT32_MAX - 1) {
      CHECK(!scheduler.check_lengths(grown(batch.seq_lens, left + 1)).served);
    }
  }
  CHECK(num_shared > 10'000);
}

TEST(rows_within_their_windows_stay_as_they_are) {
  Random random(21);
  for (int round = 0; round < 200; ++round) {
    const Batch batch = random_batch(random, {});
    SchedulerConfig made = config();
    PackScheduler whole(made);
    made.window = {.window = std::ranges::max(batch.seq_lens) + 8, .slack = 4, .ahead = 4};
    PackScheduler rows(made);
    const PathArrays arrays = batch.arrays();
    whole.plan(arrays.view(), batch.seq_lens);
    rows.plan(arrays.view(), batch.seq_lens);
    CHECK(plan_bytes(whole) == plan_bytes(rows));
  }
}

TEST(rows_as_long_as_the_window_do_not_grow) {
  SchedulerConfig made = config();
  made.window = {.window = 100, .slack = 8, .ahead = 0};
  PackScheduler scheduler(made);
  const auto plan = [&](const Batch& batch) {
    const PathArrays arrays = batch.arrays();
    scheduler.plan(arrays.view(), batch.seq_lens);
  };
  const auto check = [&](int32_t a, int32_t b) {
    return scheduler.check_lengths(std::array{a, b});
  };
  plan(make_batch({}, {{-1, 5000}, {-1, 90}}));  // growth_tokens is more than 10
  CHECK_EQ(check(5000, 90).total, 190);
  CHECK_EQ(check(9000, 120).total, 200);
  CHECK(check(90'000, 9'000).served);
  CHECK(!check(4999, 90).served);
  plan(make_batch({{-1, 1000}}, {{0, 10}, {0, 20}}));
  CHECK(check(1018, 1028).served);
  CHECK(!check(1018, 1029).served);
}

TEST(rows_within_chunks_end_with_them) {
  SchedulerConfig made = config();
  made.window = {.window = 1000, .chunked = true};
  PackScheduler scheduler(made);
  const auto check = [&](int32_t a, int32_t b, int32_t c) {
    return scheduler.check_lengths(std::array{a, b, c});
  };
  const PathArrays arrays = make_batch({{-1, 2500}}, {{0, 200}, {0, 495}, {-1, 3995}}).arrays();
  scheduler.plan(arrays.view(), std::array{2700, 2995, 3995});
  CHECK(std::ranges::equal(scheduler.last_cuts(), std::array{2000, 2000, 0}));
  CHECK_EQ(check(2700, 2995, 3995).total, 700 + 995 + 995);
  CHECK_EQ(scheduler.last_plan().kv_tokens().planned, 500 + 200 + 495 + 995);
  CHECK(check(2705, 3000, 4000).served);
  CHECK(!check(2705, 3001, 4000).served);
  CHECK(!check(2705, 3000, 4001).served);
  CHECK_EQ(check(2705, 3001, 4001).total, 705 + 1 + 1);
  CHECK_EQ(scheduler.steps_left(std::array{2700, 2995, 3995}, INT32_MAX), 5);
}

TEST(a_rule_that_is_out_of_range) {
  SchedulerConfig made = config();
  made.window = {-4, 1, 1};
  CHECK_THROWS(PackScheduler{made}, "window must not be negative, got -4");
  made.window = {4, -1, 1};
  CHECK_THROWS(PackScheduler{made}, "slack and ahead must not be negative, got -1 and 1");
  made.window = {4, 1, 1, true};
  CHECK_THROWS(PackScheduler{made}, "ahead must be 0 with chunks, got 1");
  made.window = {4, 1, 1};
  made.batch_invariant = true;
  CHECK_THROWS(PackScheduler{made}, "batch_invariant must be false with a window");
}

}  // namespace
}  // namespace pat::testing
