// What the launchers share: the configuration this library is compiled for, and the launch itself.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "pack_decode/shared_layout.h"

#if !defined(PAT_ELEMENT) || !defined(PAT_HEAD_DIM) || !defined(PAT_V_HEAD_DIM)
#error "PAT_ELEMENT must be __half or __nv_bfloat16; PAT_HEAD_DIM and PAT_V_HEAD_DIM columns"
#endif

namespace pat {

using Element = PAT_ELEMENT;
using Dims = HeadDims<PAT_HEAD_DIM, PAT_V_HEAD_DIM>;

// `overlap`: may start while its predecessor in the stream drains (programmatic dependent launch). The kernel
// must then call ptx::wait_for_dependencies before it touches what the predecessor wrote.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, dim3 grid, int threads,
                   size_t shared_bytes, bool overlap, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap && PAT_TARGET_ARCH >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

inline cudaError_t multiprocessor_count(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace pat
