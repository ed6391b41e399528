// Stage 1 of the scheduler turns the paths of a batch into a forest, whose nodes are shared KV ranges, and one private
// range per request.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace pat {

// Root-to-leaf paths in flat arrays. Path i has the nodes [path_begin[i], path_begin[i + 1]).
struct PathsView {
  std::span<const int32_t> path_begin = {};  // [num_paths + 1]
  std::span<const int64_t> node_id = {};     // [num_path_nodes]
  std::span<const int32_t> kv_begin = {};    // [num_path_nodes], positions
  std::span<const int32_t> kv_end = {};      // [num_path_nodes], exclusive
};

// Paths that were read from SGLang's tree, which changes while requests run.
struct TreePaths {
  PathsView paths = {};
  // [num_path_nodes]: whether the node has children in the tree other than the path's next node.
  std::span<const char> branches = {};
};

// Requests whose kept paths may differ from their paths in the tree.
struct Outdated {
  // Requests whose paths were dropped. The caller must read and pass these paths again.
  std::vector<int32_t> dropped;
  // For each node that the tree may have split, one request that holds the node. Reading the request's path again shows
  // whether the tree has split the node.
  std::vector<int32_t> suspects;
};

// A KV range that at least two requests of the batch share.
struct ForestNode {
  // Index of the parent node, which is smaller than this node's index; -1 for a root.
  int32_t parent;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t num_holders;
  int32_t holder_begin;  // index of its first holder in requests_in_tree_order()
};

// Keeps the paths of the running requests from batch to batch. arrange() makes a forest of the nodes that several
// requests of the current batch hold. A chain of nodes with the same holders becomes one node. Nodes are in the order
// of their first appearance in the batch, parents before children, so the same paths in the same order always give the
// same forest. KV that only one request holds belongs to that request's private range. All functions reuse the buffers.
class PrefixForest {
 public:
  // Replaces all paths by `paths`. Throws like update().
  void build(const PathsView& paths);

  // Replaces all paths by empty paths for `num_requests` requests.
  void clear(size_t num_requests);
  // For each of `requests`, copies the part of its path in `whole` that lies after position `cut`. Positions in the
  // copies count from `cut`. `whole` must be arranged, and `requests` must have empty paths in this forest. Paths that
  // different calls copy share nothing. The copied nodes get new ids, which update() cannot find.
  void add_cut_paths(const PrefixForest& whole, std::span<const int32_t> requests, int32_t cut);

  // Replaces the current batch by the next one. Request i of the next batch keeps the path of request kept[i] of the
  // current batch or, if kept[i] is negative, gets the next path of `read`. All other requests of the current batch
  // leave.
  //
  // The tree may have split nodes since the kept paths were read. If the new paths show or suggest a split, `outdated`
  // gets the requests with these nodes. The caller then reads the paths of these requests and calls update() again. If
  // no path is kept, nothing is outdated.
  //
  // Throws std::invalid_argument, which names the request and the value, if a path does not start at a root, has gaps,
  // overlaps or empty spans, or disagrees with another path of `read` about a node. The forest is then empty. Takes
  // time linear in the requests and the nodes of new paths, or in all requests and nodes if the new paths show or
  // suggest a split.
  void update(std::span<const int32_t> kept, const TreePaths& read, Outdated& outdated);

  // True if the forest has exactly these paths for `requests`. Throws std::invalid_argument if there are more or fewer
  // paths than requests.
  bool agrees(std::span<const int32_t> requests, const PathsView& paths) const;

  // Makes the forest of the current batch, which the accessors below return. seq_lens may have more entries than there
  // are requests; each further entry is a padding row with an empty path. Throws std::invalid_argument if a request is
  // shorter than its path, or if a dropped path was not passed again. Takes time linear in requests and shared nodes,
  // or only in requests if the batch is already arranged.
  void arrange(std::span<const int32_t> seq_lens);

  const std::vector<ForestNode>& nodes() const { return nodes_; }
  // The requests that hold `node`. They are contiguous in tree order.
  std::span<const int32_t> holders(const ForestNode& node) const {
    return std::span(holders_).subspan(node.holder_begin, node.num_holders);
  }
  // All requests in tree order, in which the holders of each node are contiguous.
  const std::vector<int32_t>& requests_in_tree_order() const { return holders_; }
  // The last shared node of a request, after which its private range begins; -1 if the request shares nothing.
  int32_t anchor(int32_t request) const { return anchor_[request]; }
  // First position of a request's private range.
  int32_t private_begin(int32_t request) const {
    return anchor_[request] < 0 ? 0 : nodes_[anchor_[request]].kv_end;
  }

  static constexpr int32_t kNoNewChild = std::numeric_limits<int32_t>::max();
  struct PathNode {
    int64_t id;
    int32_t parent;  // index of the parent path node; -1 for a root
    int32_t kv_begin;
    int32_t kv_end;
    uint32_t visited;         // number of the last pass that visited the node
    int32_t num_holders = 0;  // 0 if this place is free
    bool outdated = false;    // only update() uses this and the next two fields
    bool suspect = false;
    int32_t new_child_end = kNoNewChild;  // see note_new_child()
    int32_t shared_node = -1;             // index of its forest node, if it has several holders
  };

  int32_t num_requests() const { return static_cast<int32_t>(last_node_.size()); }
  // Number of requests whose path the last update() kept, including those whose path it found to be outdated.
  int32_t num_kept() const { return num_kept_; }
  // The nodes of a request's path, from the root on. For checks.
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

  size_t bucket_of(int64_t id) const;  // bucket of the node with this id, or a free bucket
  int32_t find(int64_t id) const { return id_table_[bucket_of(id)]; }
  void reserve(size_t num_more_nodes);
  int32_t add_node(size_t bucket, const PathNode& node);
  void remove_node(int32_t node);
  int32_t arrange_node(int32_t node);
  void order_requests();

  std::vector<PathNode> path_nodes_;
  std::vector<int32_t> free_;           // free places in path_nodes_
  std::vector<int32_t> last_node_;      // per request: its path's last node; -1: empty, -2: dropped
  std::vector<int32_t> id_table_;       // open-addressing hash table of indices in path_nodes_
  std::vector<int32_t> previous_;       // last_node_ of the previous batch
  std::vector<int32_t> split_parents_;  // nodes with a new_child_end; -1: the parent of all roots
  int32_t new_root_end_ = kNoNewChild;  // new_child_end of the parent of all roots
  std::vector<int32_t> suspect_nodes_;
  bool any_outdated_ = false;
  uint32_t num_passes_ = 0;  // number of passes over path_nodes_ so far
  int32_t num_kept_ = 0;

  std::vector<ForestNode> nodes_;
  std::vector<int32_t> holders_;
  std::vector<int32_t> anchor_;
  bool is_arranged_ = false;  // the current batch has been arranged
  std::vector<int32_t> cursor_;
  std::vector<int32_t> copies_;  // for add_cut_paths(): copy of each node of `whole`
};

}  // namespace pat
