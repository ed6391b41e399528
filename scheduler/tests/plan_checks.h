// Checks properties that every plan must have.
#pragma once

#include "batches.h"

namespace pat::testing {

// Throws Failure if the scheduler's last plan is not correct for the batch. Each request must read each of its KV
// tokens once, and no other token. No two work items may read KV that is marked as read once. Rows must fit into tiles.
// Partials must be dense and merged in the order of the KV. In the batch-invariant mode, work items must be chunks of
// the grid. grown: if not empty, the lengths of a later step that uses the plan.
void check_plan(const PackScheduler& scheduler, const SchedulerConfig& config, const Batch& batch,
                std::span<const int32_t> grown = {});

// Throws Failure if the last plan exceeds the bounds for batches of its size.
void check_bounds(const PackScheduler& scheduler, const SchedulerConfig& config,
                  std::span<const int32_t> seq_lens);

}  // namespace pat::testing
