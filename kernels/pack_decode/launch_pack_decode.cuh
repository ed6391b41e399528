// One variant of pack_decode: how many CTAs of it a device holds, found out once, and its launch.
#pragma once

#include <atomic>

#include "launch_config.cuh"
#include "pack_decode/pack_decode.cuh"

namespace pat {

// Raises the kernel's shared memory limit on the present device. *count: CTAs that run at the same time.
template <typename Kernel>
cudaError_t prepare_and_count_ctas(Kernel kernel, int shared_bytes, int* count) {
  int num_sms = 0, ctas_per_sm = 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) error = multiprocessor_count(&num_sms);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, kernel, kDecodeThreads,
                                                          shared_bytes);
  }
  *count = num_sms * ctas_per_sm;
  return error;
}

template <bool kSoftCap>
struct PackDecodeVariant {
  static constexpr int kSharedBytes = sizeof(SharedStorage<Dims>);
  static constexpr auto kKernel = &pack_decode_kernel<Element, Dims, kSoftCap>;

  // On the present device; found out once for each.
  static cudaError_t count_ctas(int* count) {
    constexpr int kMaxDevices = 64;
    static std::atomic<int> counts[kMaxDevices];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    *count = counts[device].load(std::memory_order_relaxed);
    if (*count == 0) {
      error = prepare_and_count_ctas(kKernel, kSharedBytes, count);
      if (error != cudaSuccess) return error;
      counts[device].store(*count, std::memory_order_relaxed);
    }
    return cudaSuccess;
  }

  static cudaError_t launch(const DecodeParams& params, cudaStream_t stream) {
    int num_ctas = 0;
    const cudaError_t error = count_ctas(&num_ctas);
    if (error != cudaSuccess) return error;
    return pat::launch(kKernel, params, dim3(num_ctas), kDecodeThreads, kSharedBytes,
                       /*overlap=*/true, stream);
  }
};

}  // namespace pat
