#include <limits>

#include "batches.h"
#include "chunk_grid.h"
#include "plan_checks.h"
#include "runner.h"

namespace pat::testing {
namespace {

TEST(chunk_grid_boundaries) {
  CHECK_EQ(ChunkGrid::chunk_tokens(0), 512);
  CHECK_EQ(ChunkGrid::chunk_tokens(8191), 512);
  CHECK_EQ(ChunkGrid::chunk_tokens(8192), 1024);
  CHECK_EQ(ChunkGrid::chunk_tokens(32768), 2048);
  CHECK_EQ(ChunkGrid::boundary_before(511), 0);
  CHECK_EQ(ChunkGrid::boundary_before(9300), 9216);
  CHECK_EQ(ChunkGrid::boundary_after(512), 512);
  CHECK_EQ(ChunkGrid::boundary_after(513), 1024);
  CHECK_EQ(ChunkGrid::boundary_after(std::numeric_limits<int32_t>::max()), int64_t{1} << 31);
  CHECK_EQ(ChunkGrid::num_chunks(0), 0);
  CHECK_EQ(ChunkGrid::num_chunks(8192), 16);
  CHECK_EQ(ChunkGrid::num_chunks(8193), 17);
}

TEST(invariant_chunks_are_right_plans) {
  Random random(40);
  for (int round = 0; round < 800; ++round) {
    SchedulerConfig config = random_config(random);
    config.batch_invariant = true;
    const Batch batch = random_batch(
        random, {.max_nodes = 12, .max_requests = draw(random, 1, 60), .max_tokens = 9'000});
    const PathArrays arrays = batch.arrays();
    PackScheduler scheduler(config);
    scheduler.plan(arrays.view(), batch.seq_lens);
    check_plan(scheduler, config, batch);
  }
}

TEST(invariant_chunks_of_deep_trees) {
  SchedulerConfig deep = config();
  deep.batch_invariant = true;
  const Batch batch = caterpillar_batch(300, 70, 30);
  const PathArrays arrays = batch.arrays();
  PackScheduler scheduler(deep);
  scheduler.plan(arrays.view(), batch.seq_lens);
  check_plan(scheduler, deep, batch);
}

}  // namespace
}  // namespace pat::testing
