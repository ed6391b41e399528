#include "forest_update.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <vector>

namespace pat {

std::optional<UpdateCounts> update_forest(PrefixForest& forest, std::span<const Request> before,
                                          std::span<const Request> now,
                                          const std::unordered_set<Request>& moved,
                                          PathReader& reader) {
  BatchChange change(before, now, moved);
  std::vector<int32_t> to_read;
  for (size_t i = 0; i < change.kept.size(); ++i) {
    if (change.kept[i] < 0) to_read.push_back(static_cast<int32_t>(i));
  }
  const bool is_current = before.size() == static_cast<size_t>(forest.num_requests());
  if (to_read.empty() && is_current && std::ranges::equal(before, now)) return std::nullopt;

  UpdateCounts counts{.joined = change.num_joined,
                      .left = change.num_left,
                      .moved = change.num_moved,
                      .read_again = 0};
  constexpr std::array<int32_t, 1> kNoPaths = {0};
  Outdated outdated;
  int num_splits_shown = 0;
  for (int round = 1;; ++round) {
    TreePaths paths{.paths = {.path_begin = kNoPaths}};
    if (!to_read.empty()) paths = reader.read(to_read);
    const bool only_suspects = round > 1 && outdated.dropped.empty();
    if (only_suspects && forest.agrees(to_read, paths.paths)) return counts;  // no node was split
    forest.update(change.kept, paths, outdated);
    if (outdated.dropped.empty() && outdated.suspects.empty()) return counts;
    num_splits_shown += !outdated.dropped.empty();
    std::iota(change.kept.begin(), change.kept.end(), 0);
    if (num_splits_shown > 1 || round > 2) {
      to_read = change.kept;
    } else {
      to_read.clear();
      std::ranges::merge(outdated.dropped, outdated.suspects, std::back_inserter(to_read));
    }
    for (const int32_t i : to_read) change.kept[i] = -1;
    counts.read_again += static_cast<int32_t>(to_read.size());
  }
}

}  // namespace pat
