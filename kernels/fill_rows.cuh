// fill_rows: writes the slot rows for layers with a sliding window. A row lists the slots of the tokens in a request's
// window: first the tokens from the cut on, then those before the cut (scheduler/window_cut.h). A window changes with
// every token, so the kernel runs once per step, before the layers.
#pragma once

#include "decode_params.h"
#include "index_array.cuh"

namespace pat {

inline constexpr int kFillThreads = 256;

// Runs with kFillThreads threads. The grid has requests along x and chunks of a row along y. The loops over requests
// and over columns are grid-stride loops, so any grid size is correct.
__device__ __forceinline__ void fill_rows(const FillParams& params) {
  const bool has_map = params.slot_map.data != nullptr;
  for (int i = blockIdx.x; i < params.num_requests; i += gridDim.x) {
    const int64_t on_device = load_index(params.seq_lens, i);
    const auto length = static_cast<int32_t>(min(on_device, int64_t{params.table_width}));
    const int32_t in_window = params.chunked && length > 0 ? (length - 1) % params.window + 1
                                                           : min(length, params.window);
    const int32_t cut = params.cuts[i], window_begin = length - in_window;
    const int32_t first = cut > window_begin ? cut : window_begin;
    const int64_t row = load_index(params.req_pool_indices, i);
    const int32_t* source = params.req_to_token + row * params.req_to_token_stride;
    int32_t* target = params.rows + int64_t{i} * params.window;
    for (int32_t column = blockIdx.y * kFillThreads + threadIdx.x; column < in_window;
         column += gridDim.y * kFillThreads) {
      const int32_t position = first + column;
      const int32_t slot = source[position < length ? position : position - in_window];
      target[column] = has_map ? static_cast<int32_t>(load_index(params.slot_map, slot)) : slot;
    }
    if (blockIdx.y == 0 && threadIdx.x == 0) params.row_lens[i] = in_window;
  }
}

}  // namespace pat
