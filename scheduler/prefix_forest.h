// Stage 1: the paths of a batch -> a forest of shared KV ranges and one private range per request.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pat {

// Root-to-leaf paths of a batch, flattened: request i holds nodes [path_begin[i], path_begin[i + 1]).
struct PathsView {
  std::span<const int32_t> path_begin;  // [num_requests + 1]
  std::span<const int64_t> node_id;     // [num_path_nodes]
  std::span<const int32_t> kv_begin;    // [num_path_nodes], positions
  std::span<const int32_t> kv_end;      // [num_path_nodes], exclusive
};

// A KV range that at least two requests of the batch share.
struct ForestNode {
  int32_t
      parent;  // index of the enclosing shared node, smaller than this node's own; -1 for a root
  int32_t kv_begin;
  int32_t kv_end;
  int32_t num_holders;
  int32_t holder_begin;  // into PrefixForest::holders
};

// Nodes on the paths of the batch that have several holders; a chain of nodes with the same holders is one
// node. Ordered by first appearance in the batch, parents before children, so that the same batch always
// gives the same forest. What only one request holds belongs to its private range.
class PrefixForest {
 public:
  // Throws std::invalid_argument, naming request and value, if a path does not start at a root, has gaps,
  // overlaps or empty spans, disagrees with another path about a node, or is longer than its request.
  // Linear in requests + path nodes. Buffers are reused from call to call.
  void build(const PathsView& paths, std::span<const int32_t> seq_lens);

  const std::vector<ForestNode>& nodes() const { return nodes_; }
  // Requests of `node`: a contiguous run, because requests are kept in tree order.
  std::span<const int32_t> holders(const ForestNode& node) const {
    return std::span(holders_).subspan(node.holder_begin, node.num_holders);
  }
  // All requests in tree order: requests that share more lie closer together.
  const std::vector<int32_t>& requests_in_tree_order() const { return holders_; }
  // Node under which a request's private range begins; -1 if it shares nothing.
  int32_t anchor(int32_t request) const { return anchor_[request]; }
  // First position of a request's private range.
  int32_t private_begin(int32_t request) const {
    return anchor_[request] < 0 ? 0 : nodes_[anchor_[request]].kv_end;
  }

 private:
  struct PathNode {
    int64_t id;
    int32_t parent;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t num_holders;
  };

  int32_t find_or_add(int64_t id, int32_t parent, int32_t kv_begin, int32_t kv_end,
                      int32_t request);
  void read_paths(const PathsView& paths, std::span<const int32_t> seq_lens);
  void keep_shared_nodes();
  void order_requests();

  std::vector<PathNode> path_nodes_;
  std::vector<int32_t> last_node_;    // per request, into path_nodes_; -1: empty path
  std::vector<int32_t> shared_node_;  // per path node: its node in nodes_, -1: root level
  std::vector<int32_t> id_table_;     // open-addressing table of path node indices
  std::vector<int32_t> cursor_;

  std::vector<ForestNode> nodes_;
  std::vector<int32_t> holders_;
  std::vector<int32_t> anchor_;
};

}  // namespace pat
