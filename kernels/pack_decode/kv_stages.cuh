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
        copy_{lane},
        slot_bytes_(kIsKey ? params.k_slot_bytes : params.v_slot_bytes) {}

  // The KV head of the stages that follow.
  __device__ __forceinline__ void set_head(const DecodeParams& params, int kv_head) {
    const void* base = kIsKey ? params.k_cache : params.v_cache;
    cache_ = static_cast<const char*>(base) + kv_head * Copy::kChunks * kChunkBytes;
    if constexpr (Copy::kWholeRows) cache_ += copy_.chunk(0) * kChunkBytes;
  }

  // The next stage: up to kStageTokens of num_tokens tokens. lane_slot: the slot of token `lane`.
  __device__ __forceinline__ void fill(int32_t lane_slot, int num_tokens) {
    const int stage = ring_.stage;
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[stage]), ring_.parity ^ 1);
    const uint32_t target =
        ptx::shared_address(storage_.kv[stage]) + (kIsKey ? 0 : Dims::kKeyBytes);
    if (num_tokens >= kStageTokens) {
      copy_stage<kColumns, true>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    } else {
      copy_stage<kColumns, false>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    }
    ptx::barrier_arrive_after_copies(ptx::shared_address(&storage_.kv_full[stage]));
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
  const Copy copy_;
  const uint32_t slot_bytes_;
  const char* cache_;  // of the KV head and this lane's chunk, slot 0
  RingPosition<Storage::kStages> ring_;
};

// Of a cache with one byte per element. A stage is asked for when fill() is called, and converted kLanding stages
// later, or as soon as the warp would otherwise stand still: consumers may wait for it. Without a landing ring it is
// converted from registers at once.
template <typename T, typename Dims, bool kIsKey>
class KvStages<T, Dims, kIsKey, true> {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr int kColumns = kIsKey ? Dims::kKey : Dims::kValue;
  static constexpr int kLanding = Storage::kLanding;
  using Copy = ByteRowCopy<kColumns>;

  __device__ KvStages(const DecodeParams& params, Storage& storage, int lane)
      : storage_(storage),
        copy_{lane},
        slot_bytes_(kIsKey ? params.k_slot_bytes : params.v_slot_bytes),
        landing_(landing_of(storage, lane)) {}

  __device__ __forceinline__ void set_head(const DecodeParams& params, int kv_head) {
    const void* base = kIsKey ? params.k_cache : params.v_cache;
    cache_ = static_cast<const char*>(base) + kv_head * kColumns;
    if constexpr (Copy::kWholeRows) cache_ += copy_.column_group(0) * kChunkBytes;
  }

  // Zeros are zeros in every type.
  __device__ __forceinline__ void fill(int32_t lane_slot, int num_tokens) {
    if constexpr (kLanding == 0) {
      uint4 bytes[Copy::kCopies];
#pragma unroll
      for (int i = 0; i < Copy::kCopies; ++i) {
        const char* source = source_of(i, lane_slot);
        bytes[i] = {};
        if (copy_.row(i) < num_tokens) bytes[i] = __ldcg(reinterpret_cast<const uint4*>(source));
      }
      convert<Copy::kCopies>([&](int i) { return bytes[i]; });
    } else {
      if (num_pending_ == kLanding) {
        ptx::wait_for_copies<kLanding - 1>();
        convert_landed<Copy::kCopies>();
      }
      const uint32_t target = landing_ + newest_ * Dims::kLandingBytes;
#pragma unroll
      for (int i = 0; i < Copy::kCopies; ++i) {
        const char* source = source_of(i, lane_slot);
        ptx::copy_async_16_or_zero(target + i * kCopyBytes, source, copy_.row(i) < num_tokens);
      }
      ptx::commit_copies();
      newest_ = newest_ + 1 == kLanding ? 0 : newest_ + 1;
      ++num_pending_;
    }
  }

  __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    while (num_pending_ > 0 && !ptx::barrier_is_past(barrier, parity)) convert_early();
    ptx::barrier_wait(barrier, parity);
  }

  __device__ __forceinline__ void finish() {
    while (num_pending_ > 0) convert_early();
  }

 private:
  static constexpr int kCopyBytes = 32 * kChunkBytes;  // of all lanes

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

  __device__ __forceinline__ void convert_early() {
    ptx::wait_for_copies<0>();
    convert_landed<1>();
  }

  // The oldest stage in the landing ring. Each lane converts what it has copied.
  template <int kUnroll>
  __device__ __forceinline__ void convert_landed() {
    const uint32_t source = landing_ + oldest_ * Dims::kLandingBytes;
    convert<kUnroll>([&](int i) { return ptx::load_shared_16(source + i * kCopyBytes); });
    oldest_ = oldest_ + 1 == kLanding ? 0 : oldest_ + 1;
    --num_pending_;
  }

  // The next stage of the KV ring, kUnroll copies at once. load(i): the 16 bytes of copy i.
  template <int kUnroll, typename Load>
  __device__ __forceinline__ void convert(const Load& load) {
    const int stage = ring_.stage;
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[stage]), ring_.parity ^ 1);
    const uint32_t target =
        ptx::shared_address(storage_.kv[stage]) + (kIsKey ? 0 : Dims::kKeyBytes);
#pragma unroll kUnroll
    for (int i = 0; i < Copy::kCopies; ++i) {
      const uint4 bytes = load(i);
      const uint32_t offset = copy_.stage_offset(i);
      const uint2 words[4] = {
          fp8::convert<T, Dims::kKv>(bytes.x), fp8::convert<T, Dims::kKv>(bytes.y),
          fp8::convert<T, Dims::kKv>(bytes.z), fp8::convert<T, Dims::kKv>(bytes.w)};
      ptx::store_shared_16(target + offset,
                           make_uint4(words[0].x, words[0].y, words[1].x, words[1].y));
      ptx::store_shared_16(target + (offset ^ kChunkBytes),
                           make_uint4(words[2].x, words[2].y, words[3].x, words[3].y));
    }
    if constexpr (kUsesWgmma) ptx::fence_shared_writes();
    ptx::barrier_arrive(ptx::shared_address(&storage_.kv_full[stage]));
    ring_.advance();
  }

  Storage& storage_;
  const Copy copy_;
  const uint32_t slot_bytes_;
  const uint32_t landing_;  // this lane's part of the ring
  const char*
      cache_;  // of the KV head and, where it is always the same, this lane's columns, slot 0
  int oldest_ = 0;
  int newest_ = 0;  // where the next stage lands
  int num_pending_ = 0;
  RingPosition<Storage::kStages> ring_;
};

}  // namespace pat
