// Fuzzes the scheduler: random plans, half of them from damaged input, and random operations on forests.
//
//   scheduler_fuzz [--plans N] [--operations N] [--seed N]
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "plan_checks.h"
#include "radix_tree.h"
#include "runner.h"

namespace pat::testing {
namespace {

// Changes one entry of one array, or the length of one array.
void damage(Random& random, PathArrays& arrays, std::vector<int32_t>& seq_lens) {
  const auto change = [&](auto& array) {
    using T = typename std::remove_reference_t<decltype(array)>::value_type;
    constexpr std::array<int64_t, 8> kOdd = {-1,   0,         1,         63,
                                             4096, INT32_MAX, INT32_MIN, INT32_MAX - 1};
    const auto odd = static_cast<T>(kOdd[draw(random, 0, kOdd.size() - 1)]);
    if (array.empty() || one_in(random, 8)) return array.push_back(odd);
    if (one_in(random, 8)) return array.pop_back();
    T& entry = array[draw(random, 0, array.size() - 1)];
    entry = one_in(random, 2) ? odd : static_cast<T>(entry ^ (T{1} << draw(random, 0, 30)));
  };
  switch (draw(random, 0, 4)) {
    case 0:
      return change(arrays.path_begin);
    case 1:
      return change(arrays.node_id);
    case 2:
      return change(arrays.kv_begin);
    case 3:
      return change(arrays.kv_end);
    default:
      return change(seq_lens);
  }
}

struct PlanCounts {
  int64_t right = 0;
  int64_t refused = 0;
  int64_t harmless = 0;  // damaged inputs that still gave a plan
};

PlanCounts fuzz_plans(int64_t num_plans, Random& random) {
  PlanCounts counts;
  SchedulerConfig made = config();
  PackScheduler scheduler(made);
  for (int64_t i = 0; i < num_plans; ++i) {
    if (i % 16 == 0) {
      made = random_config(random, one_in(random, 4));
      made.batch_invariant = one_in(random, 4);
      made.by_time = !one_in(random, 4);
      scheduler = PackScheduler(made);
    }
    Batch batch = one_in(random, 3) ? extreme_batch(random)
                                    : random_batch(random, {.max_nodes = draw(random, 0, 80),
                                                            .max_requests = draw(random, 1, 120),
                                                            .max_tokens = draw(random, 5, 50'000)});
    PathArrays arrays = batch.arrays();
    if (i % 2 == 0) {
      scheduler.plan(arrays.view(), batch.seq_lens);
      check_plan(scheduler, made, batch);
      check_bounds(scheduler, made, batch.seq_lens);
      ++counts.right;
      continue;
    }
    for (int64_t n = draw(random, 1, 3); n > 0; --n) damage(random, arrays, batch.seq_lens);
    const std::vector<int32_t> before = plan_bytes(scheduler);
    try {
      scheduler.plan(arrays.view(), batch.seq_lens);
      check_bounds(scheduler, made, batch.seq_lens);
      ++counts.harmless;
    } catch (const Failure&) {
      throw;
    } catch (const std::logic_error&) {  // invalid_argument or length_error
      CHECK(plan_bytes(scheduler) == before);
      ++counts.refused;
    }
  }
  return counts;
}

int64_t fuzz_forest(int64_t num_operations, uint64_t seed) {
  Random random(seed);
  Engine engine(seed);
  int64_t num_compared = 0;
  for (int64_t i = 0; i < num_operations; ++i) {
    engine.operate();
    if (!one_in(random, 4)) continue;
    engine.update();
    if (!one_in(random, 3)) continue;
    engine.compare_with_rebuild();
    ++num_compared;
  }
  return num_compared;
}

}  // namespace
}  // namespace pat::testing

int main(int argc, char** argv) {
  long long plans = 1000, operations = 100'000, seed = 1;
  for (int i = 1; i < argc; i += 2) {
    long long* option = std::strcmp(argv[i], "--plans") == 0        ? &plans
                        : std::strcmp(argv[i], "--operations") == 0 ? &operations
                        : std::strcmp(argv[i], "--seed") == 0       ? &seed
                                                                    : nullptr;
    if (option == nullptr || i + 1 == argc) {
      std::fprintf(stderr, "usage: %s [--plans N] [--operations N] [--seed N]\n", argv[0]);
      return 2;
    }
    *option = std::atoll(argv[i + 1]);
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  try {
    pat::testing::Random random(seed);
    const pat::testing::PlanCounts counts = pat::testing::fuzz_plans(plans, random);
    std::printf(
        "%lld plans: %lld right, %lld damaged and refused, %lld damaged but a plan; %.1f s\n",
        plans, static_cast<long long>(counts.right), static_cast<long long>(counts.refused),
        static_cast<long long>(counts.harmless), seconds());
    const long long compared = pat::testing::fuzz_forest(operations, seed);
    std::printf("%lld forest operations: %lld plans equal those of a rebuild; %.1f s in all\n",
                operations, compared, seconds());
  } catch (const std::exception& error) {
    std::printf("FAILED with seed %lld\n  %s\n", seed, error.what());
    return 1;
  }
  return 0;
}
