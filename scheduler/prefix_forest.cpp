#include "prefix_forest.h"

#include <algorithm>
#include <bit>

#include "check.h"

namespace pat {

namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser: node ids are often consecutive
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

void check_shapes(const PathsView& paths, size_t num_requests) {
  PAT_CHECK(paths.path_begin.size() == num_requests + 1,
            "path_begin must have num_requests + 1 = ", num_requests + 1, " entries, got ",
            paths.path_begin.size());
  const size_t num_path_nodes = paths.node_id.size();
  PAT_CHECK(paths.kv_begin.size() == num_path_nodes && paths.kv_end.size() == num_path_nodes,
            "node_id, kv_begin and kv_end must have the same length, got ", num_path_nodes, ", ",
            paths.kv_begin.size(), " and ", paths.kv_end.size());
  PAT_CHECK(paths.path_begin.front() == 0, "path_begin must start at 0, got ",
            paths.path_begin.front());
  for (size_t i = 0; i < num_requests; ++i) {
    PAT_CHECK(paths.path_begin[i] <= paths.path_begin[i + 1], "path_begin must not decrease, got ",
              paths.path_begin[i + 1], " after ", paths.path_begin[i], " at request ", i);
  }
  PAT_CHECK(static_cast<size_t>(paths.path_begin.back()) == num_path_nodes,
            "path_begin must end at ", num_path_nodes, ", the number of path nodes, got ",
            paths.path_begin.back());
}

}  // namespace

void PrefixForest::build(const PathsView& paths, std::span<const int32_t> seq_lens) {
  check_shapes(paths, seq_lens.size());
  read_paths(paths, seq_lens);
  keep_shared_nodes();
  order_requests();
}

int32_t PrefixForest::find_or_add(int64_t id, int32_t parent, int32_t kv_begin, int32_t kv_end,
                                  int32_t request) {
  PAT_CHECK(id >= 0, "node ids must not be negative, got ", id, " on the path of request ",
            request);
  const size_t mask = id_table_.size() - 1;
  size_t bucket = mix(static_cast<uint64_t>(id)) & mask;
  while (id_table_[bucket] >= 0) {
    const PathNode& node = path_nodes_[id_table_[bucket]];
    if (node.id == id) {
      PAT_CHECK(node.kv_begin == kv_begin && node.kv_end == kv_end, "paths disagree about node ",
                id, ": [", kv_begin, ", ", kv_end, ") for request ", request, ", [", node.kv_begin,
                ", ", node.kv_end, ") for an earlier one");
      PAT_CHECK(node.parent == parent, "node ", id, " has different parents: node ",
                parent < 0 ? -1 : path_nodes_[parent].id, " for request ", request, ", node ",
                node.parent < 0 ? -1 : path_nodes_[node.parent].id,
                " for an earlier one (-1: none)");
      return id_table_[bucket];
    }
    bucket = (bucket + 1) & mask;
  }
  id_table_[bucket] = static_cast<int32_t>(path_nodes_.size());
  path_nodes_.push_back(
      {.id = id, .parent = parent, .kv_begin = kv_begin, .kv_end = kv_end, .num_holders = 0});
  return id_table_[bucket];
}

void PrefixForest::read_paths(const PathsView& paths, std::span<const int32_t> seq_lens) {
  const int32_t num_requests = static_cast<int32_t>(seq_lens.size());
  path_nodes_.clear();
  last_node_.assign(num_requests, -1);
  id_table_.assign(std::bit_ceil(2 * paths.node_id.size() + 1), -1);
  for (int32_t request = 0; request < num_requests; ++request) {
    int32_t parent = -1;
    int32_t path_end = 0;
    for (int32_t i = paths.path_begin[request]; i < paths.path_begin[request + 1]; ++i) {
      const int32_t kv_begin = paths.kv_begin[i];
      const int32_t kv_end = paths.kv_end[i];
      PAT_CHECK(parent >= 0 || kv_begin == 0, "the path of request ", request,
                " does not start at a root: its first node, ", paths.node_id[i],
                ", begins at position ", kv_begin, " instead of 0");
      PAT_CHECK(kv_begin >= path_end, "overlapping spans on the path of request ", request,
                ": node ", paths.node_id[i], " begins at position ", kv_begin,
                ", the node before it ends at ", path_end);
      PAT_CHECK(kv_begin <= path_end, "gap on the path of request ", request, ": node ",
                paths.node_id[i], " begins at position ", kv_begin, ", the node before it ends at ",
                path_end);
      PAT_CHECK(kv_end > kv_begin, "empty span on the path of request ", request, ": node ",
                paths.node_id[i], " is [", kv_begin, ", ", kv_end, ")");
      parent = find_or_add(paths.node_id[i], parent, kv_begin, kv_end, request);
      ++path_nodes_[parent].num_holders;
      path_end = kv_end;
    }
    last_node_[request] = parent;
    PAT_CHECK(seq_lens[request] >= path_end, "seq_len ", seq_lens[request], " of request ", request,
              " is below its path's length ", path_end);
  }
}

void PrefixForest::keep_shared_nodes() {
  nodes_.clear();
  shared_node_.resize(path_nodes_.size());
  for (size_t i = 0; i < path_nodes_.size(); ++i) {  // parents come before children
    const PathNode& node = path_nodes_[i];
    const int32_t parent = node.parent < 0 ? -1 : shared_node_[node.parent];
    if (node.num_holders < 2) {
      shared_node_[i] = parent;  // private; what hangs below it is private to the same request
    } else if (parent >= 0 && nodes_[parent].num_holders == node.num_holders) {
      shared_node_[i] = parent;  // chain: same holders
      nodes_[parent].kv_end = node.kv_end;
    } else {
      shared_node_[i] = static_cast<int32_t>(nodes_.size());
      nodes_.push_back({.parent = parent,
                        .kv_begin = node.kv_begin,
                        .kv_end = node.kv_end,
                        .num_holders = node.num_holders,
                        .holder_begin = 0});
    }
  }
}

void PrefixForest::order_requests() {
  const int32_t num_requests = static_cast<int32_t>(last_node_.size());
  anchor_.resize(num_requests);
  // cursor_[n]: next free place in the run of node n's holders. Children take theirs first, in order; the
  // requests that end at the node fill what is left. The last entry is the level above the roots.
  cursor_.assign(nodes_.size() + 1, 0);
  int32_t& top = cursor_.back();
  for (size_t n = 0; n < nodes_.size(); ++n) {
    int32_t& parent_cursor = nodes_[n].parent < 0 ? top : cursor_[nodes_[n].parent];
    nodes_[n].holder_begin = parent_cursor;
    cursor_[n] = parent_cursor;
    parent_cursor += nodes_[n].num_holders;
  }
  holders_.resize(num_requests);
  for (int32_t request = 0; request < num_requests; ++request) {
    anchor_[request] = last_node_[request] < 0 ? -1 : shared_node_[last_node_[request]];
    holders_[anchor_[request] < 0 ? top++ : cursor_[anchor_[request]]++] = request;
  }
}

}  // namespace pat
