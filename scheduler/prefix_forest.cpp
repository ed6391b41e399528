#include "prefix_forest.h"

#include <algorithm>
#include <bit>

#include "check.h"

namespace pat {

namespace {

constexpr int32_t kEmptyPath = -1;
constexpr int32_t kNoPath = -2;  // the path was outdated and dropped
constexpr int32_t kFreeBucket = -1;

uint64_t mix(uint64_t x) {  // splitmix64's finaliser, because node ids are often consecutive
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

void check_shapes(const PathsView& paths, size_t num_paths) {
  PAT_CHECK(paths.path_begin.size() == num_paths + 1,
            "path_begin must have num_requests + 1 = ", num_paths + 1, " entries, got ",
            paths.path_begin.size());
  const size_t num_path_nodes = paths.node_id.size();
  PAT_CHECK(paths.kv_begin.size() == num_path_nodes && paths.kv_end.size() == num_path_nodes,
            "node_id, kv_begin and kv_end must have the same length, got ", num_path_nodes, ", ",
            paths.kv_begin.size(), " and ", paths.kv_end.size());
  PAT_CHECK(paths.path_begin.front() == 0, "path_begin must start at 0, got ",
            paths.path_begin.front());
  for (size_t i = 0; i < num_paths; ++i) {
    PAT_CHECK(paths.path_begin[i] <= paths.path_begin[i + 1], "path_begin must not decrease, got ",
              paths.path_begin[i + 1], " after ", paths.path_begin[i], " at request ", i);
  }
  PAT_CHECK(static_cast<size_t>(paths.path_begin.back()) == num_path_nodes,
            "path_begin must end at ", num_path_nodes, ", the number of path nodes, got ",
            paths.path_begin.back());
}

}  // namespace

void PrefixForest::build(const PathsView& paths) {
  PAT_CHECK(!paths.path_begin.empty(), "path_begin must have at least 1 entry, got 0");
  check_shapes(paths, paths.path_begin.size() - 1);
  clear();
  reserve(paths.node_id.size());
  last_node_.assign(paths.path_begin.size() - 1, kEmptyPath);
  try {
    for (size_t path = 0; path < last_node_.size(); ++path) {
      add_path(paths, path, static_cast<int32_t>(path));
    }
  } catch (...) {
    clear();
    throw;
  }
}

void PrefixForest::update(std::span<const int32_t> kept, const TreePaths& read,
                          Outdated& outdated) {
  const auto is_new = [](int32_t from) { return from < 0; };
  const PathsView& paths = read.paths;
  check_shapes(paths, static_cast<size_t>(std::count_if(kept.begin(), kept.end(), is_new)));
  PAT_CHECK(read.branches.size() == paths.node_id.size(),
            "branches must have one entry per path node, ", paths.node_id.size(), ", got ",
            read.branches.size());
  outdated.dropped.clear();
  outdated.suspects.clear();
  try {
    take_kept(kept);
    if (path_nodes_.size() > free_.size()) {
      mark_outdated(read);
      if (!split_parents_.empty()) mark_suspects();
      if (any_outdated_) drop_outdated(outdated.dropped);
      if (!suspect_nodes_.empty()) choose_suspects(outdated.suspects);
    }
    num_kept_ = static_cast<int32_t>(kept.size() + 1 - paths.path_begin.size());
    reserve(paths.node_id.size());
    size_t path = 0;
    for (size_t request = 0; request < kept.size(); ++request) {
      if (is_new(kept[request])) add_path(paths, path++, static_cast<int32_t>(request));
    }
  } catch (...) {
    clear();
    throw;
  }
}

bool PrefixForest::agrees(std::span<const int32_t> requests, const PathsView& paths) const {
  check_shapes(paths, requests.size());
  for (size_t path = 0; path < requests.size(); ++path) {
    int32_t node = last_node_[requests[path]];
    for (int32_t i = paths.path_begin[path + 1]; i-- > paths.path_begin[path];) {
      if (node < 0 || path_nodes_[node].id != paths.node_id[i] ||
          path_nodes_[node].kv_begin != paths.kv_begin[i] ||
          path_nodes_[node].kv_end != paths.kv_end[i]) {
        return false;
      }
      node = path_nodes_[node].parent;
    }
    if (node != kEmptyPath) return false;
  }
  return true;
}

void PrefixForest::clear(size_t num_requests) {
  clear();
  copies_.clear();
  last_node_.assign(num_requests, kEmptyPath);
}

void PrefixForest::add_cut_paths(const PrefixForest& whole, std::span<const int32_t> requests,
                                 int32_t cut) {
  is_arranged_ = false;
  const auto first = static_cast<int32_t>(path_nodes_.size());
  copies_.resize(whole.nodes_.size(), -1);
  for (const int32_t request : requests) {
    int32_t child = -1;  // copy of the node below n
    for (int32_t n = whole.anchor_[request]; n >= 0 && whole.nodes_[n].kv_end > cut;
         n = whole.nodes_[n].parent) {
      if (copies_[n] < first) {  // this call has not copied it yet
        copies_[n] = static_cast<int32_t>(path_nodes_.size());
        path_nodes_.push_back({.id = copies_[n],
                               .parent = -1,
                               .kv_begin = std::max(whole.nodes_[n].kv_begin, cut) - cut,
                               .kv_end = whole.nodes_[n].kv_end - cut,
                               .visited = num_passes_});
      }
      (child < 0 ? last_node_[request] : path_nodes_[child].parent) = copies_[n];
      child = copies_[n];
      ++path_nodes_[child].num_holders;
    }
  }
}

void PrefixForest::clear() {
  is_arranged_ = false;
  path_nodes_.clear();
  free_.clear();
  id_table_.clear();
  last_node_.clear();
  new_root_end_ = kNoNewChild;
  num_kept_ = 0;
}

void PrefixForest::take_kept(std::span<const int32_t> kept) {
  is_arranged_ = false;
  previous_.swap(last_node_);
  last_node_.assign(kept.size(), kEmptyPath);
  constexpr int32_t kTaken = -3;
  for (size_t request = 0; request < kept.size(); ++request) {
    if (kept[request] < 0) continue;
    PAT_CHECK(static_cast<size_t>(kept[request]) < previous_.size(), "kept must be below ",
              previous_.size(), ", the number of requests so far, got ", kept[request],
              " for request ", request);
    int32_t& from = previous_[kept[request]];
    PAT_CHECK(from != kTaken, "kept must not repeat a request, got ", kept[request],
              " again for request ", request);
    last_node_[request] = from;
    from = kTaken;
  }
  for (const int32_t node : previous_) release(node);
}

void PrefixForest::release(int32_t node) {
  while (node >= 0) {
    const int32_t parent = path_nodes_[node].parent;
    if (--path_nodes_[node].num_holders == 0) remove_node(node);
    node = parent;
  }
}

// Looks for nodes of kept paths that the tree has split since those paths were read. The lower part of a split node
// keeps the node's id, so a new path with this id shows another span or another parent. A new path that ends in the
// upper part, or branches off there, does not show the id. It shows an unknown node instead, which begins where the
// split node began. That node, or a later node of the path, has children that are not on the path.
void PrefixForest::mark_outdated(const TreePaths& read) {
  any_outdated_ = false;
  split_parents_.clear();
  suspect_nodes_.clear();
  const PathsView& paths = read.paths;
  for (size_t path = 0; path + 1 < paths.path_begin.size(); ++path) {
    const int32_t end = paths.path_begin[path + 1];
    int32_t parent = -1;
    bool parent_is_known = true;
    for (int32_t i = paths.path_begin[path]; i < end; ++i) {
      const int32_t known = find(paths.node_id[i]);
      if (known >= 0) {
        PathNode& node = path_nodes_[known];
        const bool same = node.kv_begin == paths.kv_begin[i] && node.kv_end == paths.kv_end[i] &&
                          parent_is_known && node.parent == parent;
        if (!same) node.outdated = any_outdated_ = true;
        parent_is_known = same;
        parent = known;
      } else {
        if (parent_is_known) note_new_child(parent, read, i, end);
        parent_is_known = false;
      }
    }
  }
}

// Handles `node`, an unknown child of the known node `parent`, on a path of `read` whose nodes end before `path_end`.
// The tree may have split a known child of `parent` and made `node` its upper part. That child then ends after the
// path's first node, from `node` on, that has children off the path. new_child_end of `parent` becomes the least end of
// such nodes: mark_suspects() suspects the known children that end after it.
void PrefixForest::note_new_child(int32_t parent, const TreePaths& read, int32_t node,
                                  int32_t path_end) {
  while (node < path_end && !read.branches[node]) ++node;
  if (node == path_end) return;
  int32_t& end = parent < 0 ? new_root_end_ : path_nodes_[parent].new_child_end;
  if (end == kNoNewChild) split_parents_.push_back(parent);
  end = std::min(end, read.paths.kv_end[node]);
}

void PrefixForest::mark_suspects() {
  for (size_t i = 0; i < path_nodes_.size(); ++i) {
    PathNode& node = path_nodes_[i];
    if (node.num_holders == 0 || node.outdated) continue;
    const int32_t end = node.parent < 0 ? new_root_end_ : path_nodes_[node.parent].new_child_end;
    if (node.kv_end <= end) continue;
    node.suspect = true;
    suspect_nodes_.push_back(static_cast<int32_t>(i));
  }
  for (const int32_t parent : split_parents_) {
    (parent < 0 ? new_root_end_ : path_nodes_[parent].new_child_end) = kNoNewChild;
  }
}

void PrefixForest::drop_outdated(std::vector<int32_t>& dropped) {
  for (size_t request = 0; request < last_node_.size(); ++request) {
    int32_t node = last_node_[request];
    while (node >= 0 && !path_nodes_[node].outdated) node = path_nodes_[node].parent;
    if (node < 0) continue;
    dropped.push_back(static_cast<int32_t>(request));
  }
  for (const int32_t request : dropped) {  // a second loop, because release() clears the marks
    release(last_node_[request]);
    last_node_[request] = kNoPath;
  }
}

// Chooses one request for each suspect node that requests still hold.
void PrefixForest::choose_suspects(std::vector<int32_t>& suspects) {
  ++num_passes_;
  for (size_t request = 0; request < last_node_.size(); ++request) {
    bool holds_suspect = false;
    for (int32_t n = last_node_[request]; n >= 0 && path_nodes_[n].visited != num_passes_;) {
      PathNode& node = path_nodes_[n];
      holds_suspect |= node.suspect;
      node.visited = num_passes_;
      n = node.parent;
    }
    if (holds_suspect) suspects.push_back(static_cast<int32_t>(request));
  }
  for (const int32_t node : suspect_nodes_) path_nodes_[node].suspect = false;
}

void PrefixForest::add_path(const PathsView& paths, size_t path, int32_t request) {
  int32_t parent = -1;
  int32_t path_end = 0;
  for (int32_t i = paths.path_begin[path]; i < paths.path_begin[path + 1]; ++i) {
    const int64_t id = paths.node_id[i];
    const int32_t kv_begin = paths.kv_begin[i];
    const int32_t kv_end = paths.kv_end[i];
    PAT_CHECK(id >= 0, "node ids must not be negative, got ", id, " on the path of request ",
              request);
    PAT_CHECK(parent >= 0 || kv_begin == 0, "the path of request ", request,
              " does not start at a root: its first node, ", id, ", begins at position ", kv_begin,
              " instead of 0");
    PAT_CHECK(kv_begin >= path_end, "overlapping spans on the path of request ", request, ": node ",
              id, " begins at position ", kv_begin, ", the node before it ends at ", path_end);
    PAT_CHECK(kv_begin <= path_end, "gap on the path of request ", request, ": node ", id,
              " begins at position ", kv_begin, ", the node before it ends at ", path_end);
    PAT_CHECK(kv_end > kv_begin, "empty span on the path of request ", request, ": node ", id,
              " is [", kv_begin, ", ", kv_end, ")");
    const size_t bucket = bucket_of(id);
    int32_t node = id_table_[bucket];
    if (node == kFreeBucket) {
      node = add_node(bucket, {.id = id,
                               .parent = parent,
                               .kv_begin = kv_begin,
                               .kv_end = kv_end,
                               .visited = num_passes_});
    }
    PathNode& found = path_nodes_[node];
    PAT_CHECK(found.kv_begin == kv_begin && found.kv_end == kv_end, "paths disagree about node ",
              id, ": [", kv_begin, ", ", kv_end, ") for request ", request, ", [", found.kv_begin,
              ", ", found.kv_end, ") for an earlier one");
    PAT_CHECK(found.parent == parent, "node ", id, " has different parents: node ",
              parent < 0 ? -1 : path_nodes_[parent].id, " for request ", request, ", node ",
              found.parent < 0 ? -1 : path_nodes_[found.parent].id,
              " for an earlier one (-1: none)");
    ++found.num_holders;
    last_node_[request] = node;
    parent = node;
    path_end = kv_end;
  }
}

// --- path nodes, and the table of their ids ---

size_t PrefixForest::bucket_of(int64_t id) const {
  const size_t mask = id_table_.size() - 1;
  size_t bucket = mix(static_cast<uint64_t>(id)) & mask;
  while (id_table_[bucket] != kFreeBucket && path_nodes_[id_table_[bucket]].id != id) {
    bucket = (bucket + 1) & mask;
  }
  return bucket;
}

void PrefixForest::reserve(size_t num_more_nodes) {
  const size_t num_buckets =
      std::bit_ceil(2 * (path_nodes_.size() - free_.size() + num_more_nodes) + 1);
  if (num_buckets <= id_table_.size()) return;
  id_table_.assign(num_buckets, kFreeBucket);
  for (size_t node = 0; node < path_nodes_.size(); ++node) {
    if (path_nodes_[node].num_holders > 0) {
      id_table_[bucket_of(path_nodes_[node].id)] = static_cast<int32_t>(node);
    }
  }
}

int32_t PrefixForest::add_node(size_t bucket, const PathNode& node) {
  if (free_.empty()) {
    id_table_[bucket] = static_cast<int32_t>(path_nodes_.size());
    path_nodes_.push_back(node);
  } else {
    id_table_[bucket] = free_.back();
    path_nodes_[free_.back()] = node;
    free_.pop_back();
  }
  return id_table_[bucket];
}

void PrefixForest::remove_node(int32_t node) {
  const size_t mask = id_table_.size() - 1;
  size_t hole = bucket_of(path_nodes_[node].id);
  // Moves an entry into the hole if a search for the entry would otherwise stop at the hole.
  for (size_t next = (hole + 1) & mask; id_table_[next] != kFreeBucket; next = (next + 1) & mask) {
    const size_t home = mix(static_cast<uint64_t>(path_nodes_[id_table_[next]].id)) & mask;
    if (((next - home) & mask) < ((next - hole) & mask)) continue;
    id_table_[hole] = id_table_[next];
    hole = next;
  }
  id_table_[hole] = kFreeBucket;
  free_.push_back(node);
}

// --- the arrangement of one batch ---

void PrefixForest::arrange(std::span<const int32_t> seq_lens) {
  PAT_CHECK(seq_lens.size() >= last_node_.size(), "seq_lens must have an entry for each of ",
            last_node_.size(), " requests, got ", seq_lens.size());
  for (size_t request = 0; request < last_node_.size(); ++request) {
    const int32_t node = last_node_[request];
    PAT_CHECK(node != kNoPath, "the path of request ", request,
              " is outdated and was not given again");
    const int32_t path_end = node < 0 ? 0 : path_nodes_[node].kv_end;
    PAT_CHECK(seq_lens[request] >= path_end, "seq_len ", seq_lens[request], " of request ", request,
              " is below its path's length ", path_end);
  }
  if (is_arranged_ && anchor_.size() == seq_lens.size()) return;
  ++num_passes_;
  nodes_.clear();
  anchor_.assign(seq_lens.size(), -1);
  for (size_t request = 0; request < last_node_.size(); ++request) {
    int32_t node = last_node_[request];
    while (node >= 0 && path_nodes_[node].num_holders < 2) node = path_nodes_[node].parent;
    anchor_[request] = node < 0 ? -1 : arrange_node(node);
  }
  order_requests();
  is_arranged_ = true;
}

int32_t PrefixForest::arrange_node(int32_t node) {
  cursor_.clear();  // a stack of unvisited nodes, instead of recursion, because paths may be long
  for (int32_t n = node; n >= 0 && path_nodes_[n].visited != num_passes_;) {
    cursor_.push_back(n);
    n = path_nodes_[n].parent;
  }
  for (; !cursor_.empty(); cursor_.pop_back()) {
    PathNode& source = path_nodes_[cursor_.back()];
    const int32_t parent = source.parent < 0 ? -1 : path_nodes_[source.parent].shared_node;
    if (parent >= 0 && nodes_[parent].num_holders == source.num_holders) {
      source.shared_node = parent;  // `parent` has the same holders: one chain
      nodes_[parent].kv_end = source.kv_end;
    } else {
      source.shared_node = static_cast<int32_t>(nodes_.size());
      nodes_.push_back({.parent = parent,
                        .kv_begin = source.kv_begin,
                        .kv_end = source.kv_end,
                        .num_holders = source.num_holders,
                        .holder_begin = 0});
    }
    source.visited = num_passes_;
  }
  return path_nodes_[node].shared_node;
}

void PrefixForest::order_requests() {
  // cursor_[n] is the next free place among the places of node n's holders. The children's holders come first, in
  // order, and then the requests that end at the node. The last entry of cursor_ stands for the parent of all roots.
  cursor_.assign(nodes_.size() + 1, 0);
  int32_t& top = cursor_.back();
  for (size_t n = 0; n < nodes_.size(); ++n) {
    int32_t& parent_cursor = nodes_[n].parent < 0 ? top : cursor_[nodes_[n].parent];
    nodes_[n].holder_begin = parent_cursor;
    cursor_[n] = parent_cursor;
    parent_cursor += nodes_[n].num_holders;
  }
  holders_.resize(anchor_.size());
  for (size_t request = 0; request < anchor_.size(); ++request) {
    const int32_t anchor = anchor_[request];
    holders_[anchor < 0 ? top++ : cursor_[anchor]++] = static_cast<int32_t>(request);
  }
}

std::vector<PrefixForest::PathNode> PrefixForest::path(int32_t request) const {
  std::vector<PathNode> path;
  for (int32_t node = last_node_[request]; node >= 0; node = path_nodes_[node].parent) {
    path.push_back(path_nodes_[node]);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace pat
