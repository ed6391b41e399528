// Host launchers. All launch on `stream`, never synchronise, and depend on nothing but their arguments, so that
// every one of them can be captured in a CUDA graph. The element type is the one this library was compiled for.
#pragma once

#include <cuda_runtime_api.h>

#include "decode_params.h"

namespace pat {

cudaError_t launch_gather_slots(const GatherParams& params, cudaStream_t stream);
// As many CTAs as the device holds at once: count_decode_ctas().
cudaError_t launch_pack_decode(const DecodeParams& params, cudaStream_t stream);
// Must follow pack_decode, unless no request of the plan has more than one partial.
cudaError_t launch_merge_partials(const DecodeParams& params, cudaStream_t stream);

// CTAs of pack_decode that run at the same time on the present device.
cudaError_t count_decode_ctas(int* count);

}  // namespace pat
