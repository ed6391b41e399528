// One variant of pack_decode: its shared memory limit, raised once per device, and its launch.
#pragma once

#include <atomic>

#include "launch_config.cuh"
#include "pack_decode.cuh"

namespace pat {

template <bool kSoftCap>
cudaError_t launch_pack_decode_variant(const DecodeParams& params, int num_ctas,
                                       cudaStream_t stream) {
  static std::atomic<uint64_t> ready_devices{0};
  constexpr int kSharedBytes = sizeof(SharedStorage<kHeadDim>);
  const auto kernel = &pack_decode_kernel<Element, kHeadDim, kSoftCap>;

  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((ready_devices.load(std::memory_order_relaxed) & bit) == 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    ready_devices.fetch_or(bit, std::memory_order_relaxed);
  }
  return launch(kernel, params, dim3(num_ctas), kDecodeThreads, kSharedBytes, /*overlap=*/true,
                stream);
}

}  // namespace pat
