// Work items as the producer warps of pack_decode hold them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pat/decode_params.h"
#include "pat/index_array.cuh"
#include "pat/work_queue.cuh"

namespace pat {

// A WorkItem in registers. Its slots can be read before its length is known, so that neither waits for the other.
struct ItemSource {
  const int32_t* slots;  // of the range's first token
  int32_t kv_request;
  int32_t kv_begin;
  int32_t kv_end;  // kOpenEnd until load_end
  int32_t tile;
  int32_t num_requests;
  int32_t request_begin;

  // An item that no one executes, as the successor of the last.
  __device__ static ItemSource none() { return {}; }

  __device__ __forceinline__ static ItemSource load(const DecodeParams& params, int index) {
    static_assert(sizeof(WorkItem) == 2 * sizeof(int4) && offsetof(WorkItem, slots) == 24);
    const auto* item = reinterpret_cast<const int4*>(params.plan.work_items + index);
    const int4 head = item[0], range = item[1];
    const uint64_t slots = static_cast<uint32_t>(range.z) | static_cast<uint64_t>(range.w) << 32;
    return {.slots = reinterpret_cast<const int32_t*>(slots),
            .kv_request = head.w,
            .kv_begin = range.x,
            .kv_end = range.y,
            .tile = head.x,
            .num_requests = head.y,
            .request_begin = head.z};
  }

  __device__ ItemSource of_lane(int lane) const {
    return {.slots = reinterpret_cast<const int32_t*>(
                __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(slots), lane)),
            .kv_request = __shfl_sync(kFullWarp, kv_request, lane),
            .kv_begin = __shfl_sync(kFullWarp, kv_begin, lane),
            .kv_end = __shfl_sync(kFullWarp, kv_end, lane),
            .tile = __shfl_sync(kFullWarp, tile, lane),
            .num_requests = __shfl_sync(kFullWarp, num_requests, lane),
            .request_begin = __shfl_sync(kFullWarp, request_begin, lane)};
  }

  // Slots that there are to read, before load_end: those of an open range up to the end of its row. Behind its length
  // they are of no use.
  __device__ __forceinline__ int num_slots(int row_width) const {
    return (kv_end == kOpenEnd ? row_width : kv_end) - kv_begin;
  }

  // Has the end of an open range on its way.
  __device__ __forceinline__ void load_end(const DecodeParams& params) {
    if (kv_end == kOpenEnd) kv_end = load_index(params.seq_lens, kv_request);
  }

  // After load_end, which this waits for.
  __device__ __forceinline__ int num_tokens() const { return max(kv_end - kv_begin, 0); }
};

}  // namespace pat
