// What the bodies of pack_decode share: a consumer warp's place in the rings, and handing back what it has read.
#pragma once

#include "pat/work_queue.cuh"

namespace pat {

template <int kHeadDim>
struct Consumer {
  using Storage = SharedStorage<kHeadDim>;

  Storage& storage;
  RingPosition<Storage::kStages> ring;

  // This warp's position in the query ring, in shared memory from item to item: there is no register to spare.
  __device__ __forceinline__ QueryPosition& position(int warp) const {
    return storage.positions[warp];
  }

  __device__ __forceinline__ const ItemRecord& record(const QueryPosition& position) const {
    return storage.records[position.record()];
  }

  __device__ __forceinline__ void wait_for_queries(const QueryPosition& position) const {
    ptx::barrier_wait(ptx::shared_address(&storage.queries_full[position.record()]),
                      position.item_parity());
  }

  // Address of the next item's queries, a tile of `units` units.
  __device__ __forceinline__ uint32_t queries(const QueryPosition& position, int units) const {
    return ptx::shared_address(storage.queries[position.first_unit(units) % kQueryUnits]);
  }

  // Hands back the item's record and queries. Keeps the targets of this warp's rows for the item's end, again in
  // shared memory.
  __device__ __forceinline__ void release_queries(QueryPosition position, int units, int warp,
                                                  int first_row, uint32_t lane) const {
    if (lane < kUnitRows) {
      storage.row_targets[warp][lane] = record(position).targets[first_row + lane];
    }
    __syncwarp();
    const int first_unit = position.first_unit(units);
    if (lane < units) {
      const int unit = (first_unit + lane) % kQueryUnits;
      ptx::barrier_arrive(ptx::shared_address(&storage.queries_empty[unit]));
    }
    position.advance(units);
    if (lane == 0) storage.positions[warp] = position;
    __syncwarp();
  }

  // Address of the keys of the next stage, once it has arrived; the values follow kOperandBytes behind.
  __device__ __forceinline__ uint32_t wait_for_stage() const {
    ptx::barrier_wait(ptx::shared_address(&storage.kv_full[ring.stage]), ring.parity);
    return ptx::shared_address(storage.kv[ring.stage]);
  }

  __device__ __forceinline__ void release_stage(uint32_t lane) {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&storage.kv_empty[ring.stage]));
    ring.advance();
  }
};

}  // namespace pat
