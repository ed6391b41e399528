// Stage 1: the paths of a batch -> a forest of shared KV ranges, and one private range per request.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace pat {

// Root-to-leaf paths, flattened: path i holds nodes [path_begin[i], path_begin[i + 1]).
struct PathsView {
  std::span<const int32_t> path_begin = {};  // [num_paths + 1]
  std::span<const int64_t> node_id = {};     // [num_path_nodes]
  std::span<const int32_t> kv_begin = {};    // [num_path_nodes], positions
  std::span<const int32_t> kv_end = {};      // [num_path_nodes], exclusive
};

// Paths as read from a tree that grows.
struct TreePaths {
  PathsView paths = {};
  // [num_path_nodes]: whether the node has other children in the tree than the next node on the path.
  std::span<const char> branches = {};
};

// Requests whose kept paths may no longer be those of the tree.
struct Outdated {
  // Their paths are dropped and must be given again.
  std::vector<int32_t> dropped;
  // Each holds a node that the tree may have split. Reading its path again shows whether it has.
  std::vector<int32_t> suspects;
};

// A KV range that at least two requests of the batch share.
struct ForestNode {
  // Index of the enclosing shared node, smaller than this node's own; -1 for a root.
  int32_t parent;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t num_holders;
  int32_t holder_begin;  // into PrefixForest::holders
};

// Keeps the paths of the running requests from batch to batch, and arranges those of the current batch as a forest of
// the nodes that have several holders. A chain of nodes with the same holders becomes one node. Nodes are ordered by
// first appearance in the batch, parents before children, so the same paths in the same order always give the same
// forest. What only one request holds belongs to its private range. Calls reuse the buffers.
class PrefixForest {
 public:
  // Replaces all paths by these. Throws as update() does.
  void build(const PathsView& paths);

  // Replaces all paths by empty ones, of `num_requests` requests.
  void clear(size_t num_requests);
  // Copies the paths of `requests` from `whole`, from position `cut` on. Positions in the copies count from there.
  // `whole` must be arranged, and these requests must have empty paths here. Requests of different calls share nothing.
  // The nodes get ids that update() does not know.
  void add_cut_paths(const PrefixForest& whole, std::span<const int32_t> requests, int32_t cut);

  // Goes to the next batch. Request i of the next batch keeps the path of request kept[i] of the current batch. If
  // kept[i] is negative, request i gets the next path of `read`. Requests of the current batch that are not kept leave.
  //
  // The tree may have split nodes since the kept paths were read. `outdated` gets the requests whose kept paths are
  // affected, as far as the new paths show this. The caller then calls update() again with the paths of these requests.
  // Without kept paths nothing is outdated.
  //
  // Throws std::invalid_argument, naming request and value, if a path does not start at a root, has gaps, overlaps or
  // empty spans, or disagrees with another path of `read` about a node. The forest is then empty. Takes time linear in
  // the requests and the nodes of new paths, or in all nodes and requests if a node of a new path may come from a
  // split.
  void update(std::span<const int32_t> kept, const TreePaths& read, Outdated& outdated);

  // True if the forest has exactly these paths for these requests. Throws std::invalid_argument if there are not as
  // many paths as requests.
  bool agrees(std::span<const int32_t> requests, const PathsView& paths) const;

  // Arranges the batch for the accessors below. Rows after the last request have an empty path. Throws
  // std::invalid_argument if a request is shorter than its path, or if its path was outdated and not given again. Takes
  // time linear in requests and shared nodes; the second time for a batch, in requests.
  void arrange(std::span<const int32_t> seq_lens);

  const std::vector<ForestNode>& nodes() const { return nodes_; }
  // The requests that hold `node`: a contiguous run, because requests are in tree order.
  std::span<const int32_t> holders(const ForestNode& node) const {
    return std::span(holders_).subspan(node.holder_begin, node.num_holders);
  }
  // All requests in tree order, in which the holders of each node are next to one another.
  const std::vector<int32_t>& requests_in_tree_order() const { return holders_; }
  // The node at whose end a request's private range begins; -1 if it shares nothing.
  int32_t anchor(int32_t request) const { return anchor_[request]; }
  // First position of a request's private range.
  int32_t private_begin(int32_t request) const {
    return anchor_[request] < 0 ? 0 : nodes_[anchor_[request]].kv_end;
  }

  static constexpr int32_t kNoNewChild = std::numeric_limits<int32_t>::max();
  struct PathNode {
    int64_t id;
    int32_t parent;  // index of a path node; -1 at the beginning of a path
    int32_t kv_begin;
    int32_t kv_end;
    uint32_t visited;         // number of the last pass that visited it
    int32_t num_holders = 0;  // 0 in a free place
    bool outdated = false;    // this field and the next two are for update() only
    bool suspect = false;
    int32_t new_child_end = kNoNewChild;  // smallest end of a possible split by a new child
    int32_t shared_node = -1;  // its index in nodes() in the last arrangement; -1 at root level
  };

  int32_t num_requests() const { return static_cast<int32_t>(last_node_.size()); }
  // Requests whose path the last update() kept. If some of these paths are outdated, they count too, and another
  // update() follows.
  int32_t num_kept() const { return num_kept_; }
  // The path of a request from its first node on, for checks.
  std::vector<PathNode> path(int32_t request) const;

 private:
  void clear();
  void release(int32_t node);
  void take_kept(std::span<const int32_t> kept);
  void mark_outdated(const TreePaths& read);
  void note_new_child(int32_t parent, const TreePaths& read, int32_t node, int32_t path_end);
  void mark_suspects();
  void drop_outdated(std::vector<int32_t>& dropped);
  void choose_suspects(std::vector<int32_t>& suspects);
  void add_path(const PathsView& paths, size_t path, int32_t request);

  size_t bucket_of(int64_t id) const;  // holds the node with this id, or is free for it
  int32_t find(int64_t id) const { return id_table_[bucket_of(id)]; }
  void reserve(size_t num_more_nodes);
  int32_t add_node(size_t bucket, const PathNode& node);
  void remove_node(int32_t node);
  int32_t arrange_node(int32_t node);
  void order_requests();

  std::vector<PathNode> path_nodes_;
  std::vector<int32_t> free_;       // places in path_nodes_
  std::vector<int32_t> last_node_;  // per request, into path_nodes_; -1: empty path; -2: outdated
  std::vector<int32_t> id_table_;   // open-addressing table of path node indices
  std::vector<int32_t> previous_;   // last_node_ of the batch before
  std::vector<int32_t> split_parents_;  // nodes with a new_child_end, -1 for the level of the roots
  int32_t new_root_end_ = kNoNewChild;  // new_child_end of the level of the roots
  std::vector<int32_t> suspect_nodes_;
  bool any_outdated_ = false;
  uint32_t num_passes_ = 0;  // over path nodes
  int32_t num_kept_ = 0;

  std::vector<ForestNode> nodes_;
  std::vector<int32_t> holders_;
  std::vector<int32_t> anchor_;
  bool is_arranged_ = false;  // the batch, with as many rows as there are anchors
  std::vector<int32_t> cursor_;
  std::vector<int32_t> copies_;  // add_cut_paths(): the copy of each node of the other forest
};

}  // namespace pat
