// Load-only microbenchmark of a KV ring on Hopper. Producer warps copy scattered KV rows into a ring of stages in shared
// memory; consumer warps only wait for full stages and hand them back. It answers how CTAs, warps and stages must be
// arranged for the loads to reach the bandwidth of device memory and of L2, before a body is written for them.
//
//   nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -o load_ring load_ring.cu
//   ./load_ring                 everything, the table last (well under 60 s)
//   ./load_ring --only long8    rows whose set name contains the text
//   ./load_ring --check         correctness only
//   ./load_ring --reps 40 --csv table.csv
//
#include <cstdint>

struct Params {
  const char* k_pool;
  const char* v_pool;
  const int32_t* slots;  // the index array
  const int4*
      segments;  // {first index into slots, tokens, KV head, 0}, segments_per_ticket a ticket
  int segments_per_ticket;  // <= 32: one descriptor per lane
  int num_tickets;
  uint32_t slot_bytes;
  int stages;
  int hold;  // a consumer releases a stage only when `hold` further ones are full; < stages
  int consumer_warps;
  int dynamic;     // tickets from *counter, else strided by the grid
  int arrive_one;  // one arrival on `empty` per consumer warp, else one per thread
  int check;       // consumers sum what they find
  int* counter;    // 0 at the start
  int* error;      // 0, or where a wait gave up
  unsigned long long* checksum;
};

constexpr int kRowBytes = 256;  // head_dim 128 in 16 bit
constexpr int kRowWords = kRowBytes / 4;
constexpr int kChunks = kRowBytes / 16;
constexpr int kMaxStages = 16;
constexpr int kDraws = 4;
constexpr uint32_t kTimeoutClocks = 1u
                                    << 29;  // 0.3 s; try_wait sleeps, so clocks and not iterations

struct Control {  // behind the ring
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t draw_full[kDraws];
  uint64_t draw_empty[kDraws];
  int record[kMaxStages];  // tokens of the stage, -1: no more stages
  int drawn[kDraws];
};

// Word `index` of pool `operand`.
__host__ __device__ inline uint32_t pool_word(uint32_t index, uint32_t operand) {
  uint32_t x = index ^ (operand ? 0x9e3779b9u : 0u);
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// A permutation of [0, 2^bits).
__host__ __device__ inline uint32_t permuted(uint32_t i, int bits) {
  const uint32_t mask = (1u << bits) - 1;
  for (int round = 0; round < 3; ++round) {
    i = i * 0x9e3779b1u & mask;
    i ^= i >> (bits / 2);
    i = (i + 0x7f4a7c15u) & mask;
  }
  return i;
}

// What the consumers add up: every word times an odd weight that says where in the stage it must lie.
__host__ __device__ inline uint32_t word_weight(int stage_tokens, int operand, int row, int word) {
  return 2 * ((operand * stage_tokens + row) * kRowWords + word) + 1;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t shared, const void* global,
                                                      bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ uint32_t clock32() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}
#define RING_SHARED extern __shared__ __align__(1024) unsigned char ring_shared[]
// 64 registers with 4 producer warps or more: the real producers of A get 56.
#define RING_BOUNDS(producers) __launch_bounds__((producers) >= 4 ? 512 : 32 * (8 + (producers)), 2)
#define RING_PARAM const __grid_constant__ Params

constexpr unsigned kWarp = 0xffffffffu;

// For whole warps. False after kTimeoutClocks: the caller leaves, and so does everyone else in time.
__device__ __forceinline__ bool barrier_wait(uint32_t barrier, uint32_t parity, int* error,
                                             int where) {
  bool ok = true;
  if (!barrier_try_wait(barrier, parity)) {
    const uint32_t start = clock32();
    while (!barrier_try_wait(barrier, parity)) {
      if (clock32() - start > kTimeoutClocks) {
        ok = false;
        break;
      }
    }
  }
  ok = __all_sync(kWarp, ok);
  if (!ok) *error = where;
  return ok;
}

// The offset in an operand of a stage: two panels of 128 bytes, 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_offset(uint32_t rows, uint32_t row, uint32_t chunk) {
  const uint32_t panel = chunk / 8, column = chunk % 8;
  return (panel * rows + row) * 128 + (column ^ row % 8) * 16;
}

struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kTokens>
struct Layout {
  static constexpr int kOperandBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = 2 * kOperandBytes;
};

// kAhead: stages whose slots are loaded together, one such group ahead of the copies.
template <int kTokens, int kProducers, bool kBulk, int kAhead>
class Producer {
  using Stage = Layout<kTokens>;
  // A warp loads kRows rows of one operand, or if it is alone all rows of both.
  static constexpr int kRows = kProducers == 1 ? kTokens : kTokens / (kProducers / 2);
  static constexpr int kSlotRegisters = (kRows + 31) / 32;
  static_assert(kRows % 8 == 0);

  struct Group {
    int32_t slots[kAhead][kSlotRegisters];
    int32_t meta;  // of lane i: tokens of stage i | KV head << 8, or -1 at the end
  };

 public:
  __device__ Producer(const Params& params, Control& control, uint32_t ring, int warp, int lane)
      : p_(params), control_(control), ring_(ring), warp_(warp), lane_(lane) {
    part_row_ = kProducers == 1 ? 0 : warp / 2 * kRows;
    operand_ = kProducers == 1 ? 0 : warp % 2;
  }

  __device__ __forceinline__ void run() {
    next_ticket_ = blockIdx.x;
    if (p_.dynamic && warp_ == 0 && lane_ == 0) pending_ = atomicAdd(p_.counter, 1);
    load_descriptors();
    Group next;
    load_group(next);
    while (true) {
      Group group = next;
      load_group(next);
#pragma unroll 1
      for (int i = 0; i < kAhead; ++i) {
        const int meta = __shfl_sync(kWarp, group.meta, i);
        if (!fill(meta, group.slots[0])) return;
#pragma unroll
        for (int j = 0; j + 1 < kAhead; ++j) {
#pragma unroll
          for (int r = 0; r < kSlotRegisters; ++r) group.slots[j][r] = group.slots[j + 1][r];
        }
      }
    }
  }

 private:
  // --- tickets and segments ---

  __device__ __forceinline__ void load_descriptors() {
    lane_next_ = make_int4(0, 0, 0, 0);
    if (next_ticket_ < p_.num_tickets && lane_ < p_.segments_per_ticket) {
      lane_next_ = p_.segments[next_ticket_ * p_.segments_per_ticket + lane_];
    }
  }

  // The number after next_ticket_. Warp 0 draws one ahead and tells the others.
  __device__ __forceinline__ bool take_number() {
    if (!p_.dynamic) {
      next_ticket_ += gridDim.x;
      return true;
    }
    const int slot = taken_ % kDraws;
    const uint32_t parity = taken_ / kDraws & 1;
    ++taken_;
    const uint32_t full = shared_address(&control_.draw_full[slot]);
    const uint32_t empty = shared_address(&control_.draw_empty[slot]);
    if (warp_ == 0) {
      next_ticket_ = gridDim.x + __shfl_sync(kWarp, pending_, 0);
      if (lane_ == 0) pending_ = atomicAdd(p_.counter, 1);
      if constexpr (kProducers > 1) {
        if (!barrier_wait(empty, parity ^ 1, p_.error, 3)) return false;
        if (lane_ == 0) {
          control_.drawn[slot] = next_ticket_;
          barrier_arrive(full);
        }
      }
    } else {
      if (!barrier_wait(full, parity, p_.error, 4)) return false;
      next_ticket_ = *const_cast<volatile int*>(&control_.drawn[slot]);
      __syncwarp();
      if (lane_ == 0) barrier_arrive(empty);
    }
    return true;
  }

  // Goes on to the next segment; at the end of all sets done_.
  __device__ __forceinline__ void next_segment() {
    if (++index_ >= p_.segments_per_ticket) {
      if (next_ticket_ >= p_.num_tickets) {
        done_ = true;
        return;
      }
      lane_segment_ = lane_next_;
      index_ = 0;
      if (!take_number()) {
        done_ = true;
        return;
      }
      load_descriptors();
    }
    begin_ = __shfl_sync(kWarp, lane_segment_.x, index_);
    left_ = __shfl_sync(kWarp, lane_segment_.y, index_);
    head_ = __shfl_sync(kWarp, lane_segment_.z, index_);
  }

  // --- slots ---

  __device__ __forceinline__ void load_group(Group& group) {
    int lane_begin = 0;
    group.meta = -1;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      while (left_ == 0 && !done_) next_segment();
      if (done_) break;
      const int count = min(left_, kTokens);
      if (lane_ == i) {
        lane_begin = begin_;
        group.meta = count | head_ << 8;
      }
      begin_ += count;
      left_ -= count;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int begin = __shfl_sync(kWarp, lane_begin, i);
      const int meta = __shfl_sync(kWarp, group.meta, i);
      const int count = meta < 0 ? 0 : meta & 255;
#pragma unroll
      for (int r = 0; r < kSlotRegisters; ++r) {
        const int token = part_row_ + 32 * r + lane_;
        const bool valid = (kRows >= 32 || lane_ < kRows) && token < count;
        group.slots[i][r] = valid ? p_.slots[begin + token] : 0;
      }
    }
  }

  // --- copies ---

  // Fills the next stage; with meta -1 hands over the end. False after the end.
  __device__ __forceinline__ bool fill(int meta, const int32_t (&slots)[kSlotRegisters]) {
    const uint32_t full = shared_address(&control_.full[position_.stage]);
    const uint32_t empty = shared_address(&control_.empty[position_.stage]);
    if (!barrier_wait(empty, position_.parity ^ 1, p_.error, 1)) return false;
    const int count = meta < 0 ? 0 : meta & 255;
    const int rows = min(max(count - part_row_, 0), kRows);  // of this warp
    if (warp_ == 0 && lane_ == 0) control_.record[position_.stage] = meta < 0 ? -1 : count;
    if constexpr (kBulk) {
      if (lane_ == 0) barrier_arrive_expect(full, rows * kRowBytes * (kProducers == 1 ? 2 : 1));
      __syncwarp();
    }
    if (meta >= 0) {
      const uint32_t head_offset = (meta >> 8) * kRowBytes;
      const uint32_t stage =
          ring_ + position_.stage * Stage::kStageBytes + part_row_ * (kBulk ? kRowBytes : 128);
      if constexpr (kProducers == 1) {
        copy(stage, p_.k_pool + head_offset, slots, rows, full);
        copy(stage + Stage::kOperandBytes, p_.v_pool + head_offset, slots, rows, full);
      } else {
        copy(stage + operand_ * Stage::kOperandBytes,
             (operand_ ? p_.v_pool : p_.k_pool) + head_offset, slots, rows, full);
      }
    }
    if constexpr (!kBulk) {
      barrier_arrive_after_copies(full);
      if (warp_ == 0 && lane_ == 0) barrier_arrive(full);  // for the record
    }
    position_.advance(p_.stages);
    return meta >= 0;
  }

  __device__ __forceinline__ void copy(uint32_t target, const char* pool,
                                       const int32_t (&slots)[kSlotRegisters], int rows,
                                       uint32_t full) {
    if constexpr (kBulk) {
#pragma unroll
      for (int r = 0; r < kSlotRegisters; ++r) {
        const int row = 32 * r + lane_;
        if (row < rows) {
          copy_bulk(target + row * kRowBytes,
                    pool + uint64_t{static_cast<uint32_t>(slots[r])} * p_.slot_bytes, kRowBytes,
                    full);
        }
      }
    } else if (rows == kRows) {
      copy_rows<true>(target, pool, slots, rows);
    } else {
      copy_rows<false>(target, pool, slots, rows);
    }
  }

  // As copy_stage of pack_decode: a warp instruction covers two rows.
  template <bool kWhole>
  __device__ __forceinline__ void copy_rows(uint32_t target, const char* pool,
                                            const int32_t (&slots)[kSlotRegisters], int rows) {
    constexpr int kPerCopy = 32 / kChunks, kPeriod = 8 / kPerCopy;
    const int first_row = lane_ / kChunks, chunk = lane_ % kChunks;
    const char* source = pool + chunk * 16;
    uint32_t offsets[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) {
      offsets[i] = target + swizzled_offset(kTokens, i * kPerCopy + first_row, chunk);
    }
#pragma unroll
    for (int i = 0; i < kRows / kPerCopy; ++i) {
      const int row = i * kPerCopy + first_row;
      const uint32_t slot = __shfl_sync(kWarp, slots[i * kPerCopy / 32], row % 32);
      const char* global = source + uint64_t{slot} * p_.slot_bytes;
      const uint32_t shared = offsets[i % kPeriod] + i / kPeriod * 8 * 128;
      if constexpr (kWhole) {
        copy_async_16(shared, global);
      } else {
        copy_async_16_or_zero(shared, global, row < rows);
      }
    }
  }

  const Params& p_;
  Control& control_;
  const uint32_t ring_;
  const int warp_, lane_;
  int part_row_;  // first row of this warp in a stage
  int operand_;
  RingPosition position_;
  int4 lane_segment_;  // this lane's segment of the present ticket
  int4 lane_next_;     // and of the next, next_ticket_
  int next_ticket_;
  int pending_ = 0;  // lane 0 of warp 0: drawn, not yet taken
  int taken_ = 0;
  int index_ = 1 << 20;                  // segment in the ticket
  int begin_ = 0, left_ = 0, head_ = 0;  // what is left of it
  bool done_ = false;
};

template <int kTokens, bool kBulk>
__device__ __forceinline__ unsigned long long sum_stage(const unsigned char* stage, int count,
                                                        int thread, int threads) {
  unsigned long long sum = 0;
  const int rows = kBulk ? count : kTokens;  // cp.async must have zeroed the rest
#pragma unroll 1
  for (int i = thread; i < 2 * rows * kRowWords; i += threads) {
    const int operand = i / (rows * kRowWords), row = i / kRowWords % rows, word = i % kRowWords;
    const uint32_t offset = operand * Layout<kTokens>::kOperandBytes +
                            (kBulk ? row * kRowBytes + word * 4
                                   : swizzled_offset(kTokens, row, word / 4) + word % 4 * 4);
    const uint32_t value = *reinterpret_cast<const uint32_t*>(stage + offset);
    sum += static_cast<unsigned long long>(value) * word_weight(kTokens, operand, row, word);
  }
  return sum;
}

template <int kTokens, int kProducers, bool kBulk, int kAhead>
__global__ void RING_BOUNDS(kProducers) ring_kernel(RING_PARAM p) {
  RING_SHARED;
  using Stage = Layout<kTokens>;
  Control& control = *reinterpret_cast<Control*>(ring_shared + p.stages * Stage::kStageBytes);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(shared_address(&control.full[i]), kBulk ? kProducers : 32 * kProducers + 1);
      barrier_init(shared_address(&control.empty[i]), p.consumer_warps * (p.arrive_one ? 1 : 32));
    }
    for (int i = 0; i < kDraws; ++i) {
      barrier_init(shared_address(&control.draw_full[i]), 1);
      barrier_init(shared_address(&control.draw_empty[i]), kProducers > 1 ? kProducers - 1 : 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the bulk copies
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();

  if (warp >= p.consumer_warps) {
    Producer<kTokens, kProducers, kBulk, kAhead>(p, control, shared_address(ring_shared),
                                                 warp - p.consumer_warps, lane)
        .run();
  } else {
    RingPosition position, release;
    unsigned long long sum = 0;
    for (int held = 0;;) {
      if (!barrier_wait(shared_address(&control.full[position.stage]), position.parity, p.error,
                        2)) {
        break;
      }
      const int count = *const_cast<volatile int*>(&control.record[position.stage]);
      if (count < 0) break;
      if (p.check) {
        sum += sum_stage<kTokens, kBulk>(ring_shared + position.stage * Stage::kStageBytes, count,
                                         threadIdx.x, 32 * p.consumer_warps);
      }
      position.advance(p.stages);
      if (held == p.hold) {
        const uint32_t empty = shared_address(&control.empty[release.stage]);
        if (p.arrive_one) {
          __syncwarp();
          if (lane == 0) barrier_arrive(empty);
        } else {
          barrier_arrive(empty);
        }
        release.advance(p.stages);
      } else {
        ++held;
      }
    }
    if (p.check) atomicAdd(p.checksum, sum);
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------------- host
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const cudaError_t status = (call);                                                      \
    if (status != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

constexpr uint64_t kPoolBytes = 4ull << 30;  // of K, and the same of V
constexpr uint64_t kFlushBytes = 256ull << 20;
constexpr uint64_t kCopyBytes = 2ull << 30;

__global__ void fill_pool(uint32_t* pool, uint64_t words, uint32_t operand) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    pool[i] = pool_word(static_cast<uint32_t>(i), operand);
  }
}

__global__ void fill_slots(int32_t* slots, int count, int bits) {  // bits 0: contiguous
  const int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    slots[i] = bits ? permuted(i, bits) : i;
  }
}

// Reads everything, 8 loads of 16 bytes in flight per thread. words: of 16 bytes, a multiple of 8 blocks.
__global__ void __launch_bounds__(512) read_all(const uint4* data, uint64_t words, uint32_t* sink) {
  uint32_t sum = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * 8 * 512 + threadIdx.x; i < words;
       i += uint64_t{gridDim.x} * 8 * 512) {
    uint4 values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = __ldcg(data + i + j * 512);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= values[j].x ^ values[j].y ^ values[j].z ^ values[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

using Kernel = void (*)(const Params);

Kernel find_kernel(int tokens, int producers, bool bulk, int ahead) {
#define PICK(t, n, b, a) \
  if (tokens == t && producers == n && bulk == b && ahead == a) return ring_kernel<t, n, b, a>;
  PICK(32, 2, false, 4)
  PICK(32, 4, false, 4)
  PICK(32, 8, false, 4) PICK(32, 2, false, 1) PICK(64, 1, false, 4) PICK(64, 2, false, 4)
      PICK(64, 4, false, 4) PICK(64, 8, false, 4) PICK(64, 4, false, 1) PICK(64, 1, true, 4)
          PICK(64, 4, true, 4) PICK(64, 8, true, 4) PICK(32, 2, true, 4)
#undef PICK
              std::printf("no kernel for %d tokens, %d producers\n", tokens, producers);
  std::exit(1);
}

struct Arrangement {
  std::string name;
  bool bulk;
  int ctas, producers, consumers, tokens, stages, hold = 0;
  bool arrive_one = false, fixed = false;  // fixed: tickets strided by the grid, not drawn
  int ahead = 4;
};

struct Work {
  std::string name;
  int heads;
  bool scattered;
  int tokens;       // per head
  int segment;      // tokens of a segment
  int segments;     // of a ticket
  int repeats = 1;  // the same tokens again
  bool fixed = false;
  auto key() const { return std::make_tuple(heads, tokens, segment, segments, repeats); }
};

struct List {
  int4* segments;
  int num_tickets;
  std::vector<std::pair<int, int>> ranges;  // begin, count: of every segment of head 0
};

struct Row {
  Arrangement a;
  Work w;
  std::vector<float> times[2];
  bool ok = false, checked = false, hung = false;
};

float median(std::vector<float> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

class Bench {
 public:
  Bench() {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    sms = properties.multiProcessorCount;
    std::printf("%s, %d SM, L2 %d MB, %zu KB shared memory a block\n", properties.name, sms,
                properties.l2CacheSize >> 20, properties.sharedMemPerBlockOptin >> 10);
    CHECK(cudaMalloc(&pool_[0], kPoolBytes));
    CHECK(cudaMalloc(&pool_[1], kPoolBytes));
    CHECK(cudaMalloc(&copy_, kCopyBytes));
    CHECK(cudaMalloc(&flush_, kFlushBytes));
    CHECK(cudaMalloc(&small_, 256));
    CHECK(cudaMemset(small_, 0, 256));
    for (int i = 0; i < 2; ++i) fill_pool<<<sms * 8, 512>>>(pool_[i], kPoolBytes / 4, i);
    fill_pool<<<sms * 8, 512>>>(copy_, kCopyBytes / 4, 5);
    fill_pool<<<sms * 8, 512>>>(flush_, kFlushBytes / 4, 7);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }

  static int slot_bits(int heads) { return heads == 8 ? 21 : 24; }

  int32_t* slots(int heads, bool scattered) {
    int32_t*& array = slots_[{heads, scattered}];
    if (!array) {
      const int count = 1 << (slot_bits(heads) - 1);  // half of the pool is read
      CHECK(cudaMalloc(&array, uint64_t{4} * count));
      fill_slots<<<sms * 4, 512>>>(array, count, scattered ? slot_bits(heads) : 0);
      CHECK(cudaGetLastError());
    }
    return array;
  }

  const List& list(const Work& w) {
    const auto found = lists_.find(w.key());
    if (found != lists_.end()) return found->second;
    List list;
    const int used = (w.tokens + w.segment - 1) / w.segment;
    const int chunks = (used + w.segments - 1) / w.segments;
    // Short segments are requests' tails: they follow one another in no order.
    uint64_t step = 1;
    if (w.segment < 64) {
      for (step = used / 2 * 2 / 3 | 1; std::__gcd<uint64_t>(step, used) != 1;) step += 2;
    }
    std::vector<int4> segments;
    for (int repeat = 0; repeat < w.repeats; ++repeat) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int head = 0; head < w.heads; ++head) {  // innermost, as the planner lists them
          for (int i = 0; i < w.segments; ++i) {
            const int number = chunk * w.segments + i;
            int4 s = make_int4(0, 0, head, 0);
            if (number < used) {
              s.x = static_cast<int>(number * step % used) * w.segment;
              s.y = std::min(w.segment, w.tokens - s.x);
            }
            segments.push_back(s);
            if (head == 0) list.ranges.push_back({s.x, s.y});
          }
        }
      }
    }
    list.num_tickets = chunks * w.heads * w.repeats;
    CHECK(cudaMalloc(&list.segments, segments.size() * sizeof(int4)));
    CHECK(cudaMemcpy(list.segments, segments.data(), segments.size() * sizeof(int4),
                     cudaMemcpyHostToDevice));
    return lists_[w.key()] = list;
  }

  // What the consumers must sum up.
  unsigned long long expected(const Work& w, const List& list, int stage_tokens) {
    auto& rows = row_sums_[{w.heads, w.scattered}];
    if (rows.size() < static_cast<size_t>(w.tokens) * w.heads * 2) {
      rows.clear();
      for (int token = 0; token < w.tokens; ++token) {
        const uint32_t slot = w.scattered ? permuted(token, slot_bits(w.heads)) : token;
        for (int head = 0; head < w.heads; ++head) {
          for (int operand = 0; operand < 2; ++operand) {
            unsigned long long plain = 0, weighted = 0;
            for (int word = 0; word < kRowWords; ++word) {
              const uint32_t value = pool_word((slot * w.heads + head) * kRowWords + word, operand);
              plain += value;
              weighted += static_cast<unsigned long long>(value) * word;
            }
            rows.push_back({plain, weighted});
          }
        }
      }
    }
    unsigned long long sum = 0;
    for (const auto& [begin, count] : list.ranges) {
      for (int i = 0; i < count; ++i) {
        for (int head = 0; head < w.heads; ++head) {
          for (int operand = 0; operand < 2; ++operand) {
            const auto& [plain, weighted] =
                rows[(static_cast<size_t>(begin + i) * w.heads + head) * 2 + operand];
            sum += plain * word_weight(stage_tokens, operand, i % stage_tokens, 0) + 2 * weighted;
          }
        }
      }
    }
    return sum;
  }

  // Grid, block and parameters of one launch.
  struct Launch {
    Kernel kernel;
    int grid, threads, shared;
    Params p;
  };

  bool prepare(const Arrangement& a, const Work& w, Launch* launch) {
    const List& work = list(w);
    const int ring = a.stages * a.tokens * kRowBytes * 2;
    // Padded, so that no more than a.ctas fit.
    const int shared = std::max<int>(ring + sizeof(Control), 228 * 1024 / (a.ctas + 1) / 128 * 128);
    launch->kernel = find_kernel(a.tokens, a.producers, a.bulk, a.ahead);
    launch->grid = sms * a.ctas;
    launch->threads = 32 * (a.producers + a.consumers);
    launch->shared = shared;
    const void* function = reinterpret_cast<const void*>(launch->kernel);
    CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    CHECK(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared));
    int fit = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, function, launch->threads, shared));
    if (fit != a.ctas || a.hold >= a.stages || a.stages > kMaxStages) {
      std::printf("%s: %d CTAs per SM instead of %d\n", a.name.c_str(), fit, a.ctas);
      return false;
    }
    launch->p = Params{.k_pool = reinterpret_cast<const char*>(pool_[0]),
                       .v_pool = reinterpret_cast<const char*>(pool_[1]),
                       .slots = slots(w.heads, w.scattered),
                       .segments = work.segments,
                       .segments_per_ticket = w.segments,
                       .num_tickets = work.num_tickets,
                       .slot_bytes = static_cast<uint32_t>(w.heads * kRowBytes),
                       .stages = a.stages,
                       .hold = a.hold,
                       .consumer_warps = a.consumers,
                       .dynamic = !(a.fixed || w.fixed),
                       .arrive_one = a.arrive_one,
                       .check = 0,
                       .counter = small_,
                       .error = small_ + 16,
                       .checksum = reinterpret_cast<unsigned long long*>(small_ + 32)};
    return true;
  }

  void start(const Launch& l) { l.kernel<<<l.grid, l.threads, l.shared>>>(l.p); }

  void flush() {
    read_all<<<sms * 2, 512>>>(reinterpret_cast<const uint4*>(flush_), kFlushBytes / 16,
                               reinterpret_cast<uint32_t*>(small_ + 48));
  }

  int take_error() {
    int error = 0;
    CHECK(cudaMemcpy(&error, small_ + 16, 4, cudaMemcpyDeviceToHost));
    if (error) CHECK(cudaMemset(small_ + 16, 0, 4));
    return error;
  }

  void check(Row& row, const Work& work) {
    Launch l;
    row.ok = false;
    row.checked = prepare(row.a, work, &l);
    if (!row.checked) {
      row.hung = true;
      return;
    }
    l.p.check = 1;
    CHECK(cudaMemset(small_, 0, 256));
    start(l);
    CHECK(cudaGetLastError());
    unsigned long long sum = 0;
    CHECK(cudaMemcpy(&sum, l.p.checksum, 8, cudaMemcpyDeviceToHost));
    const int error = take_error();
    const unsigned long long wanted = expected(work, list(work), row.a.tokens);
    row.ok = error == 0 && sum == wanted;
    if (error) {
      row.hung = true;
      ++hangs;
      std::printf("HANG at %d: %s %s\n", error, row.w.name.c_str(), row.a.name.c_str());
    } else if (!row.ok) {
      std::printf("WRONG: %s %s: %llx, expected %llx\n", row.w.name.c_str(), row.a.name.c_str(),
                  sum, wanted);
    }
  }

  // Microseconds of each of `reps` calls, each with a cold L2.
  template <typename F>
  std::vector<float> time(int reps, F&& call) {
    while (static_cast<int>(events_.size()) < 2 * reps) {
      cudaEvent_t event;
      CHECK(cudaEventCreate(&event));
      events_.push_back(event);
    }
    for (int i = 0; i < reps; ++i) {
      CHECK(cudaMemsetAsync(small_, 0, 4));
      flush();
      CHECK(cudaEventRecord(events_[2 * i]));
      call();
      CHECK(cudaEventRecord(events_[2 * i + 1]));
    }
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::vector<float> times;
    for (int i = 0; i < reps; ++i) {
      float ms;
      CHECK(cudaEventElapsedTime(&ms, events_[2 * i], events_[2 * i + 1]));
      times.push_back(ms * 1000);
    }
    return times;
  }

  void measure(Row& row, int round, int reps) {
    Launch l;
    if (!prepare(row.a, row.w, &l)) return;
    auto times = time(reps + 1, [&] { start(l); });
    times.erase(times.begin());  // warm-up
    if (const int error = take_error()) {
      row.hung = true;
      ++hangs;
      std::printf("HANG at %d: %s %s\n", error, row.w.name.c_str(), row.a.name.c_str());
      return;
    }
    row.times[round] = times;
  }

  float copy_us(int reps) {  // 2 GB read, 2 GB written
    return median(time(reps, [&] {
      CHECK(cudaMemcpyAsync(copy_, pool_[0], kCopyBytes, cudaMemcpyDeviceToDevice));
    }));
  }

  void read_4gb(int ctas) {
    read_all<<<sms * ctas, 512>>>(reinterpret_cast<const uint4*>(pool_[1]), kPoolBytes / 16,
                                  reinterpret_cast<uint32_t*>(small_ + 48));
  }

  // nvidia-smi while the card reads.
  void print_clocks() {
    for (int i = 0; i < 700; ++i) read_4gb(4);
    FILE* pipe = popen(
        "timeout 8 nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu "
        "--format=csv,noheader -i 0 2>/dev/null",
        "r");
    char line[256] = "";
    if (pipe && std::fgets(line, sizeof line, pipe)) {
      std::printf("clocks SM, memory, power, temperature under load: %s", line);
    } else {
      std::printf("no nvidia-smi\n");
    }
    if (pipe) pclose(pipe);
    CHECK(cudaDeviceSynchronize());
  }

  int sms;
  int hangs = 0;

 private:
  uint32_t *pool_[2], *copy_, *flush_;
  int* small_;  // [0] counter, [16] error, [32] checksum, [48] sink
  std::map<std::pair<int, bool>, int32_t*> slots_;
  std::map<decltype(Work().key()), List> lists_;
  std::map<std::pair<int, bool>, std::vector<std::pair<unsigned long long, unsigned long long>>>
      row_sums_;
  std::vector<cudaEvent_t> events_;
};

int main(int argc, char** argv) {
  std::string only, csv;
  bool check_only = false;
  int reps = 12;  // in each of two rounds
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--only" && i + 1 < argc)
      only = argv[++i];
    else if (flag == "--csv" && i + 1 < argc)
      csv = argv[++i];
    else if (flag == "--reps" && i + 1 < argc)
      reps = std::max(1, (std::atoi(argv[++i]) + 1) / 2);
    else if (flag == "--check")
      check_only = true;
    else
      return std::printf("unknown %s\n", argv[i]), 2;
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Bench bench;

  // name, bulk, CTAs per SM, producer warps, consumer warps, stage tokens, stages, held
  const std::map<std::string, Arrangement> all = [] {
    std::map<std::string, Arrangement> map;
    for (const Arrangement& a :
         std::vector<Arrangement>{{"today", false, 2, 2, 4, 32, 5},
                                  {"today-ah1", false, 2, 2, 4, 32, 5, 0, false, false, 1},
                                  {"today-64KB", false, 2, 2, 4, 32, 2},
                                  {"today-fix", false, 2, 2, 4, 32, 5, 0, false, true},
                                  {"A", false, 1, 4, 8, 64, 6},
                                  {"A-hold1", false, 1, 4, 8, 64, 6, 1},
                                  {"A-hold2", false, 1, 4, 8, 64, 6, 2},
                                  {"A-hold3", false, 1, 4, 8, 64, 6, 3},
                                  {"A-fix", false, 1, 4, 8, 64, 6, 0, false, true},
                                  {"A-arr1", false, 1, 4, 8, 64, 6, 0, true},
                                  {"A-ah1", false, 1, 4, 8, 64, 6, 0, false, false, 1},
                                  {"A-P1", false, 1, 1, 8, 64, 6},
                                  {"A-P2", false, 1, 2, 8, 64, 6},
                                  {"A-P8", false, 1, 8, 8, 64, 6},
                                  {"A-P8-hold1", false, 1, 8, 8, 64, 6, 1},
                                  {"A-4st", false, 1, 4, 8, 64, 4},
                                  {"A-7st", false, 1, 4, 8, 64, 7},
                                  {"A32-8st", false, 1, 4, 8, 32, 8},
                                  {"A32-12st", false, 1, 4, 8, 32, 12},
                                  {"A32-12st-P2", false, 1, 2, 8, 32, 12},
                                  {"A32-12st-P8", false, 1, 8, 8, 32, 12},
                                  {"B32-P2-6st", false, 2, 2, 4, 32, 6},
                                  {"B32-P4-6st", false, 2, 4, 4, 32, 6},
                                  {"B64-P2-3st", false, 2, 2, 4, 64, 3},
                                  {"B64-P4-3st", false, 2, 4, 4, 64, 3},
                                  {"ref-1x2st", false, 1, 2, 4, 64, 2},
                                  {"ref-3x2st", false, 3, 2, 4, 64, 2},
                                  {"bulk-A", true, 1, 4, 8, 64, 6},
                                  {"bulk-A-P1", true, 1, 1, 8, 64, 6},
                                  {"bulk-A-P8", true, 1, 8, 8, 64, 6},
                                  {"bulk-today", true, 2, 2, 4, 32, 5}}) {
      map[a.name] = a;
    }
    return map;
  }();

  std::vector<Row> rows;
  const auto add = [&](const Work& w, const std::vector<std::string>& names) {
    if (w.name.find(only) == std::string::npos) return;
    for (const std::string& name : names) {
      Row row;
      row.a = all.at(name);
      row.w = w;
      rows.push_back(row);
    }
  };
  for (const int heads : {8, 1}) {
    const std::string h = std::to_string(heads);
    const int tokens = (1 << 23) / heads;               // 4 GiB in all
    const int short_tokens = bench.sms * 1024 / heads;  // 66 MiB on 132 SMs
    if (heads == 8) {
      add({"long8", 8, true, tokens, 512, 1},
          {"today",      "today-ah1",   "today-64KB",  "today-fix",  "A",          "A-hold1",
           "A-hold2",    "A-hold3",     "A-fix",       "A-arr1",     "A-ah1",      "A-P1",
           "A-P2",       "A-P8",        "A-P8-hold1",  "A-4st",      "A-7st",      "A32-8st",
           "A32-12st",   "A32-12st-P2", "A32-12st-P8", "B32-P2-6st", "B32-P4-6st", "B64-P2-3st",
           "B64-P4-3st", "ref-1x2st",   "ref-3x2st",   "bulk-A",     "bulk-A-P1",  "bulk-A-P8",
           "bulk-today"});
    } else {
      add({"long1", 1, true, tokens, 512, 1},
          {"today", "today-64KB", "A", "A-hold1", "A-hold2", "A-P1", "A-P2", "A-P8", "A-4st",
           "A32-12st", "B32-P2-6st", "B64-P4-3st", "bulk-A"});
    }
    add({"contig" + h, heads, false, tokens, 512, 1}, {"today", "A", "A-hold1", "A-P8"});
    add({"seg48_" + h, heads, true, tokens, 48, 10},
        {"today", "today-ah1", "A", "A-hold1", "A-ah1", "A-P8", "A32-12st", "B32-P2-6st"});
    add({"seg32_" + h, heads, true, tokens, 32, 16},
        {"today", "today-ah1", "A", "A-hold1", "A-ah1", "A-P8", "A32-12st", "B32-P2-6st"});
    add({"short" + h, heads, true, short_tokens, 64, 1, 1, true},
        {"today", "A", "A-hold1", "A-4st", "A-P8", "B32-P2-6st"});
    add({"shortdyn" + h, heads, true, short_tokens, 64, 1, 1, false}, {"today", "A"});
    add({"L2_" + h, heads, true, 4096, 512, 1, tokens / 4096},
        {"today", "A", "A-hold1", "A-P2", "A-P8", "A32-12st", "B64-P4-3st", "bulk-A"});
  }

  // Correctness: every row's arrangement on a small piece of its work.
  for (Row& row : rows) {
    Work small = row.w;
    small.repeats = 1;
    if (small.tokens != 4096) small.tokens = bench.sms * 1024 / small.heads;
    if (bench.hangs < 3) bench.check(row, small);
  }
  int correct = 0;
  for (const Row& row : rows) correct += row.ok;
  std::printf("%d of %zu rows give the right sum (%.1f s)\n", correct, rows.size(), seconds());
  if (bench.hangs) std::printf("%d HANGS\n", bench.hangs);
  if (check_only) return correct != static_cast<int>(rows.size());

  const float copy_first = bench.copy_us(11);
  float read_us = 1e9f;
  for (const int ctas : {2, 4}) {
    read_us = std::min(read_us, median(bench.time(11, [&] { bench.read_4gb(ctas); })));
  }
  float empty_us = 0;
  {
    Bench::Launch l;
    if (bench.prepare(all.at("A"), {"empty", 8, true, 4096, 512, 1}, &l)) {
      l.p.num_tickets = 0;
      empty_us = median(bench.time(21, [&] { bench.start(l); }));
    }
  }
  bench.print_clocks();
  for (int round = 0; round < 2; ++round) {
    for (Row& row : rows) {
      if (!row.hung && bench.hangs < 3 && seconds() < 45) bench.measure(row, round, reps);
    }
  }
  const float copy_last = bench.copy_us(11);
  const double copy_gbps = 2e-3 * kCopyBytes / copy_last;
  const double read_gbps = 1e-3 * kPoolBytes / read_us;
  std::printf(
      "device-to-device copy %.0f GB/s before, %.0f after (read + written); plain read of "
      "4 GiB %.0f GB/s; empty launch of A %.2f us; %.1f s so far\n",
      2e-3 * kCopyBytes / copy_first, copy_gbps, read_gbps, empty_us, seconds());

  FILE* file = csv.empty() ? nullptr : std::fopen(csv.c_str(), "w");
  if (file) {
    std::fprintf(file,
                 "set,heads,scattered,segment,name,path,ctas,producers,consumers,"
                 "stage_tokens,stages,hold,ahead,us,gbps,round1_us,round2_us,min_us,max_us,"
                 "percent_today,ok\n");
  }
  std::printf("%-9s %-12s %-4s %3s %2s %2s %3s %2s %4s %9s %6s %5s %7s %6s %s\n", "set", "name",
              "path", "cta", "P", "C", "tok", "st", "KB", "us", "GB/s", "+-%", "%today", "%read",
              "sum");
  std::string set;
  double base = 0;
  for (const Row& row : rows) {
    if (row.w.name != set) {
      set = row.w.name;
      base = 0;
    }
    std::vector<float> times = row.times[0];
    times.insert(times.end(), row.times[1].begin(), row.times[1].end());
    const Arrangement& a = row.a;
    const char* state = row.hung ? "HANG" : !row.checked ? "?" : row.ok ? "ok" : "WRONG";
    if (times.empty()) {
      std::printf("%-9s %-12s not measured %s\n", set.c_str(), a.name.c_str(), state);
      continue;
    }
    const double us = median(times);
    const double gbps = 512e-3 * row.w.tokens * row.w.heads * row.w.repeats / us;
    if (a.name == "today") base = gbps;
    const double first = median(row.times[0]), second = median(row.times[1]);
    const double spread = second > 0 ? 100 * std::abs(first - second) / us : 0;
    const double of_today = base > 0 ? 100 * gbps / base : 0;
    const int ring_kb = a.ctas * a.stages * a.tokens / 2;
    std::printf("%-9s %-12s %-4s %3d %2d %2d %3d %2d %4d %9.2f %6.0f %5.2f %7.1f %6.1f %s\n",
                set.c_str(), a.name.c_str(), a.bulk ? "bulk" : "cp16", a.ctas, a.producers,
                a.consumers, a.tokens, a.stages, ring_kb, us, gbps, spread, of_today,
                100 * gbps / read_gbps, state);
    if (file) {
      std::fprintf(file,
                   "%s,%d,%d,%d,%s,%s,%d,%d,%d,%d,%d,%d,%d,%.3f,%.1f,%.3f,%.3f,%.3f,%.3f,"
                   "%.2f,%s\n",
                   set.c_str(), row.w.heads, row.w.scattered, row.w.segment, a.name.c_str(),
                   a.bulk ? "bulk" : "cp16", a.ctas, a.producers, a.consumers, a.tokens, a.stages,
                   a.hold, a.ahead, us, gbps, first, second,
                   *std::min_element(times.begin(), times.end()),
                   *std::max_element(times.begin(), times.end()), of_today, state);
    }
  }
  if (file) std::fclose(file);
  return correct != static_cast<int>(rows.size());
}
