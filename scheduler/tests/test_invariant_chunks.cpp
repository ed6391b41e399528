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
  CHECK(ChunkGrid::is_cut(0, 1) && !ChunkGrid::is_cut(0, 0));
  CHECK(ChunkGrid::is_cut(512, 768) && !ChunkGrid::is_cut(512, 767));
  CHECK(ChunkGrid::is_cut(8192, 8704) && !ChunkGrid::is_cut(8192, 8703));
  CHECK_EQ(ChunkGrid::chunk_end(0, 100), 100);
  CHECK_EQ(ChunkGrid::chunk_end(0, 767), 767);
  CHECK_EQ(ChunkGrid::chunk_end(0, 768), 512);
  CHECK_EQ(ChunkGrid::num_chunks(0), 0);
  CHECK_EQ(ChunkGrid::num_chunks(767), 1);
  CHECK_EQ(ChunkGrid::num_chunks(768), 2);
  CHECK_EQ(ChunkGrid::num_chunks(8192), 16);
  CHECK_EQ(ChunkGrid::num_chunks(8703), 16);
  CHECK_EQ(ChunkGrid::num_chunks(8704), 17);
  CHECK(ChunkGrid::last_length(std::numeric_limits<int32_t>::max()) >=
        std::numeric_limits<int32_t>::max());
  for (int32_t length = 1; length < 40'000; ++length) {
    const auto last = static_cast<int32_t>(ChunkGrid::last_length(length));
    CHECK_EQ(ChunkGrid::num_chunks(last), ChunkGrid::num_chunks(length));
    CHECK_EQ(ChunkGrid::num_chunks(last + 1), ChunkGrid::num_chunks(length) + 1);
  }
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
    check_bounds(scheduler, config, batch.seq_lens);
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
