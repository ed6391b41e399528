// The places of a batch's requests in the previous batch. The address of a request identifies it.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace pat {

using Request = const void*;

struct BatchChange {
  // Per request: its place in the previous batch if it was there and has not moved, otherwise -1.
  std::vector<int32_t> kept;
  int32_t num_joined = 0;
  int32_t num_left = 0;
  int32_t num_moved = 0;  // of those that stayed

  // moved: requests whose path may have changed. Takes time linear in the two batches.
  BatchChange(std::span<const Request> before, std::span<const Request> now,
              const std::unordered_set<Request>& moved);
};

}  // namespace pat
