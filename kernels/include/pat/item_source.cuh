// Work items as the producer warps of pack_decode hold them: as planned, and resolved against rows and live lengths.
#pragma once

#include "pat/decode_params.h"
#include "pat/index_array.cuh"
#include "pat/work_queue.cuh"

namespace pat {

// Whose tokens an item reads, and for which requests.
struct ItemSource {
  const int32_t* slots;  // of the range's first token
  int32_t num_tokens;
  int32_t tile;
  int32_t num_requests;
  int32_t request_begin;

  // An item that no one executes, as the successor of the last.
  __device__ static ItemSource none() { return {nullptr, 0, 0, 0, 0}; }

  __device__ ItemSource of_lane(int lane) const {
    return {.slots = reinterpret_cast<const int32_t*>(
                __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(slots), lane)),
            .num_tokens = __shfl_sync(kFullWarp, num_tokens, lane),
            .tile = __shfl_sync(kFullWarp, tile, lane),
            .num_requests = __shfl_sync(kFullWarp, num_requests, lane),
            .request_begin = __shfl_sync(kFullWarp, request_begin, lane)};
  }
};

// A WorkItem in registers. Loading it is one step, resolving it the next: what lies between them is not held up.
struct PlannedItem {
  int4 head;   // tile, num_requests, request_begin, kv_request
  int2 range;  // kv_begin, kv_end

  __device__ __forceinline__ static PlannedItem load(const DecodeParams& params, int index) {
    const WorkItem& item = params.plan.work_items[index];
    return {.head = reinterpret_cast<const int4*>(&item)[0],
            .range = reinterpret_cast<const int2*>(&item)[2]};
  }

  // Loads row and length even where they are not needed: without a branch, neither waits for the other.
  __device__ __forceinline__ ItemSource resolve(const DecodeParams& params) const {
    const bool is_shared = head.w == kSharedKv;
    const int kv_request = is_shared ? 0 : head.w;
    const int64_t row = load_index(params.req_pool_indices, kv_request);
    const int32_t length = load_index(params.seq_lens, kv_request);
    const int32_t* slots =
        is_shared ? params.shared_slots : params.req_to_token + row * params.req_to_token_stride;
    return {.slots = slots + range.x,
            .num_tokens = max((range.y == kOpenEnd ? length : range.y) - range.x, 0),
            .tile = head.x,
            .num_requests = head.y,
            .request_begin = head.z};
  }
};

}  // namespace pat
