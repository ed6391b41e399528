// The asynchronous copies by which a producer warp fills the KV ring with keys or with values.
#pragma once

#include <type_traits>

#include "decode_params.h"
#include "pack_decode/work_queue.cuh"

namespace pat {

// How a stage is copied. kWhole: all tokens. kWholeOnce: all tokens, with the hint to evict them from the L2 first.
// kPart: only the first num_tokens tokens.
enum class StageCopy { kWhole, kWholeOnce, kPart };

// Issues the copies of the keys or the values of one stage. With kPart, zeroes the rows from num_tokens on, because a
// probability of 0 times leftover data could be NaN.
template <int kRowBytes, StageCopy kKind>
__device__ __forceinline__ void copy_stage(uint32_t shared, const char* cache, uint32_t slot_bytes,
                                           int32_t lane_slot, int num_tokens,
                                           const RowCopy<kRowBytes>& copy) {
  using Copy = RowCopy<kRowBytes>;
  uint32_t offsets[Copy::kPeriod];
#pragma unroll
  for (int i = 0; i < Copy::kPeriod; ++i) {
    offsets[i] = shared + swizzled_offset(kStageTokens, copy.row(i), copy.chunk(i));
  }
  // 32 bits are enough: cuda.py ensures that the keys or the values of a pool have fewer than 2^32 chunks.
  const uint32_t lane_chunk = static_cast<uint32_t>(lane_slot) * (slot_bytes / kChunkBytes);
#pragma unroll
  for (int i = 0; i < Copy::copies(kStageTokens); ++i) {
    const int token = copy.row(i);
    const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, token);
    const char* source = cache + uint64_t{chunk} * kChunkBytes;
    if constexpr (!Copy::kWholeRows) source += copy.chunk(i) * kChunkBytes;
    const uint32_t target =
        offsets[i % Copy::kPeriod] + i / Copy::kPeriod * Copy::kPeriodRows * kPanelRowBytes;
    if constexpr (kKind == StageCopy::kWhole) {
      ptx::copy_async_16(target, source);
    } else if constexpr (kKind == StageCopy::kWholeOnce) {
      ptx::copy_async_16(target, source, ptx::evict_first());
    } else {
      ptx::copy_async_16_or_zero(target, source, token < num_tokens);
    }
  }
}

// The cache addresses of 32 rows, which a warp copies panel by panel.
struct PanelSources {
  const char* rows[PanelCopy::kCopies];  // this lane's chunk in each row that the lane copies

  // cache: address of the KV head's row in slot 0. lane_slot: the slot of row `lane`.
  __device__ __forceinline__ PanelSources(const char* cache, uint32_t slot_bytes, int32_t lane_slot,
                                          const PanelCopy& copy) {
#pragma unroll
    for (int i = 0; i < PanelCopy::kCopies; ++i) {
      const uint32_t slot = __shfl_sync(kFullWarp, lane_slot, copy.row(i));
      rows[i] = cache + copy.source() + static_cast<uint64_t>(slot) * slot_bytes;
    }
  }

  // Copies one panel. With kPart, zeroes the rows from num_tokens on, because a probability of 0 times leftover data
  // could be NaN.
  template <StageCopy kKind>
  __device__ __forceinline__ void copy_panel(uint32_t shared, int panel, int num_tokens,
                                             const PanelCopy& copy) const {
#pragma unroll
    for (int i = 0; i < PanelCopy::kCopies; ++i) {
      const uint32_t to = shared + copy.target(i);
      const char* from = rows[i] + panel * kPanelRowBytes;
      if constexpr (kKind == StageCopy::kWhole) {
        ptx::copy_async_16(to, from);
      } else if constexpr (kKind == StageCopy::kWholeOnce) {
        ptx::copy_async_16(to, from, ptx::evict_first());
      } else {
        ptx::copy_async_16_or_zero(to, from, copy.row(i) < num_tokens);
      }
    }
  }
};

// Fills the KV ring, stage by stage, with keys (kIsKey) or with values.
template <typename Dims, bool kIsKey>
class KvStages {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr int kRowBytes = (kIsKey ? Dims::kKey : Dims::kValue) * Dims::kElementBytes;
  static constexpr bool kByPanels = Dims::kIsWide;
  using Copy = std::conditional_t<kByPanels, PanelCopy, RowCopy<kRowBytes>>;

  __device__ KvStages(const DecodeParams& params, Storage& storage, int lane)
      : storage_(storage),
        lane_(lane),
        copy_{lane},
        slot_bytes_(kIsKey ? params.k_slot_bytes : params.v_slot_bytes) {}

  // Sets the KV head for the next stages.
  __device__ __forceinline__ void set_head(const DecodeParams& params, int kv_head) {
    has_map_ = params.has_kv_maps;
    map_ = &params.kv_maps[kIsKey ? 0 : 1];
    first_byte_ = kv_head * kRowBytes;
    const void* base = kIsKey ? params.k_cache : params.v_cache;
    cache_ = static_cast<const char*>(base) + first_byte_;
    if constexpr (!kByPanels && RowCopy<kRowBytes>::kWholeRows) {
      cache_ += copy_.chunk(0) * kChunkBytes;
    }
  }

  // streams: whether KV that only one work item reads is copied as kWholeOnce.
  __device__ __forceinline__ void set_streams(bool streams) { streams_ = streams; }

  // Fills the next stage. lane_slot: the slot of the stage's token `lane`.
  __device__ __forceinline__ void fill(int32_t lane_slot, const StageRecord& record) {
    const uint32_t full = begin(record);
    const uint32_t target =
        ptx::shared_address(storage_.kv[ring_.stage]) + (kIsKey ? 0 : kLandingOffset<Dims>);
    const int num_tokens = record.num_tokens();
    const bool is_read_once = streams_ && record.is_read_once();
    if constexpr (kHasTma && kRowBytes % kPanelRowBytes == 0) {
      const int32_t first_slot = __shfl_sync(kFullWarp, lane_slot, 0);
      if (has_map_ && num_tokens == kStageTokens &&
          __all_sync(kFullWarp, lane_slot == first_slot + lane_)) {
        copy_run(target, first_slot, full, is_read_once);
        ring_.advance();
        return;
      }
    }
    if (num_tokens < kStageTokens) {
      copy<StageCopy::kPart>(target, lane_slot, num_tokens);
    } else if (is_read_once) {
      copy<StageCopy::kWholeOnce>(target, lane_slot, num_tokens);
    } else {
      copy<StageCopy::kWhole>(target, lane_slot, num_tokens);
    }
    ptx::barrier_arrive_after_copies(full);
    ring_.advance();
  }

  // Marks the end after the last stage. The converters need the mark, because they do not know the items.
  __device__ __forceinline__ void end() { ptx::barrier_arrive(begin(StageRecord::end())); }

 private:
  template <StageCopy kKind>
  __device__ __forceinline__ void copy(uint32_t target, int32_t lane_slot, int num_tokens) const {
    if constexpr (kByPanels) {
      const PanelSources sources(cache_, slot_bytes_, lane_slot, copy_);
#pragma unroll
      for (int panel = 0; panel < kRowBytes / kPanelRowBytes; ++panel) {
        sources.copy_panel<kKind>(target + panel * kStageTokens * kPanelRowBytes, panel, num_tokens,
                                  copy_);
      }
    } else {
      copy_stage<kRowBytes, kKind>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    }
  }

  // Copies a stage of consecutive slots, with one TMA copy per panel.
  __device__ __forceinline__ void copy_run(uint32_t target, int32_t first_slot, uint32_t full,
                                           bool is_read_once) {
    if (lane_ == 0) {
      ptx::barrier_expect(full, kStageTokens * kRowBytes);
#pragma unroll
      for (int panel = 0; panel < kRowBytes / kPanelRowBytes; ++panel) {
        const uint32_t box = target + panel * kStageTokens * kPanelRowBytes;
        const int column = first_byte_ + panel * kPanelRowBytes;
        if (is_read_once) {
          ptx::copy_box(box, map_, column, first_slot, full, ptx::evict_first());
        } else {
          ptx::copy_box(box, map_, column, first_slot, full);
        }
      }
      ptx::barrier_arrive_for<32>(full);
    }
    __syncwarp();
  }

  // Waits until the next stage may be filled. The K producer also stores the stage's record. Returns the barrier for
  // the stage's copies.
  __device__ __forceinline__ uint32_t begin(const StageRecord& record) {
    const int stage = ring_.stage;
    constexpr bool kIsAlone = Dims::kIsWide && !kIsKey;
    const uint64_t* barriers = kIsAlone ? storage_.values_full : storage_.kv_full;
    const uint64_t* empty = kIsAlone ? storage_.values_empty : storage_.kv_empty;
    const uint32_t full = ptx::shared_address(&barriers[stage]);
    ptx::barrier_wait(ptx::shared_address(&empty[stage]), ring_.parity ^ 1);
    if constexpr (kIsKey) {
      ptx::store_and_arrive(ptx::shared_address(&storage_.stage_records[stage]), record.packed,
                            full, lane_ == 0);
    }
    return full;
  }

  Storage& storage_;
  const int lane_;
  const Copy copy_;
  const uint32_t slot_bytes_;
  bool streams_ = false;
  bool has_map_ = false;
  const TensorMap* map_;
  int32_t first_byte_;  // offset of the KV head's row in a slot
  const char* cache_;   // the KV head's row in slot 0; see set_head()
  RingPosition<Storage::kStages> ring_;
};

}  // namespace pat
