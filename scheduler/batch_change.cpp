#include "batch_change.h"

#include <algorithm>
#include <bit>

namespace pat {

namespace {

// Finds the places of requests in a batch. Never returns a place twice. Batches lose requests anywhere and gain them at
// the end, so the next request is nearly always near the last place found. A hash table, which is built at its first
// use, finds the other requests.
class Places {
 public:
  explicit Places(std::span<const Request> batch) : batch_(batch), taken_(batch.size(), 0) {}

  // Returns a place that the request has and that was not returned before, or -1.
  int32_t take(Request request) {
    const size_t near_end = std::min(next_ + kNear, batch_.size());
    for (size_t place = next_; place < near_end; ++place) {
      if (batch_[place] == request && !taken_[place]) return found(place);
    }
    if (num_taken_ == batch_.size()) return -1;
    if (buckets_.empty()) fill_table();
    Bucket& bucket = bucket_of(request);
    while (bucket.first >= 0 && taken_[bucket.first]) bucket.first = following_[bucket.first];
    return bucket.first < 0 ? -1 : found(bucket.first);
  }

 private:
  static constexpr size_t kNear = 8;
  struct Bucket {
    int32_t owner = -1;  // any place of the bucket's request; -1: the bucket is free
    int32_t first = -1;  // the request's first place that may not be taken yet; -1: none
  };

  int32_t found(size_t place) {
    taken_[place] = 1;
    ++num_taken_;
    next_ = std::max(next_, place + 1);
    return static_cast<int32_t>(place);
  }

  void fill_table() {
    buckets_.assign(std::bit_ceil(2 * (batch_.size() - num_taken_) + 1), {});
    following_.assign(batch_.size(), -1);
    for (size_t i = batch_.size(); i-- > 0;) {  // backwards: `first` becomes the lowest place
      if (taken_[i]) continue;
      Bucket& bucket = bucket_of(batch_[i]);
      const int32_t place = static_cast<int32_t>(i);
      if (bucket.owner < 0) bucket.owner = place;
      following_[i] = bucket.first;
      bucket.first = place;
    }
  }

  Bucket& bucket_of(Request request) {
    const size_t mask = buckets_.size() - 1;
    // Fibonacci hashing, because the lowest and highest bits of all addresses are equal.
    const uint64_t hash = reinterpret_cast<uintptr_t>(request) * 0x9e3779b97f4a7c15ULL;
    size_t i = (hash >> 32) & mask;
    while (buckets_[i].owner >= 0 && batch_[buckets_[i].owner] != request) i = (i + 1) & mask;
    return buckets_[i];
  }

  std::span<const Request> batch_;
  std::vector<char> taken_;
  size_t num_taken_ = 0;
  size_t next_ = 0;  // one past the last place found
  std::vector<Bucket> buckets_;
  std::vector<int32_t> following_;  // per place: next place of the same request, or -1
};

}  // namespace

BatchChange::BatchChange(std::span<const Request> before, std::span<const Request> now,
                         const std::unordered_set<Request>& moved) {
  Places places(before);
  kept.reserve(now.size());
  for (const Request request : now) {
    int32_t place = places.take(request);
    if (place < 0) {
      ++num_joined;
    } else if (!moved.empty() && moved.contains(request)) {
      ++num_moved;
      place = -1;
    }
    kept.push_back(place);
  }
  num_left = static_cast<int32_t>(before.size()) + num_joined - static_cast<int32_t>(now.size());
}

}  // namespace pat
