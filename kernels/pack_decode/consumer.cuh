// What the bodies of pack_decode have in common: a consumer warp's position in the rings, and how it releases what it
// has read. If lanes have read the data, every lane arrives at the barrier for its own reads, so the order in which the
// lanes of a warp run does not matter. If wgmma has read the data, one lane arrives for its whole warp.
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

  // unit(): which 16 rows of the tile this warp computes. first_column(): the first output column of its warpgroup.
  __device__ __forceinline__ int unit() const { return warp % kConsumerWarps; }
  __device__ __forceinline__ int first_column() const {
    return kConsumerGroups<Dims> == 1 ? 0 : warp / kConsumerWarps * kOutColumns<Dims>;
  }

  __device__ __forceinline__ const ItemRecord& record() const {
    return storage.records[position.record()];
  }

  // Waits for the next item's record and queries. Returns false if no item is left.
  __device__ __forceinline__ bool wait_for_item() const {
    ptx::barrier_wait(ptx::shared_address(&storage.queries_full[position.record()]),
                      position.item_parity());
    // The shuffle tells ptxas that the value is uniform. ptxas serialises wgmma if warps may diverge.
    return __shfl_sync(kFullWarp, record().tile, 0) != kNoMoreItems;
  }

  // Address of the next item's queries. `units`: query units of the item's tile.
  __device__ __forceinline__ uint32_t queries(int units) const {
    return query_tile(storage, position.first_unit(units));
  }

  // Releases the item's record and queries to the producer. First copies some fields of the record to the warp's own
  // shared memory: the warp needs them at the end of the item, and no register is free for them.
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

  // Both functions wait for the next stage and return the address of its keys. wait_for_stage() waits until the stage
  // has arrived, wait_for_wgmma_stage() until wgmma may read it.
  __device__ __forceinline__ uint32_t wait_for_stage() const {
    return wait_for_stage(storage.kv_full, ring);
  }
  __device__ __forceinline__ uint32_t wait_for_wgmma_stage() const {
    // Waits for kv_full first, because kv_ready alone is ambiguous. Consumers of small tiles do not wait for the
    // converters, so when this item begins, the converters may be a whole lap late. The last completed phase of
    // kv_ready would then be that of two laps ago, which has the same parity as this lap's phase. After the wait for
    // kv_full this cannot be: a stage is filled again only after the converters have finished its previous lap.
    if constexpr (kHasConverters<Dims>) wait_for_stage();
    return wait_for_wgmma_stage(ring);
  }

  // The record of the stage for which the warp has waited.
  __device__ __forceinline__ StageRecord stage_record() const { return stage_record(ring); }

  // Waits for the values of the stage. Needed only for wide rows, because their values have their own barriers.
  __device__ __forceinline__ void wait_for_values() const {
    if constexpr (Dims::kIsWide) {
      wait_for_stage(storage.values_full, ring);
      ptx::fence_shared_memory();
    }
  }

  // Like wait_for_wgmma_stage() and stage_record(), for the stage after the current one.
  __device__ __forceinline__ uint32_t wait_for_following_wgmma_stage() const {
    return wait_for_wgmma_stage(following());
  }
  __device__ __forceinline__ StageRecord following_stage_record() const {
    return stage_record(following());
  }

  // Releases the stage. Each lane calls it after it has read the stage.
  __device__ __forceinline__ void release_stage() {
    ptx::barrier_arrive(ptx::shared_address(&storage.kv_empty[ring.stage]));
    ring.advance();
  }

  // Releases the stage after wgmma has read it. With wide rows, releases only the values: release_keys() has already
  // released the keys.
  __device__ __forceinline__ void release_wgmma_stage() {
    hand_back(Dims::kIsWide ? storage.values_empty : storage.kv_empty, ring);
    ring.advance();
  }

  // Release the keys of the stage, or of the following stage, after wgmma has read them. Needed only for wide rows.
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

  // Broadcasts the record that lane 0 has read, so that ptxas knows that the record is uniform. A second reason: lane 0
  // may release the stage for its whole warp, and a lane that then read the record itself could get that of a later
  // stage.
  __device__ __forceinline__ StageRecord
  stage_record(const RingPosition<Storage::kStages>& at) const {
    // If all lanes load the same word, ptxas drops the shuffle. With narrower rows, the shuffles of the softmax then
    // order the lanes' reads before the release. With wide rows, the release comes before the softmax.
    const bool reads = !Dims::kIsWide || threadIdx.x % 32 == 0;
    return {__shfl_sync(kFullWarp, reads ? storage.stage_records[at.stage].packed : 0, 0)};
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
