// Properties of every plan.
#pragma once

#include "batches.h"

namespace pat::testing {

// Throws Failure if the scheduler's last plan is not a right plan for the batch: each request reads each of its KV
// tokens once and no other; what the plan says that one work item reads, no other does; rows fit into tiles; partials
// are dense and merged in the order of the KV; in the batch-invariant mode, work items are chunks of the grid. grown: lengths of a later step that the plan serves.
void check_plan(const PackScheduler& scheduler, const SchedulerConfig& config, const Batch& batch,
                std::span<const int32_t> grown = {});

// Throws Failure if the last plan exceeds what is reserved for batches of its size.
void check_bounds(const PackScheduler& scheduler, const SchedulerConfig& config,
                  std::span<const int32_t> seq_lens);

}  // namespace pat::testing
