// Checks that plans do not change by a byte. Whoever changes plans on purpose puts the new hashes here.
#include <array>
#include <string>

#include "batches.h"
#include "runner.h"

namespace pat::testing {
namespace {

// PAT_TREES of benchmarks/kernel/pat_trees.py, as names for tree_batch().
const std::array<std::string, 20> kTrees = {
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
};

class Hash {  // FNV-1a
 public:
  void add(const SchedulerConfig& config, const Batch& batch) {
    PackScheduler scheduler(config);
    const PathArrays arrays = batch.arrays();
    scheduler.plan(arrays.view(), batch.seq_lens);
    for (const int32_t word : plan_bytes(scheduler)) {
      value_ = (value_ ^ static_cast<uint32_t>(word)) * 1099511628211ULL;
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 14695981039346656037ULL;
};

struct Kind {
  Policy policy;
  bool batch_invariant;
  bool by_time;
};
constexpr std::array<Kind, 7> kKinds = {{{Policy::kMemory, false, true},
                                         {Policy::kMemory, false, false},
                                         {Policy::kPaper, false, true},
                                         {Policy::kCompute, false, true},
                                         {Policy::kPerNode, false, true},
                                         {Policy::kQueryCentric, false, true},
                                         {Policy::kMemory, true, true}}};

SchedulerConfig of_kind(SchedulerConfig made, const Kind& kind) {
  made.policy = kind.policy;
  made.batch_invariant = kind.batch_invariant;
  made.by_time = kind.by_time;
  return made;
}

template <typename AddAll>
void check_hashes(const std::array<uint64_t, kKinds.size()>& expected, AddAll&& add_all) {
  for (size_t i = 0; i < kKinds.size(); ++i) {
    Hash hash;
    add_all(kKinds[i], hash);
    CHECK_EQ(hash.value(), expected[i]);
  }
}

TEST(golden_plans_of_random_forests) {
  check_hashes({4445970610187201718ULL, 12511587324415898667ULL, 9107240087988310816ULL,
                11265705511207506250ULL, 13828180383774481199ULL, 14653709251117956649ULL,
                13339889398394400431ULL},
               [](const Kind& kind, Hash& hash) {
                 Random random(50);
                 for (int round = 0; round < 600; ++round) {
                   const SchedulerConfig made = random_config(random);
                   const int64_t max_tokens = one_in(random, 2) ? 1'500 : 50'000;
                   hash.add(of_kind(made, kind),
                            random_batch(random, {.max_nodes = draw(random, 0, 80),
                                                  .max_requests = draw(random, 1, 120),
                                                  .max_tokens = max_tokens}));
                 }
                 for (const int levels : {20, 100, 400}) {
                   for (const int32_t tokens : {1, 40, 300}) {
                     hash.add(of_kind(config(), kind), caterpillar_batch(levels, tokens, 20));
                   }
                 }
               });
}

TEST(golden_plans_of_pat_trees) {
  check_hashes({17051732347108567092ULL, 11881503988392763516ULL, 18230121662254680880ULL,
                1905012094699122392ULL, 13028083569683175306ULL, 16160908153380204251ULL,
                13569164172696080723ULL},
               [](const Kind& kind, Hash& hash) {
                 for (const std::string& tree : kTrees) {
                   const Batch batch = tree_batch(tree);
                   for (const int32_t group_size : {1, 4, 8}) {
                     for (const int32_t max_block_q : {16, 64}) {
                       for (const int32_t num_workers : {33, 264}) {
                         SchedulerConfig made = config(group_size, num_workers);
                         made.max_block_q = max_block_q;
                         hash.add(of_kind(made, kind), batch);
                       }
                     }
                   }
                 }
               });
}

}  // namespace
}  // namespace pat::testing
