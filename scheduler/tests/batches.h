// Makes batches for the tests: from given shapes, and at random.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pack_scheduler.h"
#include "prefix_forest.h"

namespace pat::testing {

using Random = std::mt19937_64;
// Returns a random number in [low, high].
int64_t draw(Random& random, int64_t low, int64_t high);
bool one_in(Random& random, int64_t n);

struct Node {
  int64_t id;
  int32_t kv_begin;
  int32_t kv_end;
  bool operator==(const Node&) const = default;
};
using Path = std::vector<Node>;

// Paths in flat arrays, as PathsView refers to them.
struct PathArrays {
  std::vector<int32_t> path_begin = {0};
  std::vector<int64_t> node_id;
  std::vector<int32_t> kv_begin;
  std::vector<int32_t> kv_end;

  void add(const Path& path);
  PathsView view() const;
};

struct Batch {
  std::vector<Path> paths;
  std::vector<int32_t> seq_lens;

  PathArrays arrays() const;
};

// nodes: one pair (index of the parent or -1, number of tokens) per node. requests: one pair (index of the last node or
// -1, number of private tokens) per request.
Batch make_batch(const std::vector<std::pair<int, int32_t>>& nodes,
                 const std::vector<std::pair<int, int32_t>>& requests);

struct BatchShape {
  int64_t max_nodes = 12;
  int64_t max_requests = 40;
  int64_t max_tokens = 2500;
};
// Makes a random batch, whose tree is anything between flat and a chain. Many ranges are about as long as the constants
// at which the scheduler's behaviour changes.
Batch random_batch(Random& random, const BatchShape& shape);

// Makes a balanced tree. levels: number of nodes of each level, for example {1, 4, 8, 256}. Each node has `tokens`
// tokens. The nodes of the last level are the requests' private ranges.
Batch balanced_batch(const std::vector<int>& levels, int32_t tokens);
// Makes a balanced tree from a name such as "1,4,256_32,256,128": the number of nodes of each level, then the number of
// tokens of a node of each level.
Batch tree_batch(const std::string& name);
// Makes a batch of a shape that random_batch() seldom makes: deep chains, wide stars, one long document, requests of
// equal length that share nothing, one-token tails, prefixes of 128k tokens and more.
Batch extreme_batch(Random& random);
// Makes a chain of shared nodes. Each request holds one node more of the chain than the previous request.
Batch caterpillar_batch(int num_requests, int32_t node_tokens, int32_t private_tokens);

SchedulerConfig config(int32_t group_size = 4, int32_t num_workers = 33,
                       Policy policy = Policy::kMemory);
Policy random_policy(Random& random);
SchedulerConfig random_config(Random& random, bool latent = false);

// Returns the last plan, in a buffer of exactly its size.
std::vector<int32_t> plan_bytes(const PackScheduler& scheduler);

}  // namespace pat::testing
