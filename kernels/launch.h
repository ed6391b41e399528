// Host launchers. All launch on `stream`, never synchronise, and depend on nothing but their arguments, so that
// every one of them can be captured in a CUDA graph. The element type is the one this library was compiled for.
#pragma once

#include <cuda_runtime_api.h>

#include "pat/decode_params.h"

namespace pat {

cudaError_t launch_gather_slots(const GatherParams& params, cudaStream_t stream);
// num_ctas: num_workers * num_kv_heads of the plan.
cudaError_t launch_pack_decode(const DecodeParams& params, int num_ctas, cudaStream_t stream);
cudaError_t launch_merge_partials(const MergeParams& params, cudaStream_t stream);

}  // namespace pat
