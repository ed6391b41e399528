#include <algorithm>
#include <ctime>
#include <numeric>

#include "plan_checks.h"
#include "runner.h"

namespace pat::testing {
namespace {

void plan(PackScheduler& scheduler, const Batch& batch) {
  const PathArrays arrays = batch.arrays();
  scheduler.plan(arrays.view(), batch.seq_lens);
}

TEST(plans_of_random_forests_are_right) {
  Random random(30);
  for (int round = 0; round < 1500; ++round) {
    const SchedulerConfig made = random_config(random);
    PackScheduler scheduler(made);
    const Batch batch = random_batch(random, {.max_nodes = draw(random, 0, 60),
                                              .max_requests = draw(random, 1, 100),
                                              .max_tokens = draw(random, 5, 20'000)});
    plan(scheduler, batch);
    check_plan(scheduler, made, batch);
    check_bounds(scheduler, made, batch.seq_lens);
  }
}

TEST(plans_serve_requests_that_grow) {
  Random random(32);
  int num_served = 0;
  for (int round = 0; round < 1500; ++round) {
    const SchedulerConfig made = config();
    PackScheduler scheduler(made);
    const Batch batch = random_batch(random, {.max_requests = draw(random, 1, 40)});
    plan(scheduler, batch);
    const auto growth = static_cast<int32_t>(draw(random, 1, one_in(random, 2) ? 32 : 300));
    const int64_t part = draw(random, 1, 8);
    std::vector<int32_t> grown = batch.seq_lens;
    for (int32_t& length : grown) length += one_in(random, part) ? growth : 0;
    const bool grows = grown != batch.seq_lens;
    const LengthCheck found = scheduler.check_lengths(grown);
    CHECK_EQ(found.total, std::accumulate(grown.begin(), grown.end(), int64_t{0}));
    CHECK_EQ(found.longest, std::ranges::max(grown));
    if (found.served) {
      ++num_served;
      CHECK(growth <= 256 || !grows);
      check_plan(scheduler, made, batch, grown);
    } else if (growth <= 32) {  // refused only if no work item reads the new tokens
      bool is_read = true;
      for (size_t i = 0; i < grown.size(); ++i) {
        const Path& path = batch.paths[i];
        const bool has_own = batch.seq_lens[i] > (path.empty() ? 0 : path.back().kv_end);
        is_read &= grown[i] == batch.seq_lens[i] || has_own;
      }
      CHECK(!is_read);
    }
    CHECK(!scheduler.check_lengths(std::span(grown).first(grown.size() - 1)).served);
    if (batch.seq_lens[0] == 0) continue;
    grown = batch.seq_lens;
    --grown[0];
    CHECK(!scheduler.check_lengths(grown).served);
  }
  CHECK(num_served > 100);
}

TEST(plans_fit_what_is_reserved_for_their_requests) {
  std::vector<Batch> batches = {balanced_batch({1, 4, 8, 256}, 300),
                                balanced_batch({1, 16, 64}, 1000),
                                balanced_batch({1, 2, 4, 8, 16, 32, 64, 128}, 200),
                                balanced_batch({1, 2, 4, 8, 16, 32, 64, 128}, 5),
                                balanced_batch({1}, 700'000),
                                balanced_batch({1, 3}, 90'000),
                                balanced_batch({1, 64}, 400)};
  for (const int num_requests : {2, 17, 40, 256}) {
    for (const int32_t tokens : {3, 80, 500, 20'000}) {
      batches.push_back(caterpillar_batch(num_requests, tokens, 100));
    }
  }
  for (int heads = 1; heads <= 8; ++heads) {
    for (int32_t group_size = 1; group_size <= kMaxGroupSize; ++group_size) {
      for (const Batch& batch : batches) {
        for (const Policy policy : {Policy::kMemory, Policy::kPerNode}) {
          if (policy == Policy::kPerNode && group_size % 5 > 0) continue;
          const SchedulerConfig made = config(group_size, 264 / heads, policy);
          PackScheduler scheduler(made);
          plan(scheduler, batch);
          check_bounds(scheduler, made, batch.seq_lens);
        }
      }
    }
  }
}

// A tile has the rows of 64 / heads requests, so shared KV is read only once for that many requests.
TEST(latent_layers_pack_as_many_requests_as_a_tile_has_room_for) {
  const Batch batch = balanced_batch({1, 128}, 8192);
  for (const int32_t heads : {1, 5, 8, 12, 16, 20, 32, 33, 64}) {
    SchedulerConfig made = config(heads, 132);
    made.latent = true;
    PackScheduler scheduler(made);
    plan(scheduler, batch);
    check_plan(scheduler, made, batch);
    check_bounds(scheduler, made, batch.seq_lens);
    const int32_t tiles = (128 + 64 / heads - 1) / (64 / heads);
    CHECK_EQ(scheduler.last_plan().header().largest_tile, 1);
    CHECK_EQ(scheduler.last_plan().kv_tokens().planned, int64_t{8192} * (tiles + 128));
  }
  SchedulerConfig made = config(65);
  made.latent = true;
  CHECK_THROWS(PackScheduler{made}, "group_size must be 1 to 64 query heads per KV head, got 65");
  CHECK_THROWS(PackScheduler{config(17)}, "group_size must be 1 to 16 query heads per KV head");
}

TEST(plan_bounds_grow_with_the_requests) {
  const TileSelection tiles(kTileTable, 4, 64);
  for (int32_t n = 1; n < 300; ++n) {
    const PlanBounds less = plan_bounds(n, 33, tiles), more = plan_bounds(n + 1, 33, tiles);
    CHECK(less.num_partials < more.num_partials);
    CHECK(less.capacity.num_work_items < more.capacity.num_work_items);
    CHECK(less.capacity.num_gather_spans < more.capacity.num_gather_spans);
  }
  CHECK_THROWS(plan_bounds(0, 33, tiles), "max_requests must be at least 1, got 0");
  CHECK_THROWS(plan_bounds(1, 0, tiles), "num_workers must be 1 to 65536, got 0");
  CHECK_THROWS(plan_bounds(INT32_MAX, 33, tiles), "max_requests 2147483647 is too large");
}

// With tiles of 32 instead of 64 query rows, shared KV is read more often. Such tiles pay if more workers get work.
TEST(plans_of_small_steps_may_have_narrow_tiles) {
  const auto largest_tile = [](SchedulerConfig made, const std::vector<int>& levels,
                               int32_t tokens) {
    made.min_item_tokens = 256;
    const Batch batch = balanced_batch(levels, tokens);
    PackScheduler scheduler(made);
    plan(scheduler, batch);
    check_plan(scheduler, made, batch);
    check_bounds(scheduler, made, batch.seq_lens);
    return scheduler.last_plan().header().largest_tile;
  };
  SchedulerConfig made = config(8, 264);
  made.max_block_q = 64;
  CHECK_EQ(largest_tile(made, {1, 16, 64}, 200), 1);
  CHECK_EQ(largest_tile(made, {1, 16, 64}, 20'000), 2);
  // All requests together have 32 query rows, so a wider tile is never used.
  CHECK_EQ(largest_tile(made, {1, 4}, 20'000), 1);
  // The smallest steps share nothing.
  CHECK_EQ(largest_tile(made, {1, 4}, 200), 0);
  // Narrow tiles are not tried if a request does not fit into them, with one_tile, in the batch-invariant mode, or with
  // another policy.
  made.group_size = made.max_block_q = 16;
  CHECK_EQ(largest_tile(made, {1, 16, 64}, 200), 0);
  made.group_size = 8;
  made.max_block_q = 64;
  made.one_tile = true;
  PackScheduler one_tile(made);
  plan(one_tile, balanced_batch({1, 16, 64}, 200));
  CHECK_EQ(one_tile.last_plan().header().largest_tile, 2);
  made.one_tile = false;
  made.batch_invariant = true;
  CHECK_EQ(largest_tile(made, {1, 16, 64}, 200), 0);
  made.batch_invariant = false;
  made.policy = Policy::kPaper;
  CHECK_EQ(largest_tile(made, {1, 16, 64}, 200), 2);
}

// Compares by the splitter's own estimate, which includes cuts and merges. Skips large work, which has no estimate.
void check_no_dearer_than_unshared(bool latent, int num_rounds) {
  Random random(31);
  int num_compared = 0, num_small = 0, num_shared = 0;
  for (int round = 0; round < num_rounds; ++round) {
    SchedulerConfig made = random_config(random, latent);
    if (latent) made.cost = kShippedLatentCosts[round % kShippedLatentCosts.size()].cost;
    const Batch batch = random_batch(random, {.max_nodes = draw(random, 1, 12),
                                              .max_requests = draw(random, 1, 64),
                                              .max_tokens = int64_t{1} << draw(random, 4, 13)});
    const auto planned = [&](Policy policy) {
      made.policy = policy;
      PackScheduler scheduler(made);
      plan(scheduler, batch);
      return std::pair(scheduler.expected_time(), scheduler.last_plan().kv_tokens());
    };
    const auto [time, tokens] = planned(Policy::kMemory);
    const auto [unshared, _] = planned(Policy::kQueryCentric);
    if (time == 0 || unshared == 0) continue;
    CHECK(time <= unshared);
    ++num_compared;
    num_small += tokens.query_centric < int64_t{300} * made.num_workers;
    num_shared += tokens.planned < tokens.query_centric;
  }
  CHECK(num_compared > num_rounds * 8 / 10 && num_small > num_rounds * 6 / 10);
  CHECK(num_shared > num_rounds * (latent ? 5 : 15) / 100);
}

TEST(plans_are_expected_to_take_no_longer_than_without_sharing) {
  check_no_dearer_than_unshared(false, 10'000);
}

TEST(latent_plans_are_expected_to_take_no_longer_than_without_sharing) {
  check_no_dearer_than_unshared(true, 5'000);
}

// A tile of 64 rows has room for only one such request, so no KV can be read once for two requests.
TEST(latent_requests_that_fill_a_tile_are_never_packed) {
  Random random(5);
  for (int round = 0; round < 1'000; ++round) {
    SchedulerConfig made = random_config(random, true);
    made.group_size = static_cast<int32_t>(draw(random, 33, 64));
    made.max_block_q = kLatentTileTable.largest_block_q();
    made.policy = Policy::kMemory;
    made.batch_invariant = one_in(random, 2);
    made.cost = kShippedLatentCosts[0].cost;
    PackScheduler scheduler(made);
    plan(scheduler, random_batch(random, {}));
    const KvTokens& tokens = scheduler.last_plan().kv_tokens();
    CHECK_EQ(tokens.planned, tokens.query_centric);
  }
}

struct Chains {
  PrefixForest forest;
  std::vector<int32_t> seq_lens;
};

// Makes chains of nodes. One request leaves the chain at each level.
Chains make_chains(int num_chains, int num_levels, int32_t node_tokens) {
  Chains made;
  PathArrays arrays;
  Path path;
  for (int level = 0; level < num_chains * num_levels; ++level) {
    if (level % num_levels == 0) path.clear();
    const int32_t begin = path.empty() ? 0 : path.back().kv_end;
    path.push_back({level, begin, begin + node_tokens});
    arrays.add(path);
    made.seq_lens.push_back(begin + node_tokens + 100);
  }
  made.forest.build(arrays.view());
  return made;
}

TEST(plan_takes_as_long_for_one_chain_as_for_as_many_levels_of_shorter_ones) {
  for (const int32_t node_tokens : {20, 300}) {
    Chains deep = make_chains(1, 4000, node_tokens);
    Chains flat = make_chains(8, 500, node_tokens);
    PackScheduler scheduler(config());
    const auto cpu_time = [&](Chains& chains) {
      const std::clock_t begin = std::clock();
      scheduler.plan(chains.forest, chains.seq_lens);
      return std::clock() - begin;
    };
    // The smallest of a few times, measured alternately, because other processes use the machine too.
    std::clock_t deep_time = cpu_time(deep), flat_time = cpu_time(flat);
    for (int round = 0; round < 12; ++round) {
      deep_time = std::min(deep_time, cpu_time(deep));
      flat_time = std::min(flat_time, cpu_time(flat));
    }
    CHECK(deep_time <= 2 * flat_time);
  }
}

TEST(plan_that_is_too_large_leaves_the_last_one_in_force) {
  const SchedulerConfig made = config();
  PackScheduler scheduler(made);
  const Batch small = balanced_batch({1, 4, 16}, 100);
  plan(scheduler, small);
  const std::vector<int32_t> before = plan_bytes(scheduler);
  constexpr int32_t kLongest = INT32_MAX;
  const Batch large =
      make_batch({{-1, kLongest}, {-1, kLongest}}, {{0, 0}, {1, 0}, {0, 0}, {1, 0}});
  CHECK_THROWS(plan(scheduler, large), "shared slots of this plan do not fit into int32");
  CHECK(plan_bytes(scheduler) == before);
  CHECK(scheduler.check_lengths(small.seq_lens).served);
  check_plan(scheduler, made, small);
}

TEST(plan_is_made_before_any_batch_came) {
  const PackScheduler scheduler(config());
  CHECK_EQ(plan_bytes(scheduler).size(), size_t{64});
  CHECK(scheduler.check_lengths({}).served);
}

TEST(plan_costs_are_checked) {
  SchedulerConfig made = config();
  made.cost.split.token[2] = 0;
  CHECK_THROWS(PackScheduler{made}, "cost token_64 must be 1 / 64 to 16384, got 0 / 64");
  made.cost = {.packing = {.item = -1}};
  CHECK_THROWS(PackScheduler{made}, "cost packed_item must be 0 / 64 to 16384, got -1 / 64");
}

TEST(plan_serves_no_token_that_it_does_not_read) {
  PackScheduler scheduler(config());
  // The first request has no private range that could grow.
  plan(scheduler, make_batch({{-1, 100}}, {{0, 0}, {0, 50}}));
  const auto serves = [&](int32_t a, int32_t b) {
    return scheduler.check_lengths(std::array{a, b}).served;
  };
  CHECK(serves(100, 150) && serves(100, 151));
  CHECK(!serves(101, 150) && !serves(101, 151));
  CHECK_EQ(scheduler.steps_left(std::array{100, 150}, INT32_MAX), 0);
}

TEST(plan_steps_left_of_any_lengths) {
  PackScheduler scheduler(config());
  plan(scheduler, make_batch({}, {{-1, 10}, {-1, INT32_MAX}}));
  const auto left = [&](int32_t a, int32_t b, int32_t longest) {
    return scheduler.steps_left(std::array{a, b}, longest);
  };
  CHECK_EQ(left(10, INT32_MAX, INT32_MAX), 0);
  CHECK_EQ(left(10, 0, INT32_MAX), 256);
  CHECK_EQ(left(10, 0, INT32_MIN), 0);
  CHECK_EQ(left(0, 0, 100), 0);
  CHECK_THROWS(left(INT32_MIN, 5, 7), "seq_lens must not be negative, got -2147483648");
}

}  // namespace
}  // namespace pat::testing
