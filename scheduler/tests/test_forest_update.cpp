#include <algorithm>
#include <array>
#include <functional>
#include <map>

#include "forest_update.h"
#include "radix_tree.h"
#include "runner.h"

namespace pat::testing {
namespace {

struct FakeRequest {
  Path path;
  bool goes_on = false;              // the path's last node has children
  std::vector<int64_t> beside = {};  // nodes with children that are not on the path
};

// Returns the paths that the requests hold, and records which requests were read.
class FakeReader : public PathReader {
 public:
  explicit FakeReader(std::vector<FakeRequest*> batch) : batch_(std::move(batch)) {}

  TreePaths read(std::span<const int32_t> requests) override {
    reads.emplace_back(requests.begin(), requests.end());
    if (fails) throw std::runtime_error("the tree");
    arrays_ = {};
    branches_.clear();
    for (const int32_t i : requests) {
      const FakeRequest& request = *batch_[i];
      arrays_.add(request.path);
      for (size_t n = 0; n < request.path.size(); ++n) {
        const bool last = n + 1 == request.path.size();
        branches_.push_back((last && request.goes_on) ||
                            std::ranges::count(request.beside, request.path[n].id) > 0);
      }
    }
    return {.paths = arrays_.view(), .branches = branches_};
  }

  std::vector<std::vector<int32_t>> reads;
  bool fails = false;

 private:
  std::vector<FakeRequest*> batch_;
  PathArrays arrays_;
  std::vector<char> branches_;
};

struct Batches {
  PrefixForest forest;
  std::vector<Request> before;
  std::vector<std::vector<int32_t>> reads;

  std::optional<UpdateCounts> go_to(const std::vector<FakeRequest*>& batch,
                                    const std::unordered_set<Request>& moved = {}) {
    FakeReader reader(batch);
    const std::vector<Request> now(batch.begin(), batch.end());
    const auto counts = update_forest(forest, before, now, moved, reader);
    reads = reader.reads;
    before = now;
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto path = forest.path(static_cast<int32_t>(i));
      CHECK_EQ(path.size(), batch[i]->path.size());
      for (size_t n = 0; n < path.size(); ++n) {
        CHECK((Node{path[n].id, path[n].kv_begin, path[n].kv_end} == batch[i]->path[n]));
      }
    }
    return counts;
  }
};

using Reads = std::vector<std::vector<int32_t>>;
const Node kSystem{1, 0, 100}, kLong{2, 100, 300}, kUpper{7, 100, 180}, kLower{2, 180, 300};

TEST(forest_of_an_unchanged_batch_reads_nothing) {
  FakeRequest a{{kSystem}}, b{{kSystem}}, elsewhere{{}};
  Batches batches;
  const auto first = batches.go_to({&a, &b});
  CHECK(first && first->joined == 2 && first->left == 0);
  CHECK(!batches.go_to({&a, &b}, {&elsewhere}));
  CHECK(batches.reads.empty());
  const auto swapped = batches.go_to({&b, &a});
  CHECK(swapped && swapped->joined == 0 && batches.reads.empty());
  const auto moved = batches.go_to({&b, &a}, {&a});
  CHECK(moved && moved->moved == 1);
  CHECK((batches.reads == Reads{{1}}));
}

TEST(forest_split_that_a_newcomer_shows) {
  FakeRequest a{{kSystem, kLong}}, b = a, other{{kSystem, {3, 100, 150}}};
  Batches batches;
  batches.go_to({&a, &b, &other});
  a.path = b.path = {kSystem, kUpper, kLower};
  FakeRequest newcomer = a;
  const auto counts = batches.go_to({&a, &b, &other, &newcomer});
  CHECK_EQ(counts->read_again, 2);
  CHECK((batches.reads == Reads{{3}, {0, 1}}));
}

TEST(forest_split_that_a_newcomer_only_suggests) {
  FakeRequest a{{kSystem, kLong}}, b = a, other{{kSystem, {3, 100, 170}}};
  Batches batches;
  batches.go_to({&a, &b, &other});
  a.path = b.path = {kSystem, kUpper, kLower};
  FakeRequest newcomer{{kSystem, kUpper, {9, 180, 200}}, false, {kUpper.id}};
  batches.go_to({&a, &b, &other, &newcomer});
  CHECK((batches.reads == Reads{{3}, {0}, {1}}));  // the shorter sibling is not read
}

TEST(forest_split_below_a_node_without_other_children) {
  FakeRequest a{{kSystem, kLong}};
  Batches batches;
  batches.go_to({&a});
  a.path = {kSystem, {7, 100, 140}, {8, 140, 180}, kLower};
  FakeRequest newcomer{{kSystem, {7, 100, 140}, {8, 140, 180}}, true};
  batches.go_to({&a, &newcomer});
  CHECK((batches.reads == Reads{{1}, {0}}));
}

TEST(forest_split_at_the_level_of_the_roots) {
  FakeRequest a{{{1, 0, 100}}}, b = a;
  Batches batches;
  batches.go_to({&a, &b});
  a.path = b.path = {{5, 0, 40}, {1, 40, 100}};
  FakeRequest newcomer{{{5, 0, 40}}, true};
  batches.go_to({&a, &b, &newcomer});
  CHECK((batches.reads == Reads{{2}, {0}, {1}}));
  FakeRequest private_one{{}};
  batches.go_to({&a, &b, &newcomer, &private_one});
  CHECK((batches.reads == Reads{{3}}));
}

// Two requests join below the same parent, where two siblings were split. The smaller end of the upper parts counts,
// whichever request comes first.
TEST(forest_splits_that_two_newcomers_suggest) {
  for (const bool shallow_first : {true, false}) {
    FakeRequest a{{kSystem, {2, 100, 200}}}, b{{kSystem, {3, 100, 300}}};
    Batches batches;
    batches.go_to({&a, &b});
    a.path = {kSystem, {7, 100, 120}, {2, 120, 200}};
    b.path = {kSystem, {8, 100, 250}, {3, 250, 300}};
    FakeRequest shallow{{kSystem, {7, 100, 120}}, true}, deep{{kSystem, {8, 100, 250}}, true};
    if (shallow_first) {
      batches.go_to({&a, &b, &shallow, &deep});
    } else {
      batches.go_to({&a, &b, &deep, &shallow});
    }
    CHECK((batches.reads[1] == std::vector<int32_t>{0, 1}));
  }
}

TEST(forest_splits_at_the_level_of_the_roots_in_one_update_after_another) {
  FakeRequest a{{{1, 0, 100}}};
  Batches batches;
  batches.go_to({&a});
  a.path = {{5, 0, 40}, {1, 40, 100}};
  FakeRequest first{{{5, 0, 40}}, true};
  batches.go_to({&a, &first});
  a.path = {{6, 0, 20}, {5, 20, 40}, {1, 40, 100}};
  first.path = {{6, 0, 20}, {5, 20, 40}};
  FakeRequest second{{{6, 0, 20}}, true};
  batches.go_to({&a, &first, &second});
  CHECK((batches.reads == Reads{{2}, {0}, {1}}));
}

TEST(forest_false_alarms_cost_one_request_per_longer_sibling) {
  std::vector<FakeRequest> readers;
  for (int i = 0; i < 128; ++i) readers.push_back({{kSystem, {10 + i / 16, 100, 200 + i / 16}}});
  std::vector<FakeRequest*> batch;
  for (FakeRequest& reader : readers) batch.push_back(&reader);
  Batches batches;
  batches.go_to(batch);
  FakeRequest alone{{kSystem, {98, 100, 203}, {97, 203, 204}}};  // no node has other children
  batch.push_back(&alone);
  batches.go_to(batch);
  CHECK((batches.reads == Reads{{128}}));
  FakeRequest newcomer{{kSystem, {99, 100, 203}, {100, 203, 210}}, false, {99}};
  batch.push_back(&newcomer);
  const auto counts = batches.go_to(batch);
  CHECK((batches.reads == Reads{{129}, {64, 80, 96, 112}}));
  CHECK_EQ(counts->read_again, 4);
}

TEST(forest_splits_that_show_one_after_the_other) {
  const Node root{20, 0, 100};
  FakeRequest a{{kSystem, kLong}}, b{{root, {21, 100, 300}}};
  Batches batches;
  batches.go_to({&a, &b});
  FakeRequest newcomer{{kSystem, kUpper, kLower}};
  a.path = b.path = {root, {22, 100, 150}, {21, 150, 300}};
  const auto counts = batches.go_to({&a, &b, &newcomer});
  CHECK((batches.reads == Reads{{2}, {0}, {0, 1, 2}}));
  CHECK_EQ(counts->read_again, 4);
}

TEST(forest_after_a_reader_that_fails_begins_anew) {
  FakeRequest a{{kSystem, kLong}}, b{{kSystem}};
  Batches batches;
  batches.go_to({&a});
  FakeReader reader({&a, &b});
  reader.fails = true;
  const std::vector<Request> now{&a, &b};
  CHECK_THROWS(update_forest(batches.forest, batches.before, now, {}, reader), "the tree");
  batches.before.clear();
  batches.go_to({&a, &b});
  CHECK((batches.reads == Reads{{0, 1}}));
}

TEST(forest_places_and_ids_are_used_again) {
  Batches batches;
  Random random(4);
  for (int wave = 0; wave < 300; ++wave) {
    std::vector<FakeRequest> requests;
    const auto size = draw(random, 0, 60);
    for (int i = 0; i < size; ++i) {
      const Node root{draw(random, 0, 3), 0, 64};
      requests.push_back({{root, {10 + draw(random, 0, 30) * 4 + root.id, 64, 90}}});
    }
    std::vector<FakeRequest*> batch;
    for (FakeRequest& request : requests) batch.push_back(&request);
    if (wave % 3 == 0) batches.before.clear();
    batches.go_to(batch);
    // Some requests leave. Searches in the table of ids must still find the entries behind those of removed nodes.
    std::erase_if(batch, [&](FakeRequest*) { return one_in(random, 2); });
    batches.go_to(batch);
    FakeRequest again = requests.empty() ? FakeRequest{} : requests.back();
    batch.push_back(&again);
    batches.go_to(batch);
    batches.go_to({});
  }
}

TEST(forest_of_random_operations_is_that_of_a_rebuild) {
  Engine engine(5);
  for (int i = 0; i < 6000; ++i) {
    engine.operate();
    if (i % 3 > 0) continue;
    engine.update();
    engine.compare_with_rebuild();
  }
}

void damage(Random& random, PathArrays& arrays, std::vector<char>& branches,
            std::vector<int32_t>& kept) {
  constexpr std::array<int64_t, 8> kOdd = {-1, 0, 1, 2, 100, INT32_MAX, INT32_MIN, -7};
  const auto odd = [&] { return kOdd[draw(random, 0, kOdd.size() - 1)]; };
  const auto change = [&](auto& array) {
    using T = typename std::remove_reference_t<decltype(array)>::value_type;
    switch (array.empty() ? 3 : draw(random, 0, 3)) {
      case 0:
        array.pop_back();
        break;
      case 1:
      case 2:
        array[draw(random, 0, array.size() - 1)] = static_cast<T>(odd());
        break;
      default:
        array.push_back(static_cast<T>(odd()));
    }
  };
  switch (draw(random, 0, 5)) {
    case 0:
      return change(arrays.path_begin);
    case 1:
      return change(arrays.node_id);
    case 2:
      return change(arrays.kv_begin);
    case 3:
      return change(arrays.kv_end);
    case 4:
      return change(branches);
    default:
      return change(kept);
  }
}

TEST(forest_survives_damaged_input) {
  Random random(6);
  PrefixForest forest;
  Outdated outdated;
  int num_refused = 0;
  for (int round = 0; round < 4000; ++round) {
    const Batch batch = random_batch(random, {.max_nodes = 8, .max_requests = 10});
    PathArrays arrays = batch.arrays();
    std::vector<char> branches(arrays.node_id.size());
    for (char& branch : branches) branch = one_in(random, 3);
    std::vector<int32_t> kept(batch.paths.size(), -1);
    for (int32_t i = 0; i < forest.num_requests(); ++i) {  // in any order
      kept.insert(kept.begin() + draw(random, 0, kept.size()), i);
    }
    if (kept.size() > 30) std::erase_if(kept, [](int32_t from) { return from >= 0; });
    for (int64_t i = draw(random, 0, 2); i > 0; --i) damage(random, arrays, branches, kept);
    try {
      forest.update(kept, {.paths = arrays.view(), .branches = branches}, outdated);
      forest.arrange(std::vector<int32_t>(kept.size(), INT32_MAX));
    } catch (const std::invalid_argument&) {
      ++num_refused;
    }
    for (int32_t i = 0; i < forest.num_requests(); ++i) forest.path(i);
  }
  CHECK(num_refused > 1000 && num_refused < 3900);
}

}  // namespace
}  // namespace pat::testing
