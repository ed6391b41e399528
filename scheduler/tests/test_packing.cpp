#include <algorithm>
#include <array>

#include "batches.h"
#include "packing.h"
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
  Packer packer(policy, {}, {kTiles, group_size, max_block_q});
  packer.pack(result.forest, batch.seq_lens, result.packing);
  return result;
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
    std::vector<int32_t> end(batch.seq_lens.size(), 0);  // of the segments of each request so far
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
        // And sharing goes on: unshared, a chain of n nodes is read n(n + 1) / 2 times in all.
        const bool merges_little = policy == Policy::kMemory || policy == Policy::kPerNode;
        if (num_requests < 256 || node_tokens < 300 || !merges_little) continue;
        const int64_t unshared = int64_t{node_tokens} * num_requests * (num_requests + 1) / 2;
        CHECK(tokens_read(packing) < unshared / 5);
      }
    }
  }
}

// All packs have the segments at the top in common, whose slots are gathered once.
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
  // Up to 11 shared packs and a private one for each request.
  for (int depth = 1; depth <= 13; ++depth) {
    std::vector<std::pair<int, int32_t>> nodes, requests;
    for (int i = 0; i < depth; ++i) {
      nodes.push_back({i - 1, 300});
      requests.push_back({i, 50});  // one ends here
    }
    // So many more at the end that the mean is nearly the depth.
    for (int i = 0; i < 2000; ++i) requests.push_back({depth - 1, 50});
    const auto [forest, packing] = pack(make_batch(nodes, requests), Policy::kPerNode);
    const int64_t shared = std::ranges::count(packing.segments, false, &Segment::is_private);
    CHECK(depth <= 11 ? shared == depth : shared < depth);
  }
}

}  // namespace
}  // namespace pat::testing
