#include <algorithm>
#include <ctime>
#include <numeric>

#include "batch_change.h"
#include "batches.h"
#include "runner.h"

namespace pat::testing {
namespace {

// Stand-ins for requests, of which only the addresses matter.
struct Requests {
  std::vector<char> memory = std::vector<char>(1 << 16);
  Request operator[](int64_t i) const { return &memory[i]; }
  std::vector<Request> of(const std::vector<int64_t>& numbers) const {
    std::vector<Request> requests;
    for (const int64_t number : numbers) requests.push_back((*this)[number]);
    return requests;
  }
};

void check_against_search(std::vector<Request> before, const std::vector<Request>& now,
                          const std::unordered_set<Request>& moved) {
  const BatchChange change(before, now, moved);
  int32_t joined = 0, num_moved = 0;
  CHECK_EQ(change.kept.size(), now.size());
  for (size_t i = 0; i < now.size(); ++i) {
    const auto found = std::find(before.begin(), before.end(), now[i]);
    int32_t place = found == before.end() ? -1 : static_cast<int32_t>(found - before.begin());
    joined += place < 0;
    if (place >= 0 && moved.contains(now[i])) {
      ++num_moved;
      place = -1;
    }
    CHECK_EQ(change.kept[i], place);
    if (found != before.end()) *found = nullptr;
  }
  CHECK_EQ(change.num_joined, joined);
  CHECK_EQ(change.num_moved, num_moved);
  CHECK_EQ(static_cast<size_t>(change.num_left), before.size() + joined - now.size());
}

TEST(batch_changes_of_any_kind) {
  const Requests requests;
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    const int64_t size = draw(random, 0, one_in(random, 10) ? 300 : 20);
    std::vector<int64_t> numbers(size);
    std::iota(numbers.begin(), numbers.end(), 0);
    const auto before = requests.of(numbers);
    if (one_in(random, 3)) std::shuffle(numbers.begin(), numbers.end(), random);
    const int64_t leave = draw(random, 0, 10);
    std::erase_if(numbers, [&](int64_t) { return draw(random, 1, 10) <= leave; });
    for (int64_t i = draw(random, 0, 5); i > 0; --i) {
      const int64_t place = one_in(random, 2) ? numbers.size() : draw(random, 0, numbers.size());
      numbers.insert(numbers.begin() + place, 1000 + 10 * i);
    }
    std::unordered_set<Request> moved;
    for (int64_t i = draw(random, 0, 3); i > 0; --i) moved.insert(requests[draw(random, 0, 25)]);
    check_against_search(before, requests.of(numbers), moved);
  }
}

TEST(batch_changes_with_a_request_twice) {
  const Requests requests;
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int64_t> before(draw(random, 0, 30)), now(draw(random, 0, 30));
    for (int64_t& number : before) number = draw(random, 0, 12);
    for (int64_t& number : now) number = draw(random, 0, 12);
    const BatchChange change(requests.of(before), requests.of(now), {});
    std::vector<int> taken(before.size(), 0);
    for (size_t i = 0; i < now.size(); ++i) {
      if (change.kept[i] < 0) continue;
      CHECK_EQ(before[change.kept[i]], now[i]);
      CHECK_EQ(++taken[change.kept[i]], 1);
    }
    for (int64_t number = 0; number <= 12; ++number) {
      const auto in_both =
          std::min(std::ranges::count(before, number), std::ranges::count(now, number));
      int64_t kept = 0;
      for (size_t i = 0; i < now.size(); ++i) kept += now[i] == number && change.kept[i] >= 0;
      CHECK_EQ(kept, in_both);
    }
  }
}

// With quadratic time, each of these changes would take seconds.
TEST(batch_changes_are_linear) {
  const Requests requests;
  std::vector<int64_t> before(30'000);
  std::iota(before.begin(), before.end(), 0);
  std::vector<int64_t> reversed(before.rbegin(), before.rend());
  std::vector<int64_t> others(before);
  for (int64_t& number : others) number += 30'000;
  const std::vector<int64_t> same(30'000, 7);
  Random random(3);
  std::vector<int64_t> shuffled(before);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  const std::clock_t begin = std::clock();  // CPU time, because other processes may run
  for (const auto& now : {reversed, others, shuffled}) {
    const BatchChange change(requests.of(before), requests.of(now), {});
    CHECK_EQ(change.num_joined, now == others ? 30'000 : 0);
  }
  CHECK_EQ(BatchChange(requests.of(same), requests.of(same), {}).num_joined, 0);
  CHECK_EQ(BatchChange(requests.of(before), requests.of(same), {}).num_joined, 29'999);
  CHECK(std::clock() - begin < CLOCKS_PER_SEC);
}

}  // namespace
}  // namespace pat::testing
