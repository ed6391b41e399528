#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "batches.h"
#include "kv_split/kv_split.h"
#include "runner.h"

namespace pat::testing {
namespace {

struct Made {
  int64_t num_distinct = 0;
  Packing packing;
  Split split;
};

Made split(const Batch& batch, const SchedulerConfig& config) {
  Made made;
  PrefixForest forest;
  const PathArrays arrays = batch.arrays();
  forest.build(arrays.view());
  forest.arrange(batch.seq_lens);
  for (const ForestNode& node : forest.nodes()) made.num_distinct += node.kv_end - node.kv_begin;
  for (size_t request = 0; request < batch.seq_lens.size(); ++request) {
    made.num_distinct +=
        batch.seq_lens[request] - forest.private_begin(static_cast<int32_t>(request));
  }
  const TileSelection tiles(tiles_of(config.latent), config.group_size, config.max_block_q);
  Packer(config.policy, config.cost.packing, tiles).pack(forest, batch.seq_lens, made.packing);
  KvSplitter({config.num_workers, config.min_item_tokens}, config.cost, tiles)
      .split(made.packing,
             {.num_requests = static_cast<int32_t>(batch.seq_lens.size()),
              .num_distinct = made.num_distinct},
             made.split);
  return made;
}

// True if a segment of an item is a whole segment of the packing, which no cut has shortened.
bool is_whole(const Packing& packing, const Segment& segment) {
  return std::ranges::any_of(packing.segments, [&](const Segment& other) {
    return other.span == segment.span && other.kv_begin == segment.kv_begin &&
           other.kv_end == segment.kv_end;
  });
}

// Counts a pack's segments once per tile, because a pack with more requests than a tile holds has several tiles.
int64_t num_uncut_segments(const Packing& packing, const TileSelection& tiles) {
  int64_t num_segments = 0;
  for (const Pack& pack : packing.packs) {
    num_segments += int64_t{pack.num_segments} * tiles.num_tiles(pack.num_requests);
  }
  return num_segments;
}

void check_split(const Made& made, const SchedulerConfig& config) {
  const TileSelection tiles(tiles_of(config.latent), config.group_size, config.max_block_q);
  const Packing& packing = made.packing;
  const Split& split = made.split;
  // Items have at least the usual length or, if workers have fewer than four items each, a quarter of that length.
  int64_t packed_tokens = 0;
  for (const Pack& pack : packing.packs) {
    for (const Segment& segment : packing.segments_of(pack)) {
      packed_tokens += int64_t{segment.num_tokens()} * tiles.num_tiles(pack.num_requests);
    }
  }
  const bool is_enough = packed_tokens >= int64_t{4} * config.min_item_tokens * config.num_workers;
  const int32_t quarter = config.min_item_tokens / 4 / kCutGranularity * kCutGranularity;
  const int32_t shortest = is_enough ? config.min_item_tokens : std::max(quarter, kCutGranularity);
  int64_t taken_requests = 0;
  for (const Split::WorkItem& item : split.work_items) {
    CHECK(item.num_requests > 0 && item.num_segments > 0);
    CHECK(item.num_requests <= tiles.requests_per_tile());
    taken_requests += item.num_requests;
    std::vector<char> touched(item.num_requests, 0);
    int64_t tokens = 0;
    for (int32_t s = item.segment_begin; s < item.segment_begin + item.num_segments; ++s) {
      const Segment& segment = split.segments[s];
      CHECK(segment.first >= 0 && segment.first < segment.end && segment.end <= item.num_requests);
      std::fill(touched.begin() + segment.first, touched.begin() + segment.end, 1);
      tokens += segment.num_tokens();
      // No cut leaves a short part of a segment.
      CHECK(segment.num_tokens() >= shortest || is_whole(packing, segment));
    }
    CHECK_EQ(tokens, item.num_tokens);
    CHECK(std::ranges::count(touched, 1) == item.num_requests);
  }
  const int64_t packed = static_cast<int64_t>(packing.requests.size());
  const int64_t most_cut = max_cut_requests(config.num_workers, tiles);
  CHECK(taken_requests - packed <= most_cut + packing.packing_slack);
  int64_t num_cuts = static_cast<int64_t>(split.work_items.size());
  for (const Pack& pack : packing.packs) num_cuts -= tiles.num_tiles(pack.num_requests);
  CHECK(static_cast<int64_t>(split.segments.size()) <=
        num_uncut_segments(packing, tiles) + kMaxSegmentsPerCut * num_cuts);
  size_t num_items = 0;
  for (const Ticket& ticket : split.tickets) {
    CHECK(ticket.item_begin < ticket.item_end);
    num_items += ticket.item_end - ticket.item_begin;
  }
  CHECK_EQ(num_items, split.work_items.size());
}

TEST(kv_split_cuts_no_item_short_and_not_too_often) {
  Random random(20);
  for (int round = 0; round < 1500; ++round) {
    const SchedulerConfig made = random_config(random);
    const Batch batch = random_batch(
        random, {.max_nodes = 6, .max_requests = draw(random, 1, 30), .max_tokens = 60'000});
    check_split(split(batch, made), made);
  }
}

// Items may be shorter than usual, but if a batch has many rows, a row must not get more partials than one warp merges.
TEST(kv_split_gives_idle_workers_something_to_do) {
  const auto longest_item = [](const Batch& batch, int32_t num_workers) {
    int64_t longest = 0;
    SchedulerConfig made = config(8, num_workers);
    made.min_item_tokens = 256;
    for (const Split::WorkItem& item : split(batch, made).split.work_items) {
      longest = std::max(longest, item.num_tokens);
    }
    return longest;
  };
  const Batch few = make_batch({{-1, 4096}}, std::vector<std::pair<int, int32_t>>(8, {0, 416}));
  CHECK(longest_item(few, 264) <= 128);
  CHECK(longest_item(few, 16) >= 448);
  const Batch many = make_batch({{-1, 2048}}, std::vector<std::pair<int, int32_t>>(64, {0, 128}));
  CHECK(longest_item(many, 132) >= 256);
}

TEST(kv_split_leaves_tiles_whole_that_end_together) {
  const SchedulerConfig made = config(8, 33);
  const Batch batch = make_batch({{-1, 2048}}, std::vector<std::pair<int, int32_t>>(1024, {0, 32}));
  const Made result = split(batch, made);
  CHECK_EQ(result.split.work_items.size(), result.packing.packs.size());
  CHECK_EQ(result.split.tickets.size(), result.packing.packs.size());
}

TEST(kv_split_of_one_long_tile) {
  SchedulerConfig made = config();
  made.max_block_q = 64;
  bool guided = false;
  for (int32_t tokens = 20'000; tokens < 700'000; tokens += 9'973) {
    for (const int num_requests : {2, 5, 16}) {
      const Batch batch =
          make_batch({{-1, tokens}}, std::vector<std::pair<int, int32_t>>(num_requests, {0, 0}));
      const Made result = split(batch, made);
      check_split(result, made);
      const bool many_tickets = result.split.tickets.size() > static_cast<size_t>(made.num_workers);
      CHECK(!many_tickets || num_requests < 16);  // each cut of so many requests costs too much
      guided |= many_tickets;
    }
  }
  CHECK(guided);
}

TEST(kv_split_deals_out_a_long_shared_range_chunk_by_chunk) {
  SchedulerConfig made = config(8);
  made.max_block_q = 64;
  for (const int32_t tokens : {8'192, 32'768, 131'072}) {
    const Batch batch =
        make_batch({{-1, tokens}}, std::vector<std::pair<int, int32_t>>(304, {0, 256}));
    const Made result = split(batch, made);
    check_split(result, made);
    // Where the shared KV of each ticket begins. All 38 tiles get a chunk before any tile gets its next chunk. With whole
    // tiles, some workers would have one tile and others two.
    std::vector<int32_t> begins;
    for (const Ticket& ticket : result.split.tickets) {
      const Split::WorkItem& item = result.split.work_items[ticket.item_begin];
      const Segment& segment = result.split.segments[item.segment_begin];
      if (segment.is_private()) continue;
      CHECK_EQ(ticket.item_end, ticket.item_begin + 1);
      begins.push_back(segment.kv_begin);
    }
    CHECK(std::ranges::is_sorted(begins));
    CHECK(begins.size() >= 76 && begins.size() % 38 == 0);
    for (size_t i = 0; i < begins.size(); ++i) CHECK_EQ(begins[i], begins[i / 38 * 38]);
    // Tickets of tails come between tickets of chunks.
    const auto is_tail = [&](const Ticket& ticket) {
      const Split::WorkItem& item = result.split.work_items[ticket.item_begin];
      return result.split.segments[item.segment_begin].is_private();
    };
    CHECK(std::ranges::count_if(std::span(result.split.tickets).first(30), is_tail) > 0);
  }
}

// 13 tiles for 33 workers: two tickets per tile would leave seven workers idle, and three are more tickets than workers.
TEST(kv_split_gives_workers_a_few_tickets_of_a_long_shared_range) {
  for (const auto& [num_tokens, own] :
       {std::pair{6'144, 1'024}, {65'536, 1'024}, {131'072, 1'024}}) {
    SchedulerConfig made = config();
    made.max_block_q = 64;
    made.min_item_tokens = 256;
    const Made result = split(
        make_batch({{-1, num_tokens}}, std::vector<std::pair<int, int32_t>>(200, {0, own})), made);
    check_split(result, made);
    std::vector<int64_t> costs;
    result.split.list_ticket_costs(costs);
    CHECK(costs.size() > 33 && costs.size() <= 8 * 33);
    CHECK(is_balanced(costs, 33, 1.1));
    // CTAs draw all tickets of a position before those of the next, and all tiles have the same positions.
    std::map<int32_t, int> tickets_at;
    int32_t last = 0;
    for (const Ticket& ticket : result.split.tickets) {
      const Split::WorkItem& item = result.split.work_items[ticket.item_begin];
      const Segment& segment = result.split.segments[item.segment_begin];
      CHECK(segment.kv_begin >= last);
      last = segment.kv_begin;
      if (!segment.is_private()) ++tickets_at[last];
    }
    CHECK(tickets_at.size() >= 2);
    // Towards the end, tiles of fewer requests may have no cut.
    tickets_at.erase(std::prev(tickets_at.end()));
    for (const auto& [position, count] : tickets_at) CHECK_EQ(count, 13);
  }
}

// If a tile is parted into its long range and the rest, each of its requests gets one more partial, as at a cut.
TEST(kv_split_counts_what_parting_tiles_costs) {
  const auto num_tickets = [](int num_requests, int32_t num_tokens, int32_t num_workers) {
    SchedulerConfig made = config(16, num_workers);  // a tile has four requests
    made.max_block_q = 64;
    const Made result = split(make_batch({{-1, num_tokens}}, std::vector<std::pair<int, int32_t>>(
                                                                 num_requests, {0, 256})),
                              made);
    check_split(result, made);
    return static_cast<int32_t>(result.split.tickets.size());
  };
  // Nine parted tiles have too many cuts for two workers, so each worker gets an even share. Seven do not.
  CHECK_EQ(num_tickets(36, 8'192, 2), 2);
  CHECK(num_tickets(28, 8'192, 2) > 2);
  CHECK(num_tickets(8, 131'072, 11) > 11);  // two tiles that nearly use up the partials
  CHECK(num_tickets(24, 131'072, 8) > 8);   // longer chunks, because each makes many partials
}

TEST(kv_split_cuts_tiles_of_a_long_shared_range_at_the_same_places) {
  // Except with three tiles, the 33 workers cannot be divided evenly among the tiles. In the last case, 16 of 24
  // requests share more than the others, so the tiles are unequal, and items with more rows have higher fixed costs.
  using Requests = std::vector<std::pair<int, int32_t>>;
  struct Case {
    int32_t num_tokens;
    int num_tiles;
    Requests requests;
  };
  std::vector<Case> cases = {
      {32'768, 8, Requests(128, {0, 256})},   {32'768, 2, Requests(32, {0, 256})},
      {8'192, 2, Requests(32, {0, 256})},     {32'768, 3, Requests(40, {0, 256})},
      {131'072, 16, Requests(256, {0, 256})}, {65'536, 2, Requests(16, {1, 256})}};
  cases.back().requests.insert(cases.back().requests.end(), 8, {0, 256});
  for (const auto& [num_tokens, num_tiles, requests] : cases) {
    SchedulerConfig made = config();
    made.max_block_q = 64;
    const Made result = split(make_batch({{-1, num_tokens}, {0, 2'000}}, requests), made);
    check_split(result, made);
    CHECK(result.split.tickets.size() <= 33);
    // Per tile: where its items begin in the shared range. Towards the end, a tile may have one item less than others.
    std::vector<std::vector<int32_t>> begins;
    for (const Split::WorkItem& item : result.split.work_items) {
      const Segment& segment = result.split.segments[item.segment_begin];
      if (segment.is_private() || segment.kv_begin >= num_tokens) continue;
      if (segment.kv_begin == 0) begins.emplace_back();
      begins.back().push_back(segment.kv_begin);
    }
    CHECK_EQ(begins.size(), static_cast<size_t>(num_tiles));
    const size_t most = std::ranges::max(begins, {}, &std::vector<int32_t>::size).size();
    CHECK(most >= 2);
    for (const std::vector<int32_t>& of_tile : begins) {
      CHECK(of_tile.size() + 1 >= most);
      for (size_t i = 0; i < of_tile.size(); ++i) {
        for (const std::vector<int32_t>& other : begins) {
          CHECK(i >= other.size() || other[i] == of_tile[i]);
        }
      }
    }
  }
}

// Shorter items are worth their partials only if the work of the CTAs is uneven without them.
TEST(kv_split_takes_the_items_that_are_expected_to_end_first) {
  const auto shortest_cut = [](const Batch& batch) {
    SchedulerConfig made = config(4, 264);
    made.max_block_q = 64;
    made.min_item_tokens = 256;
    const Made result = split(batch, made);
    check_split(result, made);
    int32_t shortest = INT32_MAX;
    for (const Segment& segment : result.split.segments) {
      if (!is_whole(result.packing, segment)) shortest = std::min(shortest, segment.num_tokens());
    }
    return shortest;
  };
  std::vector<std::pair<int32_t, int32_t>> nodes{{-1, 1024}};
  std::vector<std::pair<int, int32_t>> requests;
  for (int32_t node = 1; node <= 16; ++node) {
    nodes.emplace_back(0, 256);
    requests.insert(requests.end(), 4, {node, 128});
  }
  CHECK_EQ(shortest_cut(make_batch(nodes, requests)), 128);
  nodes = {{-1, 32}, {0, 256}, {0, 256}, {0, 256}, {0, 256}};
  requests.clear();
  for (int32_t node = 5; node < 13; ++node) {
    nodes.emplace_back((node - 3) / 2, 256);
    requests.insert(requests.end(), 32, {node, 32});
  }
  CHECK_EQ(shortest_cut(make_batch(nodes, requests)), 64);
}

TEST(kv_split_gives_up_where_another_split_is_as_good) {
  const SchedulerConfig made = config(4, 33);
  const Batch batch = make_batch({{-1, 800}}, std::vector<std::pair<int, int32_t>>(40, {0, 60}));
  const Made usual = split(batch, made);
  CHECK(usual.split.time > 0);
  const TileSelection tiles(tiles_of(made.latent), made.group_size, made.max_block_q);
  KvSplitter splitter({made.num_workers, made.min_item_tokens}, made.cost, tiles);
  Split other;
  splitter.split(usual.packing, {40, usual.num_distinct, usual.split.time / 2}, other);
  CHECK(other.tickets.empty() && other.work_items.empty());
  CHECK_EQ(other.time, 0);
  splitter.split(usual.packing, {40, usual.num_distinct, 2 * usual.split.time}, other);
  CHECK_EQ(other.time, usual.split.time);
  CHECK_EQ(other.tickets.size(), usual.split.tickets.size());
}

TEST(kv_split_counts_whole_stages_and_segments) {
  // Both halves of the batch have equally many tokens, but 33 tokens take two stages of 32 tokens.
  std::vector<std::pair<int, int32_t>> requests(128, {0, 33});
  requests.insert(requests.end(), 66, {1, 64});
  SchedulerConfig made = config(1, 10);
  made.max_block_q = 64;
  const Made result = split(make_batch({{-1, 64}, {-1, 64}}, requests), made);
  check_split(result, made);
  int64_t most = 0;
  int64_t least = INT32_MAX;
  for (const Ticket& ticket : result.split.tickets) {
    int64_t stages = 0;
    for (int32_t p = ticket.item_begin; p < ticket.item_end; ++p) {
      const Split::WorkItem& item = result.split.work_items[p];
      for (int32_t s = 0; s < item.num_segments; ++s) {
        stages += (result.split.segments[item.segment_begin + s].num_tokens() + 31) / 32;
      }
    }
    most = std::max(most, stages);
    least = std::min(least, stages);
  }
  CHECK_EQ(result.split.tickets.size(), size_t{10});
  CHECK(10 * most <= 11 * least);
}

// Tickets are ordered by cost in steps of an eighth of the largest, and within a step in the order of the tiles.
TEST(kv_split_draws_large_tickets_of_a_small_step_first) {
  Random random(23);
  int num_uneven = 0;
  int num_in_order = 0;
  for (int round = 0; round < 300; ++round) {
    const SchedulerConfig made = config(4, 33);
    const Batch batch =
        random_batch(random, {.max_nodes = 12, .max_requests = 60, .max_tokens = 300});
    const Made result = split(batch, made);
    const std::vector<Ticket>& tickets = result.split.tickets;
    const auto cost = [&](const Ticket& ticket) {
      int64_t sum = 0;
      for (int32_t p = ticket.item_begin; p < ticket.item_end; ++p) {
        sum += result.split.work_items[p].cost;
      }
      return sum;
    };
    int64_t largest = 0;
    for (const Ticket& ticket : tickets) largest = std::max(largest, cost(ticket));
    for (size_t t = 1; t < tickets.size(); ++t) {
      const int64_t before = 8 * cost(tickets[t - 1]) / largest;
      const int64_t eighths = 8 * cost(tickets[t]) / largest;
      CHECK(eighths <= before);
      num_uneven += eighths < before;
      if (eighths < before) continue;
      CHECK(tickets[t].item_begin > tickets[t - 1].item_begin);
      ++num_in_order;
    }
  }
  CHECK(num_uneven > 300 && num_in_order > 300);
}

TEST(kv_split_begins_tiles_that_share_kv_at_the_same_time) {
  // Each of the five tiles has more work than a worker's share, so each tile begins a ticket.
  SchedulerConfig made = config();
  made.max_block_q = 64;
  const Batch batch = make_batch({{-1, 1'000}}, std::vector<std::pair<int, int32_t>>(80, {0, 300}));
  const Made result = split(batch, made);
  check_split(result, made);
  size_t num_begins = 0;
  for (const Ticket& ticket : result.split.tickets) {
    for (int32_t p = ticket.item_begin; p < ticket.item_end; ++p) {
      const Segment& segment = result.split.segments[result.split.work_items[p].segment_begin];
      if (segment.is_private() || segment.kv_begin > 0) continue;
      CHECK_EQ(p, ticket.item_begin);
      ++num_begins;
    }
  }
  CHECK_EQ(num_begins, size_t{5});
}

TEST(kv_split_reads_little_again_where_tickets_are_short) {
  // A worker's share is 386 tokens. Partials of 7 requests would cost as much as reading 590 tokens again.
  SchedulerConfig made = config(8, 264);
  made.max_block_q = 64;
  made.min_item_tokens = 256;
  std::vector<std::pair<int32_t, int32_t>> nodes(60, {-1, 500});
  std::vector<std::pair<int, int32_t>> requests;
  for (int32_t node = 0; node < 60; ++node) {
    for (int32_t i = 0; i < 8; ++i) requests.emplace_back(node, 150);
  }
  const Made result = split(make_batch(nodes, requests), made);
  check_split(result, made);
  for (const Split::WorkItem& item : result.split.work_items) CHECK(item.num_tokens <= 600);
}

TEST(kv_split_reads_more_again_where_nothing_is_merged_then) {
  // If the 33 workers reread little KV, they make 96 partials. Without partials, each worker reads 124 more tokens.
  SchedulerConfig made = config(4, 33);
  made.max_block_q = 64;
  made.min_item_tokens = 256;
  const std::vector<std::pair<int, int32_t>> requests(256, {0, 32});
  const Made result = split(make_batch({{-1, 256}}, requests), made);
  check_split(result, made);
  CHECK_EQ(result.split.requests.size(), size_t{256});
}

TEST(kv_split_reads_few_segments_again) {
  // 15 levels of one token. One request ends at each level. By tokens alone, reading the levels again is cheaper than
  // partials.
  std::vector<std::pair<int32_t, int32_t>> nodes;
  std::vector<std::pair<int, int32_t>> requests;
  for (int i = 0; i < 15; ++i) nodes.emplace_back(i - 1, 1);
  for (int i = 0; i < 16; ++i) requests.emplace_back(std::max(14 - i, 0), 300);
  SchedulerConfig made = config(4, 4);
  made.max_block_q = 64;
  const Made result = split(make_batch(nodes, requests), made);
  check_split(result, made);
  CHECK_EQ(result.packing.packs.size(), size_t{1});
  const auto shared_of = [&](const Split::WorkItem& item) {
    std::vector<int32_t> spans;
    for (int32_t s = 0; s < item.num_segments; ++s) {
      const Segment& segment = result.split.segments[item.segment_begin + s];
      if (!segment.is_private()) spans.push_back(segment.span);
    }
    return spans;
  };
  CHECK_EQ(result.split.work_items.size(), size_t{4});
  for (size_t p = 1; p < result.split.work_items.size(); ++p) {
    const std::vector<int32_t> before = shared_of(result.split.work_items[p - 1]);
    const auto is_read_again = [&](int32_t span) { return std::ranges::count(before, span) > 0; };
    CHECK(std::ranges::count_if(shared_of(result.split.work_items[p]), is_read_again) <=
          kMaxSegmentsPerCut);
  }
}

TEST(kv_split_takes_the_longest_and_largest_input) {
  for (const int32_t cost : {0, 1, kLargestCost}) {
    for (const int32_t item_tokens : {64, 1 << 20, INT32_MAX / 64 * 64}) {
      SchedulerConfig made = config(16, 3);
      made.min_item_tokens = item_tokens;
      CostModel::visit(made.cost, [&](const std::string&, int32_t& value, int32_t least) {
        value = std::max(cost, least);
      });
      const Batch batch =
          make_batch({{-1, 1'000'000'000}, {0, 1'000'000'000}, {-1, 70}},
                     {{1, 1'000}, {1, 147'483'647}, {0, 3}, {2, 5}, {2, 0}, {-1, 0}});
      check_split(split(batch, made), made);
      // So little work that each worker gets one ticket.
      made.cost = {};
      check_split(split(make_batch({{-1, 700}}, {{0, 5}, {0, 3}}), made), made);
    }
  }
}

}  // namespace
}  // namespace pat::testing
