// Where the requests of a batch were in the previous batch. Requests are identified by their addresses.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

namespace pat {

using Request = const void*;

struct BatchChange {
  // Per request: its place in the previous batch, or -1 if it has joined or its path may have changed.
  std::vector<int32_t> kept;
  int32_t num_joined = 0;
  int32_t num_left = 0;
  int32_t num_moved = 0;  // requests in both batches whose path may have changed

  // moved: requests whose path may have changed. Takes time linear in the two batches.
  BatchChange(std::span<const Request> before, std::span<const Request> now,
              const std::unordered_set<Request>& moved);
};

}  // namespace pat
