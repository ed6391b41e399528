// What a producer warp's walk (producer.cuh) reads and makes: work items, one per lane, and batches of stages.
#pragma once

#include "decode_params.h"
#include "pack_decode/work_queue.cuh"

namespace pat {

// The fields of a work item that a producer needs. Each lane holds one item.
struct ItemSource {
  int32_t tile;
  int32_t num_requests;
  int32_t request_begin;
  int32_t num_segments;

  __device__ static ItemSource load(const DecodeParams& params, int index) {
    const WorkItem& item = params.plan.work_items[index];
    const int4 head = reinterpret_cast<const int4*>(&item)[0];
    return {head.x, head.y, head.z, item.num_segments};
  }

  __device__ __forceinline__ ItemSource of_lane(int lane) const {
    return {.tile = __shfl_sync(kFullWarp, tile, lane),
            .num_requests = __shfl_sync(kFullWarp, num_requests, lane),
            .request_begin = __shfl_sync(kFullWarp, request_begin, lane),
            .num_segments = __shfl_sync(kFullWarp, num_segments, lane)};
  }
};

// Up to 4 consecutive stages of an item, or of a pass of an item. They may belong to several segments.
struct StageBatch {
  static constexpr int kStages = 4;

  int32_t slots[kStages];        // lane l: the slot of token l of each stage
  StageRecord records[kStages];  // record of each stage
  int count = 0;                 // number of stages; 0 if no item is left
  bool begins_pass = false;

  __device__ __forceinline__ int32_t pop_front() {
    const int32_t front = slots[0];
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) {
      slots[i] = slots[i + 1];
      records[i] = records[i + 1];
    }
    return front;
  }
};

}  // namespace pat
