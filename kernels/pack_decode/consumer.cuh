// Common part of the bodies of pack_decode: a consumer warp's place in the rings, and how it hands back what it has
// read. Every lane arrives for its own reads, so the order in which the lanes of a warp run does not matter. Where
// matrix instructions of the warpgroup read, one lane arrives for its whole warp.
#pragma once

#include "pack_decode/work_queue.cuh"
#include "scales.cuh"

namespace pat {

template <typename Dims>
struct Consumer {
  using Storage = SharedStorage<Dims>;

  Storage& storage;
  const int warp;
  const KvScales<Dims::kIsFp8> scales;
  QueryPosition position;
  RingPosition<Storage::kStages> ring;

  // The unit of 16 rows that this warp has, and the first column of the values that its warpgroup has.
  __device__ __forceinline__ int unit() const { return warp % kConsumerWarps; }
  __device__ __forceinline__ int first_column() const {
    return kConsumerGroups<Dims> == 1 ? 0 : warp / kConsumerWarps * kOutColumns<Dims>;
  }

  __device__ __forceinline__ const ItemRecord& record() const {
    return storage.records[position.record()];
  }

  // Waits for the next item's record and queries. Returns false if there is none.
  __device__ __forceinline__ bool wait_for_item() const {
    ptx::barrier_wait(ptx::shared_address(&storage.queries_full[position.record()]),
                      position.item_parity());
    // The shuffle tells ptxas that the value is uniform. ptxas serialises wgmma if warps may diverge.
    return __shfl_sync(kFullWarp, record().tile, 0) != kNoMoreItems;
  }

  // Address of the next item's queries, a tile of `units` units.
  __device__ __forceinline__ uint32_t queries(int units) const {
    return query_tile(storage, position.first_unit(units));
  }

  // Hands the item's record and queries back to the producer. Before that, copies the fields that the warp needs at the
  // end of the item to its own shared memory, because no register is free for them.
  __device__ __forceinline__ void release_queries(int units, int first_row, uint32_t lane) {
    if (lane < kUnitRows) storage.row_targets[warp][lane] = record().targets[first_row + lane];
    if (lane == 0) storage.mixed_items[warp] = record().mixed_item;
    __syncwarp();
    const int first_unit = position.first_unit(units);
    for (int unit = first_unit; unit < first_unit + units; ++unit) {
      ptx::barrier_arrive(ptx::shared_address(&storage.queries_empty[unit % kQueryUnits]));
    }
    position.advance(units);
  }

  // Both wait for the next stage and return the address of its keys. The first waits until the stage has arrived, the
  // second until wgmma may read it.
  __device__ __forceinline__ uint32_t wait_for_stage() const {
    return wait_for_stage(storage.kv_full, ring);
  }
  __device__ __forceinline__ uint32_t wait_for_wgmma_stage() const {
    // This is the first stage of an item. Small tiles do not wait for the converters, so after such tiles the
    // converters may be a whole ring late. The phase of kv_ready that completed last is then that of two laps ago,
    // which has the parity of this lap. Waiting for kv_full first is enough: a stage is filled again only after the
    // converters have arrived for the stage's previous lap.
    if constexpr (kHasConverters<Dims>) wait_for_stage();
    return wait_for_wgmma_stage(ring);
  }

  // The record of the stage that was waited for.
  __device__ __forceinline__ StageRecord stage_record() const { return stage_record(ring); }

  // Waits for the values of the same stage, if they have barriers of their own.
  __device__ __forceinline__ void wait_for_values() const {
    if constexpr (Dims::kIsWide) {
      wait_for_stage(storage.values_full, ring);
      ptx::fence_shared_memory();
    }
  }

  // The next two functions wait for the stage after the present one, and return its record.
  __device__ __forceinline__ uint32_t wait_for_following_wgmma_stage() const {
    return wait_for_wgmma_stage(following());
  }
  __device__ __forceinline__ StageRecord following_stage_record() const {
    return stage_record(following());
  }

  // Hands the stage back. Each lane calls it after it has read the stage.
  __device__ __forceinline__ void release_stage() {
    ptx::barrier_arrive(ptx::shared_address(&storage.kv_empty[ring.stage]));
    ring.advance();
  }

  // Hands the stage back after wgmma has read it. If values have barriers of their own, hands back only the values.
  __device__ __forceinline__ void release_wgmma_stage() {
    hand_back(Dims::kIsWide ? storage.values_empty : storage.kv_empty, ring);
    ring.advance();
  }

  // If keys have barriers of their own, hand back the keys of the stage, or of the following stage, after wgmma has
  // read them.
  __device__ __forceinline__ void release_keys() const {
    if constexpr (Dims::kIsWide) hand_back(storage.kv_empty, ring);
  }
  __device__ __forceinline__ void release_following_keys() const {
    if constexpr (Dims::kIsWide) hand_back(storage.kv_empty, following());
  }

 private:
  __device__ __forceinline__ RingPosition<Storage::kStages> following() const {
    RingPosition<Storage::kStages> position_behind = ring;
    position_behind.advance();
    return position_behind;
  }

  __device__ __forceinline__ void hand_back(const uint64_t* barriers,
                                            const RingPosition<Storage::kStages>& at) const {
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_arrive_for<kStageArrivals<Dims>>(ptx::shared_address(&barriers[at.stage]));
    }
  }

  // All lanes take the record that lane 0 has read, so that ptxas knows that it is uniform. Lane 0 is also the lane
  // that hands the stage back.
  __device__ __forceinline__ StageRecord
  stage_record(const RingPosition<Storage::kStages>& at) const {
    return {__shfl_sync(kFullWarp, storage.stage_records[at.stage].packed, 0)};
  }

  __device__ __forceinline__ uint32_t
  wait_for_stage(const uint64_t* barriers, const RingPosition<Storage::kStages>& at) const {
    ptx::barrier_wait(ptx::shared_address(&barriers[at.stage]), at.parity);
    return ptx::shared_address(storage.kv[at.stage]);
  }
  __device__ __forceinline__ uint32_t
  wait_for_wgmma_stage(const RingPosition<Storage::kStages>& at) const {
    if constexpr (kHasConverters<Dims>) return wait_for_stage(storage.kv_ready, at);
    return wait_for_stage(storage.kv_full, at);
  }
};

}  // namespace pat
