#include <algorithm>
#include <array>
#include <map>

#include "batches.h"
#include "packer.h"
#include "runner.h"

namespace pat::testing {
namespace {

struct Packed {
  PrefixForest forest;
  Packing packing;
};

Packed pack(const Batch& batch, Policy policy, int32_t group_size = 4, int32_t max_block_q = 64) {
  Packed result;
  const PathArrays arrays = batch.arrays();
  result.forest.build(arrays.view());
  result.forest.arrange(batch.seq_lens);
  Packer packer(policy, {}, {kTileTable, group_size, max_block_q});
  packer.pack(result.forest, batch.seq_lens, result.packing);
  return result;
}

using Ranges = std::vector<std::array<int32_t, 3>>;  // first position, tokens, number of readers

// Returns the shared KV ranges that the packs read, in order.
Ranges shared_ranges(const Batch& batch, Policy policy) {
  const auto [forest, packing] = pack(batch, policy);
  std::map<int32_t, std::array<int32_t, 3>> found;  // by span
  for (const Segment& segment : packing.segments) {
    if (segment.is_private()) continue;
    auto& [begin, tokens, requests] = found[segment.span];
    begin = segment.kv_begin;
    tokens = static_cast<int32_t>(segment.num_tokens());
    requests += segment.end - segment.first;
  }
  Ranges ranges;
  for (const auto& [span, range] : found) ranges.push_back(range);
  std::ranges::sort(ranges);
  return ranges;
}

using Requests = std::vector<std::vector<int32_t>>;

// Returns the requests of every pack of Policy::kMemory, in tree order.
Requests packs_of(const Batch& batch, int32_t group_size = 4) {
  const auto [forest, packing] = pack(batch, Policy::kMemory, group_size);
  Requests packs;
  for (const Pack& each : packing.packs) {
    const auto requests = packing.requests_of(each);
    packs.emplace_back(requests.begin(), requests.end());
  }
  return packs;
}

std::vector<size_t> sizes_of(const Requests& packs) {
  std::vector<size_t> sizes;
  for (const auto& pack : packs) sizes.push_back(pack.size());
  return sizes;
}

// A root with two children. Each child has three requests with long tails.
Batch siblings(int32_t root, int32_t child) {
  std::vector<std::pair<int, int32_t>> requests;
  for (int i = 0; i < 6; ++i) requests.push_back({1 + i % 2, 5000});
  return make_batch({{-1, root}, {0, child}, {0, child}}, requests);
}

TEST(packing_of_a_pack_per_node_or_of_none) {
  CHECK((shared_ranges(siblings(10, 400), Policy::kPerNode) ==
         Ranges{{0, 10, 6}, {10, 400, 3}, {10, 400, 3}}));
  CHECK(shared_ranges(siblings(1000, 400), Policy::kQueryCentric).empty());
  const Batch one_holder = make_batch({{-1, 100}, {0, 50}}, {{1, 10}, {0, 20}});
  CHECK((shared_ranges(one_holder, Policy::kPerNode) == Ranges{{0, 100, 2}}));
}

// Algorithm 1 splits off a child if 4 * c.size < root.len. So children of three requests are merged if the root has at
// most 12 tokens.
TEST(packing_of_the_paper_merges_at_four_requests_per_token) {
  CHECK((shared_ranges(siblings(12, 400), Policy::kPaper) == Ranges{{0, 412, 3}, {0, 412, 3}}));
  CHECK((shared_ranges(siblings(13, 400), Policy::kPaper)[0] == std::array{0, 13, 6}));
}

// A child is merged if padding does not grow. The root has 19 requests, and 16 of them hold the child. If the child is
// not merged, the root's 76 rows need two tiles of 64 rows, with 52 rows of padding. If it is merged, the root's pack
// keeps 3 requests, which fit into 16 rows.
TEST(packing_by_compute_merges_where_tiles_are_padded_no_more) {
  const auto tree = [](int of_child, int of_root) {
    std::vector<std::pair<int, int32_t>> requests(of_child, {1, 1000});
    requests.insert(requests.end(), of_root, {0, 1000});
    return make_batch({{-1, 500}, {0, 200}}, requests);
  };
  CHECK((shared_ranges(tree(16, 3), Policy::kCompute) == Ranges{{0, 500, 3}, {0, 700, 16}}));
  CHECK((shared_ranges(tree(16, 3), Policy::kPerNode) == Ranges{{0, 500, 19}, {500, 200, 16}}));
  // The root's 6 other requests and the child's 10 fill one tile, so merging saves nothing.
  CHECK((shared_ranges(tree(10, 6), Policy::kCompute) == Ranges{{0, 500, 16}, {500, 200, 10}}));
}

TEST(packing_by_memory_fills_as_few_tiles_of_equal_size_as_it_can) {
  const Batch one_node =
      make_batch({{-1, 1000}}, std::vector<std::pair<int, int32_t>>(40, {0, 100}));
  CHECK((sizes_of(packs_of(one_node)) == std::vector<size_t>{13, 13, 14}));
  CHECK((sizes_of(packs_of(one_node, 16)) == std::vector<size_t>(10, 4)));
}

// There are 10 requests per child, and 16 fit into a tile. A tile has requests of two children only if the children are
// short.
TEST(packing_by_memory_cuts_where_neighbours_share_least) {
  const auto children = [](int32_t tokens) {
    std::vector<std::pair<int, int32_t>> requests;
    for (int i = 0; i < 30; ++i) requests.push_back({1 + i / 10, 50});
    return make_batch({{-1, 100}, {0, tokens}, {0, tokens}, {0, tokens}}, requests);
  };
  CHECK((sizes_of(packs_of(children(500))) == std::vector<size_t>{10, 10, 10}));
  // With two tiles the root is read once less, which saves more than reading a short child again costs.
  CHECK((sizes_of(packs_of(children(20))) == std::vector<size_t>{14, 16}));
}

TEST(packing_by_memory_reads_the_levels_of_a_tree_together) {
  const Batch batch = make_batch({{-1, 300}, {0, 400}, {0, 280}}, {{1, 9}, {2, 9}, {1, 9}, {0, 9}});
  CHECK((packs_of(batch) == Requests{{0, 2, 1, 3}}));
  // The second child has one holder, so its KV is private.
  CHECK((shared_ranges(batch, Policy::kMemory) == Ranges{{0, 300, 4}, {300, 400, 2}}));
  const auto [forest, packing] = pack(batch, Policy::kMemory);
  CHECK_EQ(std::ranges::count(packing.segments, true, &Segment::is_private), 4);
}

TEST(packing_by_memory_leaves_unshared_requests_alone) {
  Requests packs = packs_of(make_batch({{-1, 30}}, {{-1, 5}, {-1, 5}, {0, 5}, {0, 5}, {-1, 5}}));
  std::ranges::sort(packs);
  CHECK((packs == Requests{{0}, {1}, {2, 3}, {4}}));
  const Batch two_roots = make_batch({{-1, 300}, {-1, 400}}, {{0, 9}, {1, 9}, {0, 9}, {1, 9}});
  CHECK((shared_ranges(two_roots, Policy::kMemory) == Ranges{{0, 300, 2}, {0, 400, 2}}));
}

TEST(packing_of_nodes_with_the_same_holders_is_of_one_range) {
  const Batch chain = make_batch({{-1, 100}, {0, 50}, {1, 25}}, {{2, 10}, {2, 20}});
  for (const Policy policy : {Policy::kMemory, Policy::kPaper, Policy::kPerNode}) {
    CHECK((shared_ranges(chain, policy) == Ranges{{0, 175, 2}}));
  }
}

TEST(packing_keeps_tree_order) {
  Random random(10);
  for (int round = 0; round < 2000; ++round) {
    const Batch batch = random_batch(random, {});
    const auto [forest, packing] =
        pack(batch, random_policy(random), static_cast<int32_t>(draw(random, 1, 16)));
    std::vector<int32_t> rank(batch.seq_lens.size());
    for (size_t i = 0; i < rank.size(); ++i)
      rank[forest.requests_in_tree_order()[i]] = static_cast<int32_t>(i);
    std::vector<int32_t> end(batch.seq_lens.size(), 0);  // end of each request's segments so far
    int32_t next = 0, next_segment = 0;
    for (const Pack& pack : packing.packs) {
      CHECK_EQ(pack.request_begin, next);
      next += pack.num_requests;
      CHECK(pack.num_requests > 0 && pack.num_segments > 0);
      CHECK_EQ(pack.segment_begin, next_segment);
      next_segment += pack.num_segments;
      int32_t last = -1;
      for (const int32_t request : packing.requests_of(pack)) {
        CHECK(rank[request] > last);
        last = rank[request];
      }
      for (const Segment& segment : packing.segments_of(pack)) {
        CHECK(segment.first >= 0 && segment.end <= pack.num_requests);
        CHECK(segment.kv_begin < segment.kv_end);
        CHECK_EQ(segment.is_open, segment.is_private());
        if (segment.is_private()) {
          CHECK_EQ(segment.end, segment.first + 1);
        } else {
          const GatherSpan& span = packing.spans[segment.span];
          CHECK(segment.kv_begin >= span.kv_begin);
          CHECK(segment.kv_end <= span.kv_begin + span.num_tokens);
        }
        for (int32_t i = segment.first; i < segment.end; ++i) {
          const int32_t request = packing.requests_of(pack)[i];
          CHECK_EQ(end[request], segment.kv_begin);
          end[request] = segment.kv_end;
        }
      }
    }
    CHECK_EQ(static_cast<size_t>(next_segment), packing.segments.size());
    CHECK_EQ(static_cast<size_t>(next), packing.requests.size());
    CHECK(end == batch.seq_lens);
  }
}

int64_t tokens_read(const Packing& packing) {
  int64_t tokens = 0;
  for (const Segment& segment : packing.segments) tokens += segment.num_tokens();
  return tokens;
}

TEST(packing_of_deep_trees_stays_within_its_budget) {
  for (const auto& [name, policy] : kPolicies) {
    if (policy == Policy::kQueryCentric) continue;  // shares nothing
    for (const int32_t node_tokens : {1, 40, 300, 100'000}) {
      for (const int num_requests : {2, 25, 64, 256, 1000}) {
        const Batch batch = caterpillar_batch(num_requests, node_tokens, 20);
        const auto [forest, packing] = pack(batch, policy);
        CHECK(packing.requests.size() <= size_t{kMaxPacksPerRequest} * num_requests);
        CHECK(packing.segments.size() <= size_t{kMaxSegmentsPerRequest} * num_requests);
        // Deep packs still share. Without sharing, the requests of a chain of n nodes read n(n + 1) / 2 nodes in total.
        const bool merges_little = policy == Policy::kMemory || policy == Policy::kPerNode;
        if (num_requests < 256 || node_tokens < 300 || !merges_little) continue;
        const int64_t unshared = int64_t{node_tokens} * num_requests * (num_requests + 1) / 2;
        CHECK(tokens_read(packing) < unshared / 5);
      }
    }
  }
}

// All packs have the uppermost segments in common, so the slots of these segments are gathered once.
TEST(packing_of_deep_trees_fuses_levels_from_the_root_on) {
  const Batch batch = caterpillar_batch(1000, 300, 20);
  const auto [forest, packing] = pack(batch, Policy::kMemory);
  for (const Pack& pack : packing.packs) {
    const Segment& top = packing.segments_of(pack).front();
    if (pack.num_requests > 1) CHECK_EQ(top.kv_begin, 0);
    if (packing.segments_of(pack).size() > 32) CHECK_EQ(top.kv_end, 64 * 300);
  }
}

TEST(packing_within_the_budget_is_left_alone) {
  // Each request has up to 11 shared packs and a private pack.
  for (int depth = 1; depth <= 13; ++depth) {
    std::vector<std::pair<int, int32_t>> nodes, requests;
    for (int i = 0; i < depth; ++i) {
      nodes.push_back({i - 1, 300});
      requests.push_back({i, 50});  // one request ends at this node
    }
    // So many requests end at the last node that the mean of the packs per request is nearly the depth.
    for (int i = 0; i < 2000; ++i) requests.push_back({depth - 1, 50});
    const auto [forest, packing] = pack(make_batch(nodes, requests), Policy::kPerNode);
    const int64_t shared = std::ranges::count(packing.segments, false, &Segment::is_private);
    CHECK(depth <= 11 ? shared == depth : shared < depth);
  }
}

}  // namespace
}  // namespace pat::testing
