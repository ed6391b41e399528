// How a producer warp fills the stages of the KV ring with one operand: by asynchronous copies straight into the stage,
// or, where the cache has another type than the queries, by copies into a landing ring and a conversion from there.
#pragma once

#include "decode_params.h"
#include "pack_decode/work_queue.cuh"
#include "ptx/fp8.cuh"

namespace pat {

// Issues the copies of one stage of one operand. Rows from `num_tokens` on are zeroed: garbage would
// turn probability 0 into NaN.
template <int kColumns, bool kWholeStage>
__device__ __forceinline__ void copy_stage(uint32_t shared, const char* cache, uint32_t slot_bytes,
                                           int32_t lane_slot, int num_tokens,
                                           const RowCopy<kColumns>& copy) {
  using Copy = RowCopy<kColumns>;
  uint32_t offsets[Copy::kPeriod];
#pragma unroll
  for (int i = 0; i < Copy::kPeriod; ++i) {
    offsets[i] = shared + swizzled_offset(kStageTokens, copy.row(i), copy.chunk(i));
  }
#pragma unroll
  for (int i = 0; i < Copy::copies(kStageTokens); ++i) {
    const int token = copy.row(i);
    const uint32_t slot = __shfl_sync(kFullWarp, lane_slot, token);
    const char* source = cache + static_cast<uint64_t>(slot) * slot_bytes;
    if constexpr (!Copy::kWholeRows) source += copy.chunk(i) * kChunkBytes;
    const uint32_t target =
        offsets[i % Copy::kPeriod] + i / Copy::kPeriod * Copy::kPeriodRows * kPanelRowBytes;
    if constexpr (kWholeStage) {
      ptx::copy_async_16(target, source);
    } else {
      ptx::copy_async_16_or_zero(target, source, token < num_tokens);
    }
  }
}

// One operand of the KV ring, in the order of the stages.
template <typename T, typename Dims, bool kIsKey, bool kConverts = Dims::kConverts>
class KvStages {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr int kColumns = kIsKey ? Dims::kKey : Dims::kValue;
  using Copy = RowCopy<kColumns>;

  __device__ KvStages(const DecodeParams& params, Storage& storage, int lane)
      : storage_(storage),
        lane_(lane),
        copy_{lane},
        slot_bytes_(kIsKey ? params.k_slot_bytes : params.v_slot_bytes) {}

  // The KV head of the stages that follow.
  __device__ __forceinline__ void set_head(const DecodeParams& params, int kv_head) {
    const void* base = kIsKey ? params.k_cache : params.v_cache;
    cache_ = static_cast<const char*>(base) + kv_head * Copy::kChunks * kChunkBytes;
    if constexpr (Copy::kWholeRows) cache_ += copy_.chunk(0) * kChunkBytes;
  }

  // The next stage. lane_slot: the slot of token `lane`.
  __device__ __forceinline__ void fill(int32_t lane_slot, const StageRecord& record) {
    const int stage = ring_.stage;
    const uint32_t full = ptx::shared_address(&storage_.kv_full[stage]);
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[stage]), ring_.parity ^ 1);
    if constexpr (kIsKey) {
      ptx::store_and_arrive(ptx::shared_address(&storage_.stage_records[stage]), record.packed,
                            full, lane_ == 0);
    }
    const uint32_t target =
        ptx::shared_address(storage_.kv[stage]) + (kIsKey ? 0 : Dims::kKeyBytes);
    const int num_tokens = record.num_tokens();
    if (num_tokens == kStageTokens) {
      copy_stage<kColumns, true>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    } else {
      copy_stage<kColumns, false>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    }
    ptx::barrier_arrive_after_copies(full);
    ring_.advance();
  }

  // Waits for what may depend on the consumers of the stages filled so far.
  __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    ptx::barrier_wait(barrier, parity);
  }

  // After the last stage.
  __device__ __forceinline__ void finish() {}

 private:
  Storage& storage_;
  const int lane_;
  const Copy copy_;
  const uint32_t slot_bytes_;
  const char* cache_;  // of the KV head and this lane's chunk, slot 0
  RingPosition<Storage::kStages> ring_;
};

// Of a cache with one byte per element. A stage is asked for when fill() is called, and converted once it has landed:
// before another stage is asked for, and while the warp would otherwise stand still, since consumers may wait for it.
// Without a landing ring it is converted from registers at once.
template <typename T, typename Dims, bool kIsKey>
class KvStages<T, Dims, kIsKey, true> {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr int kColumns = kIsKey ? Dims::kKey : Dims::kValue;
  static constexpr int kLanding = Storage::kLanding;
  using Copy = ByteRowCopy<kColumns>;

  __device__ KvStages(const DecodeParams& params, Storage& storage, int lane)
      : storage_(storage),
        lane_(lane),
        copy_{lane},
        slot_bytes_(kIsKey ? params.k_slot_bytes : params.v_slot_bytes),
        landing_(landing_of(storage, lane)) {}

  __device__ __forceinline__ void set_head(const DecodeParams& params, int kv_head) {
    const void* base = kIsKey ? params.k_cache : params.v_cache;
    cache_ = static_cast<const char*>(base) + kv_head * kColumns;
    if constexpr (Copy::kWholeRows) cache_ += copy_.column_group(0) * kChunkBytes;
  }

  // Zeros are zeros in every type.
  __device__ __forceinline__ void fill(int32_t lane_slot, const StageRecord& record) {
    const int num_tokens = record.num_tokens();
    if constexpr (kLanding == 0) {
      convert<kBatch, true>(record, [&](int i) {
        const char* source = source_of(i, lane_slot);
        uint4 bytes{};
        if (copy_.row(i) < num_tokens) bytes = __ldcg(reinterpret_cast<const uint4*>(source));
        return bytes;
      });
    } else {
      while (num_pending_ == kLanding || is_ready()) convert_landed<true>();
      const uint32_t target = landing_ + newest_.stage * Dims::kLandingBytes;
#pragma unroll
      for (int i = 0; i < Copy::kCopies; ++i) {
        const char* source = source_of(i, lane_slot);
        ptx::copy_async_16_or_zero(target + i * kCopyBytes, source, copy_.row(i) < num_tokens);
      }
      ptx::barrier_arrive_after_copies(landed(newest_.stage));
      if (kIsKey && lane_ == 0) storage_.landing_records[newest_.stage] = record;
      newest_.advance();
      ++num_pending_;
    }
  }

  __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    while (num_pending_ > 0 && !ptx::barrier_is_past(barrier, parity)) {
      if (is_ready()) convert_landed<false>();
    }
    ptx::barrier_wait(barrier, parity);
  }

  __device__ __forceinline__ void finish() {
    while (num_pending_ > 0) convert_landed<false>();
  }

 private:
  static constexpr int kCopyBytes = 32 * kChunkBytes;  // of all lanes
  // Copies in registers at once.
  static constexpr int kBatch = Copy::kCopies <= 8 ? Copy::kCopies : Copy::kCopies % 8 == 0 ? 8 : 6;
  // Where the warp waits for something else: there are several copies of that code.
  static constexpr int kSmallBatch = Copy::kCopies % 4 == 0 ? 4 : Copy::kCopies;

  __device__ __forceinline__ static uint32_t landing_of(Storage& storage, int lane) {
    if constexpr (kLanding == 0) {
      return 0;
    } else {
      return ptx::shared_address(storage.landing) + (kIsKey ? 0 : Dims::kLandingKeyBytes) +
             lane * kChunkBytes;
    }
  }

  // Where this lane's copy i of a stage lies. lane_slot: as in fill().
  __device__ __forceinline__ const char* source_of(int i, int32_t lane_slot) const {
    const uint32_t slot = __shfl_sync(kFullWarp, lane_slot, copy_.row(i));
    const char* source = cache_ + static_cast<uint64_t>(slot) * slot_bytes_;
    if constexpr (!Copy::kWholeRows) source += copy_.column_group(i) * kChunkBytes;
    return source;
  }

  __device__ __forceinline__ uint32_t landed(int stage) const {
    return ptx::shared_address(&storage_.landed[kIsKey ? 0 : 1][stage]);
  }

  // Whether the oldest stage can be converted without waiting.
  __device__ __forceinline__ bool is_ready() const {
    if (num_pending_ == 0) return false;
    const uint32_t empty = ptx::shared_address(&storage_.kv_empty[ring_.stage]);
    return ptx::barrier_is_past(landed(oldest_.stage), oldest_.parity) &&
           ptx::barrier_is_past(empty, ring_.parity ^ 1);
  }

  // The oldest stage in the landing ring, once it has landed. Each lane converts what it has copied.
  template <bool kUnrolled>
  __device__ __forceinline__ void convert_landed() {
    ptx::barrier_wait(landed(oldest_.stage), oldest_.parity);
    const uint32_t source = landing_ + oldest_.stage * Dims::kLandingBytes;
    StageRecord record{};
    if constexpr (kIsKey && kLanding > 0) {
      if (lane_ == 0) record = storage_.landing_records[oldest_.stage];
    }
    convert<kUnrolled ? kBatch : kSmallBatch, kUnrolled>(
        record, [&](int i) { return ptx::load_shared_16(source + i * kCopyBytes); });
    oldest_.advance();
    --num_pending_;
  }

  // The next stage of the KV ring. record: in lane 0. load(i): the 16 bytes of copy i, of which kBatch are loaded at
  // once.
  template <int kBatch, bool kUnrolled, typename Load>
  __device__ __forceinline__ void convert(const StageRecord& record, const Load& load) {
    static_assert(Copy::kCopies % kBatch == 0);
    const int stage = ring_.stage;
    const uint32_t full = ptx::shared_address(&storage_.kv_full[stage]);
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[stage]), ring_.parity ^ 1);
    if constexpr (kIsKey) {
      ptx::store_and_arrive(ptx::shared_address(&storage_.stage_records[stage]), record.packed,
                            full, lane_ == 0);
    }
    const uint32_t target =
        ptx::shared_address(storage_.kv[stage]) + (kIsKey ? 0 : Dims::kKeyBytes);
    constexpr int kBatches = kUnrolled ? Copy::kCopies / kBatch : 1;
#pragma unroll kBatches
    for (int first = 0; first < Copy::kCopies; first += kBatch) {
      uint4 bytes[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) bytes[i] = load(first + i);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) store(target + copy_.stage_offset(first + i), bytes[i]);
    }
    if constexpr (kUsesWgmma) ptx::fence_shared_writes();
    ptx::barrier_arrive(full);
    ring_.advance();
  }

  // 16 numbers, converted. target: of the first 8.
  __device__ __forceinline__ static void store(uint32_t target, const uint4& bytes) {
    const uint2 first = fp8::convert<T, Dims::kKv>(bytes.x);
    const uint2 second = fp8::convert<T, Dims::kKv>(bytes.y);
    const uint2 third = fp8::convert<T, Dims::kKv>(bytes.z);
    const uint2 fourth = fp8::convert<T, Dims::kKv>(bytes.w);
    ptx::store_shared_16(target, make_uint4(first.x, first.y, second.x, second.y));
    ptx::store_shared_16(target ^ kChunkBytes, make_uint4(third.x, third.y, fourth.x, fourth.y));
  }

  Storage& storage_;
  const int lane_;
  const Copy copy_;
  const uint32_t slot_bytes_;
  const uint32_t landing_;  // this lane's part of the ring
  const char*
      cache_;  // of the KV head and, as far as they are the same in all copies, this lane's columns, slot 0
  RingPosition<kLanding> oldest_;
  RingPosition<kLanding> newest_;  // where the next stage lands
  int num_pending_ = 0;
  RingPosition<Storage::kStages> ring_;
};

}  // namespace pat
