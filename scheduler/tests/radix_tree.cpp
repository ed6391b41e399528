#include "radix_tree.h"

#include <algorithm>
#include <utility>

#include "runner.h"

namespace pat::testing {

RadixTree::RadixTree() {
  nodes_.push_back({.id = 0, .parent = -1, .begin = 0, .key = {}, .children = {}, .locks = 1});
}

int32_t RadixTree::new_node(int32_t parent, int32_t begin, Tokens key) {
  int64_t id = next_id_;
  if (free_ids_.empty()) {
    ++next_id_;
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  TreeNode node{.id = id,
                .parent = parent,
                .begin = begin,
                .key = std::move(key),
                .children = {},
                .locks = 0};
  if (free_.empty()) {
    nodes_.push_back(std::move(node));
    return static_cast<int32_t>(nodes_.size()) - 1;
  }
  const int32_t place = free_.back();
  free_.pop_back();
  nodes_[place] = std::move(node);
  return place;
}

void RadixTree::split(int32_t node, size_t length) {
  const Tokens key = nodes_[node].key;
  const int32_t parent = nodes_[node].parent;
  const int32_t upper = new_node(parent, nodes_[node].begin, {key.begin(), key.begin() + length});
  nodes_[upper].locks = nodes_[node].locks;
  nodes_[upper].children[key[length]] = node;
  nodes_[parent].children[key[0]] = upper;
  nodes_[node].parent = upper;
  nodes_[node].begin += static_cast<int32_t>(length);
  nodes_[node].key.erase(nodes_[node].key.begin(), nodes_[node].key.begin() + length);
}

int32_t RadixTree::insert(const Tokens& tokens) {
  int32_t node = 0;
  size_t done = 0;
  while (done < tokens.size()) {
    const auto child = nodes_[node].children.find(tokens[done]);
    if (child == nodes_[node].children.end()) {
      const int32_t leaf =
          new_node(node, static_cast<int32_t>(done), {tokens.begin() + done, tokens.end()});
      nodes_[node].children[tokens[done]] = leaf;
      return leaf;
    }
    const Tokens& key = nodes_[child->second].key;
    const size_t room = std::min(key.size(), tokens.size() - done);
    const size_t same =
        std::mismatch(key.begin(), key.begin() + room, tokens.begin() + done).first - key.begin();
    if (same < key.size()) split(child->second, same);
    node = nodes_[node].children.at(tokens[done]);
    done += same;
  }
  return node;
}

void RadixTree::lock(int32_t node) {
  for (; node > 0; node = nodes_[node].parent) ++nodes_[node].locks;
}

void RadixTree::unlock(int32_t node) {
  for (; node > 0; node = nodes_[node].parent) --nodes_[node].locks;
}

void RadixTree::evict(Random& random) {
  for (int attempt = 0; attempt < 4; ++attempt) {
    const auto place = static_cast<int32_t>(draw(random, 0, nodes_.size() - 1));
    TreeNode& node = nodes_[place];
    if (node.parent < 0 || node.locks > 0 || !node.children.empty()) continue;
    nodes_[node.parent].children.erase(node.key[0]);
    free_ids_.push_back(node.id);
    free_.push_back(place);
    node.parent = -1;
    return;
  }
}

std::vector<RadixTree::PathEntry> RadixTree::path(int32_t node) const {
  std::vector<PathEntry> path;
  for (size_t on_path = 0; node > 0; node = nodes_[node].parent, on_path = 1) {
    path.push_back(
        {{nodes_[node].id, nodes_[node].begin, end(node)}, nodes_[node].children.size() > on_path});
  }
  std::reverse(path.begin(), path.end());
  return path;
}

RadixTree::Tokens Engine::random_tokens() {
  // Only a few different tokens, so that nearly every prompt shares a prefix with another.
  RadixTree::Tokens tokens;
  if (!running_.empty() && !one_in(random_, 3)) {
    const RadixTree::Tokens& other = running_[draw(random_, 0, running_.size() - 1)]->tokens;
    tokens.assign(other.begin(), other.begin() + draw(random_, 0, other.size()));
  }
  for (int64_t i = draw(random_, tokens.empty() ? 1 : 0, 4); i > 0; --i) {
    tokens.insert(tokens.end(), draw(random_, 1, 9), static_cast<int32_t>(draw(random_, 0, 5)));
  }
  return tokens;
}

void Engine::operate() {
  const int64_t what = draw(random_, 0, 99);
  if (what < 30 || running_.empty()) {
    // Often several requests join at once, so that one update meets several splits.
    for (int64_t i = one_in(random_, 3) ? 6 : 1; i > 0 && running_.size() < 24; --i) {
      auto request = std::make_unique<Running>(random_tokens(), 0);
      request->node = tree_.insert(request->tokens);
      tree_.lock(request->node);
      running_.push_back(std::move(request));
    }
  } else if (what < 58) {
    const int64_t place = one_in(random_, 50) ? -1 : draw(random_, 0, running_.size() - 1);
    for (int64_t i = running_.size() - 1; i >= 0; --i) {  // one request leaves, or all do
      if (place >= 0 && i != place) continue;
      tree_.unlock(running_[i]->node);
      left_.push_back(std::move(running_[i]));
      running_.erase(running_.begin() + i);
    }
  } else if (what < 65) {
    Running& request = *running_[draw(random_, 0, running_.size() - 1)];
    tree_.unlock(request.node);
    request.tokens = random_tokens();
    request.node = tree_.insert(request.tokens);
    tree_.lock(request.node);
    moved_.insert(&request);
  } else if (what < 80) {
    tree_.insert(random_tokens());
  } else if (what < 98 || tree_.num_nodes() > 300) {
    tree_.evict(random_);
  } else {
    std::shuffle(running_.begin(), running_.end(), random_);
  }
}

Path Engine::path_of(const Running& request) const {
  Path path;
  for (const RadixTree::PathEntry& entry : tree_.path(request.node)) path.push_back(entry.node);
  return path;
}

TreePaths Engine::read(std::span<const int32_t> requests) {
  read_ = {};
  branches_.clear();
  for (const int32_t i : requests) {
    read_.add(path_of(*running_[i]));
    for (const RadixTree::PathEntry& entry : tree_.path(running_[i]->node))
      branches_.push_back(entry.branches);
  }
  return {.paths = read_.view(), .branches = branches_};
}

std::optional<UpdateCounts> Engine::update() {
  std::vector<Request> now;
  for (const auto& request : running_) now.push_back(request.get());
  const std::optional<UpdateCounts> counts = update_forest(forest_, before_, now, moved_, *this);
  before_ = now;
  moved_.clear();
  left_.clear();
  return counts;
}

void Engine::compare_with_rebuild() {
  Batch batch;
  for (const auto& request : running_) {
    batch.paths.push_back(path_of(*request));
    batch.seq_lens.push_back(static_cast<int32_t>(request->tokens.size()) + 5);
  }
  kept_.plan(forest_, batch.seq_lens);
  anew_.plan(batch.arrays().view(), batch.seq_lens);
  CHECK(plan_bytes(kept_) == plan_bytes(anew_));
}

}  // namespace pat::testing
