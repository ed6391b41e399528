// Rules of guided self-scheduling: fitted to the trees of benchmarks/kernel/workloads.py on an H100.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cost_model.h"

namespace pat {

// A ticket is this part of a worker's share of what is left, and no smaller than so many tokens.
inline constexpr int64_t kTicketsPerShare = 2;
inline constexpr int64_t kSmallestTicket = 384;
// Shared tickets are drawn so many times faster than private ones. The last tickets should be private: those are cheap
// to cut.
inline constexpr double kSharedLead = 2;

inline int64_t ticket_budget(int64_t cost_left, int32_t num_workers) {
  return std::max(cost_left / (kTicketsPerShare * num_workers), kCostUnit * kSmallestTicket);
}

// A run of work items, and how far it has been assigned.
struct TicketProgress {
  int64_t total;  // cost
  int64_t done;

  double part() const { return static_cast<double>(done) / static_cast<double>(total); }
};

// True if the next ticket is a shared one, where there are both.
inline bool shared_is_next(const TicketProgress& shared_work, const TicketProgress& private_work) {
  return shared_work.part() <= kSharedLead * private_work.part();
}

}  // namespace pat
