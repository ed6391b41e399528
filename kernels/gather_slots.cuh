// gather_slots: copies the slots of the shared KV ranges from req_to_token into the plan's slot buffer. It runs only
// once per plan: later steps with the plan read the copy, because rows of req_to_token may have been rewritten by then.
#pragma once

#include "decode_params.h"
#include "index_array.cuh"

namespace pat {

inline constexpr int kGatherThreads = 256;

// Runs with kGatherThreads threads. The grid has spans along x and chunks of a span along y. The loops over spans and
// over tokens are grid-stride loops, so any grid size is correct.
__device__ __forceinline__ void gather_slots(const GatherParams& params) {
  const int num_spans = params.plan.header->num_gather_spans;
  for (int i = blockIdx.x; i < num_spans; i += gridDim.x) {
    const GatherSpan span = params.plan.gather_spans[i];
    const int64_t row = load_index(params.req_pool_indices, span.request);
    const int32_t* source = params.req_to_token + row * params.req_to_token_stride + span.kv_begin;
    int32_t* target = params.shared_slots + span.slot_begin;
    for (int token = blockIdx.y * kGatherThreads + threadIdx.x; token < span.num_tokens;
         token += gridDim.y * kGatherThreads) {
      target[token] = source[token];
    }
  }
}

}  // namespace pat
