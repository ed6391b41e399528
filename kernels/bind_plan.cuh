// bind_plan: runs when a plan is loaded, and again when its requests have moved to other rows; not in every layer.
// Writes into each work item where its slots begin, so that pack_decode need not look up rows. For a new plan it also
// copies the slots of the shared KV ranges out of req_to_token into the plan's slot buffer, because the row they come
// from may be rewritten while steps with this plan are in flight.
#pragma once

#include "pat/decode_params.h"
#include "pat/index_array.cuh"

namespace pat {

inline constexpr int kBindThreads = 256;

__device__ __forceinline__ const int32_t* row_of(const BindParams& params, int request) {
  const int64_t row = load_index(params.req_pool_indices, request);
  return params.req_to_token + row * params.req_to_token_stride;
}

__device__ __forceinline__ void bind_items(const BindParams& params) {
  const int first = (blockIdx.y * gridDim.x + blockIdx.x) * kBindThreads + threadIdx.x;
  const int step = gridDim.y * gridDim.x * kBindThreads;
  for (int i = first; i < params.header->num_work_items; i += step) {
    WorkItem& item = params.work_items[i];
    const int32_t* slots =
        item.kv_request == kSharedKv ? params.shared_slots : row_of(params, item.kv_request);
    item.slots = slots + item.kv_begin;
  }
  if (first == 0) params.header->row_width = params.row_width;
}

// Spans along x, chunks of a span along y; both strided, so that any grid is right.
__device__ __forceinline__ void gather_slots(const BindParams& params) {
  for (int i = blockIdx.x; i < params.header->num_gather_spans; i += gridDim.x) {
    const GatherSpan span = params.gather_spans[i];
    const int32_t* source = row_of(params, span.request) + span.kv_begin;
    int32_t* target = params.shared_slots + span.slot_begin;
    for (int token = blockIdx.y * kBindThreads + threadIdx.x; token < span.num_tokens;
         token += gridDim.y * kBindThreads) {
      target[token] = source[token];
    }
  }
}

__global__ void __launch_bounds__(kBindThreads)
    bind_plan_kernel(const __grid_constant__ BindParams params) {
  bind_items(params);
  if (params.gather) gather_slots(params);
}

}  // namespace pat
