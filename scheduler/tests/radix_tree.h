// A prefix cache that behaves like SGLang's: when it splits a node, the upper part gets a new id. The ids of evicted
// nodes are used again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "batches.h"
#include "forest_update.h"

namespace pat::testing {

class RadixTree {
 public:
  using Tokens = std::vector<int32_t>;

  RadixTree();
  // Inserts the tokens that are not in the tree yet. Returns the node at which `tokens` ends.
  int32_t insert(const Tokens& tokens);
  void lock(int32_t node);
  void unlock(int32_t node);
  // Tries a few random nodes, and removes the first that is an unlocked leaf.
  void evict(Random& random);

  struct PathEntry {
    Node node;
    bool branches;
  };
  std::vector<PathEntry> path(int32_t node) const;
  size_t num_nodes() const { return nodes_.size() - free_.size(); }

 private:
  struct TreeNode {
    int64_t id;
    int32_t parent;
    int32_t begin;
    Tokens key;
    std::map<int32_t, int32_t> children;
    int32_t locks;
  };
  int32_t new_node(int32_t parent, int32_t begin, Tokens key);
  int32_t end(int32_t node) const {
    return nodes_[node].begin + static_cast<int32_t>(nodes_[node].key.size());
  }
  void split(int32_t node, size_t length);

  std::vector<TreeNode> nodes_;  // entry 0 is the root
  std::vector<int32_t> free_;
  std::vector<int64_t> free_ids_;
  int64_t next_id_ = 1;
};

// Running requests with paths in a tree, and a forest that is updated from batch to batch.
class Engine : public PathReader {
 public:
  explicit Engine(uint64_t seed) : random_(seed) {}

  // Does one random operation: requests join, leave or move, or the tree inserts or evicts tokens.
  void operate();
  // Updates the forest to the current batch.
  std::optional<UpdateCounts> update();
  // Throws Failure if the forest's plan differs by a byte from the plan of freshly read paths.
  void compare_with_rebuild();

  TreePaths read(std::span<const int32_t> requests) override;
  size_t num_requests() const { return running_.size(); }

 private:
  struct Running {
    RadixTree::Tokens tokens;
    int32_t node;
  };
  RadixTree::Tokens random_tokens();
  Path path_of(const Running& request) const;

  Random random_;
  RadixTree tree_;
  std::vector<std::unique_ptr<Running>> running_;
  std::unordered_set<Request> moved_;
  std::vector<Request> before_;
  std::vector<std::unique_ptr<Running>>
      left_;  // kept, so that the next update meets no reused address
  PrefixForest forest_;
  PackScheduler kept_{config()};
  PackScheduler anew_{config()};
  PathArrays read_;
  std::vector<char> branches_;
};

}  // namespace pat::testing
