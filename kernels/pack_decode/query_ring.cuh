// How the V producer fills the query ring: it waits for free units, copies queries into them, and announces them to the
// consumers with the item's record.
#pragma once

#include "decode_params.h"
#include "pack_decode/work_queue.cuh"

namespace pat {

template <typename Dims>
using QueryCopy = RowCopy<Dims::kKey * 2>;

// Waits until a unit is free. Returns the barrier at which the unit's readers arrive.
template <typename Storage>
__device__ __forceinline__ uint32_t wait_for_unit(Storage& storage, int unit) {
  const uint32_t empty = ptx::shared_address(&storage.queries_empty[unit % kQueryUnits]);
  ptx::barrier_wait(empty, ((unit / kQueryUnits) & 1) ^ 1);
  return empty;
}

// Waits until the units [position.next_unit, end_unit) are free. The item skips the units before first_unit, so no
// consumer will release them. The producer releases them at once, in place of the consumers, because the item's last
// rows may need a skipped unit again, one lap of the ring later.
template <typename Dims>
__device__ __forceinline__ void wait_for_units(SharedStorage<Dims>& storage,
                                               const QueryPosition& position, int first_unit,
                                               int end_unit) {
  for (int unit = position.next_unit; unit < end_unit; ++unit) {
    const uint32_t empty = wait_for_unit(storage, unit);
    for (int warp = 0; unit < first_unit && warp < kAllConsumerWarps<Dims>; ++warp) {
      ptx::barrier_arrive(empty);
    }
  }
}

// Copies query rows [first_row, first_row + 16). lane_chunk: in lane l, the chunk of q at which the row r with r % 32
// == l begins.
template <typename Dims>
__device__ __forceinline__ void copy_queries(const DecodeParams& params,
                                             SharedStorage<Dims>& storage,
                                             const QueryCopy<Dims>& copy, int first_unit,
                                             int tile_rows, int first_row, int num_rows,
                                             uint32_t lane_chunk) {
  const uint32_t target = query_tile(storage, first_unit);
  const char* queries = static_cast<const char*>(params.q.data);
  if constexpr (Dims::kIsWide) {
    const PanelCopy panels{copy.lane};
#pragma unroll
    for (int i = 0; i < PanelCopy::kCopies * kUnitRows / kStageTokens; ++i) {
      const int row = first_row + panels.row(i);
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, row % 32);
      const bool valid = row < num_rows;
      const char* source = queries + uint64_t{valid ? chunk : 0} * kChunkBytes + panels.source();
#pragma unroll
      for (int panel = 0; panel < Dims::kQueryPanels; ++panel) {
        ptx::copy_async_16_or_zero(
            target + (panel * tile_rows + first_row) * kPanelRowBytes + panels.target(i),
            source + panel * kPanelRowBytes, valid);
      }
    }
  } else {
    if constexpr (QueryCopy<Dims>::kWholeRows) queries += copy.chunk(0) * kChunkBytes;
#pragma unroll
    for (int i = 0; i < QueryCopy<Dims>::copies(kUnitRows); ++i) {
      const int row = first_row + copy.row(i);
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, row % 32);
      const bool valid = row < num_rows;
      const char* source = queries + uint64_t{valid ? chunk : 0} * kChunkBytes;
      if constexpr (!QueryCopy<Dims>::kWholeRows) source += copy.chunk(i) * kChunkBytes;
      ptx::copy_async_16_or_zero(target + swizzled_offset(tile_rows, row, copy.chunk(i)), source,
                                 valid);
    }
  }
}

// Announces the item to the consumers. All lanes call it after they have written the record and issued the copies.
template <typename Storage>
__device__ __forceinline__ void release_record(Storage& storage, const QueryPosition& position,
                                               int lane) {
  const uint32_t full = ptx::shared_address(&storage.queries_full[position.record()]);
  ptx::barrier_arrive_after_copies(full);
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(full);
}

}  // namespace pat
