// Divides requests in tree order into runs, each of which reads its shared KV once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cost_model.h"

namespace pat {

class RunFinder {
 public:
  explicit RunFinder(const PackingCosts& cost) : cost_(cost) {}

  // Finds the cheapest cuts between `count` places, and fills `ends` with the ends of the runs. A cut before a place
  // costs one more work item, and one more read of the shared_tokens(place) tokens that the place shares with the one
  // before it. All other KV is read once, wherever the cuts are. Requests that share nothing are never in the same run.
  // fits(first, last): whether one run may have the places from `first` to `last`. If so, it may also begin later. A
  // place alone always is a run. Takes time linear in `count`.
  template <typename SharedTokens, typename Fits>
  void find(int32_t count, const SharedTokens& shared_tokens, const Fits& fits,
            std::vector<int32_t>& ends) {
    best_.assign(count + 1, 0);
    run_begin_.assign(count + 1, 0);
    candidates_.resize(count);
    int32_t front = 0, back = 0;  // candidates in use, ascending in cost and place
    for (int32_t place = 0; place < count; ++place) {
      const int32_t shared = shared_tokens(place);
      if (shared == 0) front = back = 0;
      // Here best_[place] becomes the cost of the cheapest cuts up to `place`, including a cut at `place`.
      if (place > 0) best_[place] += cost_.item + int64_t{cost_.reread_token} * shared;
      while (back > front && best_[candidates_[back - 1]] > best_[place]) --back;
      candidates_[back++] = place;
      while (candidates_[front] < place && !fits(candidates_[front], place)) ++front;
      run_begin_[place + 1] = candidates_[front];
      best_[place + 1] = best_[candidates_[front]];
    }
    ends.clear();
    for (int32_t end = count; end > 0; end = run_begin_[end]) ends.push_back(end);
    std::reverse(ends.begin(), ends.end());
  }

 private:
  PackingCosts cost_;
  std::vector<int64_t> best_;        // per place: cost of the cheapest cuts before it
  std::vector<int32_t> run_begin_;   // per place: start of the run that ends before it
  std::vector<int32_t> candidates_;  // places where the next run may begin, best first
};

}  // namespace pat
