// Places of a batch's requests in the batch before. A request is recognised by its address.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace pat {

using Request = const void*;

struct BatchChange {
  // Per request of the batch: its place in the one before if it was there and has not moved, else -1.
  std::vector<int32_t> kept;
  int32_t num_joined = 0;
  int32_t num_left = 0;
  int32_t num_moved = 0;  // of those that stayed

  // moved: requests whose path may be another one now. Linear in the two batches.
  BatchChange(std::span<const Request> before, std::span<const Request> now,
              const std::unordered_set<Request>& moved);
};

}  // namespace pat
