#include "batches.h"

#include <algorithm>
#include <sstream>

namespace pat::testing {

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

bool one_in(Random& random, int64_t n) { return draw(random, 1, n) == 1; }

void PathArrays::add(const Path& path) {
  for (const Node& node : path) {
    node_id.push_back(node.id);
    kv_begin.push_back(node.kv_begin);
    kv_end.push_back(node.kv_end);
  }
  path_begin.push_back(static_cast<int32_t>(node_id.size()));
}

PathsView PathArrays::view() const {
  return {.path_begin = path_begin, .node_id = node_id, .kv_begin = kv_begin, .kv_end = kv_end};
}

PathArrays Batch::arrays() const {
  PathArrays arrays;
  for (const Path& path : paths) arrays.add(path);
  return arrays;
}

Batch make_batch(const std::vector<std::pair<int, int32_t>>& nodes,
                 const std::vector<std::pair<int, int32_t>>& requests) {
  std::vector<Node> spans;
  for (const auto& [parent, tokens] : nodes) {
    const int32_t begin = parent < 0 ? 0 : spans[parent].kv_end;
    spans.push_back({static_cast<int64_t>(spans.size()) * 3 + 1, begin, begin + tokens});
  }
  Batch batch;
  for (auto [node, tokens] : requests) {
    batch.seq_lens.push_back((node < 0 ? 0 : spans[node].kv_end) + tokens);
    Path path;
    for (; node >= 0; node = nodes[node].first) path.push_back(spans[node]);
    std::reverse(path.begin(), path.end());
    batch.paths.push_back(path);
  }
  return batch;
}

Batch random_batch(Random& random, const BatchShape& shape) {
  const auto tokens = [&]() -> int32_t {
    switch (draw(random, 0, 3)) {
      case 0:
        return static_cast<int32_t>(draw(random, 1, 5));
      case 1:
        return static_cast<int32_t>(draw(random, 60, 68));
      case 2:
        return static_cast<int32_t>(draw(random, 120, 140));
      default:
        return static_cast<int32_t>(draw(random, 1, shape.max_tokens));
    }
  };
  const int64_t num_nodes = draw(random, 0, shape.max_nodes);
  const int64_t chained = draw(random, 0, 10);  // this many of 10 nodes continue the last node
  std::vector<std::pair<int, int32_t>> nodes, requests;
  for (int64_t i = 0; i < num_nodes; ++i) {
    const bool chain = draw(random, 1, 10) <= chained;
    nodes.push_back({static_cast<int>(chain ? i - 1 : draw(random, -1, i - 1)), tokens()});
  }
  for (int64_t i = draw(random, 1, shape.max_requests); i > 0; --i) {
    requests.push_back(
        {static_cast<int>(draw(random, -1, num_nodes - 1)), one_in(random, 4) ? 0 : tokens()});
  }
  return make_batch(nodes, requests);
}

namespace {

Batch balanced_batch(const std::vector<int>& levels, const std::vector<int32_t>& tokens) {
  std::vector<std::pair<int, int32_t>> nodes, requests;
  int above = -1;  // first node of the level above
  for (size_t level = 0; level < levels.size(); ++level) {
    const int here = static_cast<int>(nodes.size());
    for (int i = 0; i < levels[level]; ++i) {
      const int parent = level == 0 ? -1 : above + i * levels[level - 1] / levels[level];
      (level + 1 == levels.size() ? requests : nodes).push_back({parent, tokens[level]});
    }
    above = here;
  }
  return make_batch(nodes, requests);
}

}  // namespace

Batch balanced_batch(const std::vector<int>& levels, int32_t tokens) {
  return balanced_batch(levels, std::vector<int32_t>(levels.size(), tokens));
}

Batch tree_batch(const std::string& name) {
  std::vector<int> levels;
  std::vector<int32_t> tokens;
  std::istringstream text(name);
  for (bool are_tokens = false; !text.eof();) {
    int number = 0;
    text >> number;
    (are_tokens ? tokens : levels).push_back(number);
    are_tokens |= text.get() == '_';
  }
  return balanced_batch(levels, tokens);
}

Batch caterpillar_batch(int num_requests, int32_t node_tokens, int32_t private_tokens) {
  std::vector<std::pair<int, int32_t>> nodes, requests;
  for (int i = 0; i < num_requests; ++i) {
    nodes.push_back({i - 1, node_tokens});
    requests.push_back({i, private_tokens});
  }
  return make_batch(nodes, requests);
}

Batch extreme_batch(Random& random) {
  constexpr int32_t kTails[] = {0, 1, 2, 63, 256, 1024};
  constexpr int32_t kPrefixes[] = {1, 64, 512, 6143, 6144, 32'768, 131'072, 1'000'000};
  const int32_t tail = kTails[draw(random, 0, std::size(kTails) - 1)];
  const int32_t prefix = kPrefixes[draw(random, 0, std::size(kPrefixes) - 1)];
  const auto some = [&](int64_t most) { return static_cast<int>(draw(random, 1, most)); };
  std::vector<std::pair<int, int32_t>> nodes, requests;
  switch (draw(random, 0, 4)) {
    case 0:  // a chain of nodes that requests leave one by one
      return caterpillar_batch(some(400), some(300), tail);
    case 1:  // nothing is shared, and all lengths are equal
      requests.assign(some(600), {-1, prefix});
      break;
    case 2:  // one prefix, and some tails as long as the prefix
      nodes = {{-1, prefix}};
      for (int i = some(600); i > 0; --i) {
        requests.push_back({0, one_in(random, 20) ? prefix : tail});
      }
      break;
    case 3: {  // a prefix and a chain of nodes that all requests hold
      nodes = {{-1, prefix}};
      for (int i = some(300); i > 0; --i) nodes.push_back({static_cast<int>(nodes.size()) - 1, 1});
      requests.assign(some(100), {static_cast<int>(nodes.size()) - 1, tail});
      break;
    }
    default: {  // documents below the prefix, each with the same number of requests
      const int documents = some(40), each = some(20);
      nodes = {{-1, prefix}};
      for (int i = 1; i <= documents; ++i) {
        nodes.push_back({0, 1 + tail});
        requests.insert(requests.end(), each, {i, tail});
      }
    }
  }
  return make_batch(nodes, requests);
}

SchedulerConfig config(int32_t group_size, int32_t num_workers, Policy policy) {
  return {.group_size = group_size,
          .num_workers = num_workers,
          .max_block_q = kTileTable.largest_block_q(),
          .policy = policy,
          .min_item_tokens = 128,
          .growth_tokens = 256,
          .cost = {}};
}

Policy random_policy(Random& random) {
  return kPolicies[draw(random, 0, std::size(kPolicies) - 1)].policy;
}

SchedulerConfig random_config(Random& random, bool latent) {
  const TileTable& tiles = tiles_of(latent);
  SchedulerConfig made = config(static_cast<int32_t>(draw(random, 1, tiles.max_group_size)));
  made.latent = latent;
  constexpr int32_t kWorkers[] = {1, 2, 7, 33, 66, 132, 264};
  made.num_workers = kWorkers[draw(random, 0, 6)];
  do {
    made.max_block_q = tiles[static_cast<int32_t>(draw(random, 0, tiles.num_tiles - 1))].block_q;
  } while (made.max_block_q < made.group_size);
  made.policy = random_policy(random);
  made.min_item_tokens = static_cast<int32_t>(kCutGranularity * draw(random, 1, 4));
  return made;
}

std::vector<int32_t> plan_bytes(const PackScheduler& scheduler) {
  const PlanHeader& header = scheduler.last_plan().header();
  const PlanCapacity capacity = PlanCapacity::of(header);
  std::vector<int32_t> buffer(PlanLayout::of(capacity).size, 0);
  scheduler.last_plan().write(capacity, header.num_partials, header.num_shared_slots, buffer);
  return buffer;
}

}  // namespace pat::testing
