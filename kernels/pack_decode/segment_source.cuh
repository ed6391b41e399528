// Finds where a segment's KV lies in this step.
#pragma once

#include "decode_params.h"
#include "index_array.cuh"
#include "pack_decode/work_queue.cuh"

namespace pat {

// Where a segment's KV lies in this step, and how many tokens it has.
struct SegmentSource {
  const int32_t* slots;  // slots of the segment, from its first token on
  int32_t num_tokens;    // the segment is empty if <= 0
  int32_t requests;      // KvSegment::requests

  __device__ static SegmentSource load(const DecodeParams& params, int index) {
    return resolve(params, read(params, index));
  }

  // Returns KvSegment `index` of the plan as four words.
  __device__ static int4 read(const DecodeParams& params, int index) {
    return reinterpret_cast<const int4*>(params.plan.kv_segments)[index];
  }

  __device__ static SegmentSource resolve(const DecodeParams& params, const int4& segment) {
    const int kv_request = segment.x, kv_begin = segment.y, kv_end = segment.z;
    SegmentSource source{.slots = params.shared_slots + kv_begin,
                         .num_tokens = kv_end - kv_begin,
                         .requests = segment.w};
    if (kv_request != kSharedKv) {
      const int64_t row = load_index(params.req_pool_indices, kv_request);
      source.slots = params.req_to_token + row * params.req_to_token_stride + kv_begin;
      if (kv_end == kOpenEnd) {
        const int64_t length = load_index(params.seq_lens, kv_request);
        source.num_tokens =
            static_cast<int32_t>(min(length, int64_t{params.table_width})) - kv_begin;
      }
    }
    return source;
  }

  // True if request `request` of the item attends to the segment.
  __device__ __forceinline__ bool counts_for(int request) const {
    return request >= first_request() && request < end_request();
  }
  __device__ __forceinline__ int first_request() const { return segment().first_request(); }
  __device__ __forceinline__ int end_request() const { return segment().end_request(); }
  __device__ __forceinline__ bool is_read_once() const { return segment().is_read_once(); }

  // Broadcasts the slots that lane `lane` holds.
  __device__ __forceinline__ const int32_t* slots_of_lane(int lane) const {
    return reinterpret_cast<const int32_t*>(
        __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(slots), lane));
  }

 private:
  __device__ __forceinline__ KvSegment segment() const { return {.requests = requests}; }
};

}  // namespace pat
