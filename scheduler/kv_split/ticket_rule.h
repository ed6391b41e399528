// The rules of guided self-scheduling, fitted to runs of the trees of benchmarks/kernel/workloads.py on an H100.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cost_model.h"

namespace pat {

// The budget of a ticket is 1 / kTicketsPerShare of a worker's share of the remaining work, and at least
// kSmallestTicket tokens. If nothing is shared, the budget is at least kSmallestUnshared tokens, because device memory
// then evens out the workers' speed.
inline constexpr int64_t kTicketsPerShare = 2;
inline constexpr int64_t kSmallestTicket = 384;
inline constexpr int64_t kSmallestUnshared = 768;
// Shared work is assigned this many times as fast as private work, so that the last tickets have private work, which is
// cheap to cut.
inline constexpr double kSharedLead = 2;

inline int64_t ticket_budget(int64_t cost_left, int32_t num_workers, bool shares_nothing = false) {
  const int64_t smallest = shares_nothing ? kSmallestUnshared : kSmallestTicket;
  return std::max(cost_left / (kTicketsPerShare * num_workers), kCostUnit * smallest);
}

// How much of the shared or the private work has been assigned.
struct TicketProgress {
  int64_t total;  // sum of the costs
  int64_t done;   // sum of the assigned costs

  double part() const { return static_cast<double>(done) / static_cast<double>(total); }
};

// True if the next ticket should have shared work. May only be called while both kinds of work are left.
inline bool shared_is_next(const TicketProgress& shared_work, const TicketProgress& private_work) {
  return shared_work.part() <= kSharedLead * private_work.part();
}

}  // namespace pat
