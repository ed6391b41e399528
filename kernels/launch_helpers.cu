// Launchers of the kernels around pack_decode.
#include <algorithm>

#include "gather_slots.cuh"
#include "launch.h"
#include "launch_config.cuh"
#include "merge_partials.cuh"

namespace pat {

cudaError_t launch_gather_slots(const GatherParams& params, cudaStream_t stream) {
  int num_sms = 0;
  const cudaError_t error = multiprocessor_count(&num_sms);
  if (error != cudaSuccess) return error;
  return launch(&gather_slots_kernel, params, dim3(num_sms, 8), kGatherThreads, 0,
                /*overlap=*/false, stream);
}

cudaError_t launch_merge_partials(const DecodeParams& params, cudaStream_t stream) {
  int num_sms = 0;
  const cudaError_t error = multiprocessor_count(&num_sms);
  if (error != cudaSuccess) return error;
  const int64_t num_rows = int64_t{params.max_merges} * params.num_q_heads;
  const int64_t num_ctas = std::clamp<int64_t>(num_rows, 1, int64_t{num_sms} * kMergeCtasPerSm);
  const auto kernel = params.sinks.data == nullptr
                          ? &merge_partials_kernel<Element, Dims::kValue, false>
                          : &merge_partials_kernel<Element, Dims::kValue, true>;
  return launch(kernel, params, dim3(static_cast<unsigned>(num_ctas)), kMergeWarps * 32, 0,
                /*overlap=*/true, stream);
}

}  // namespace pat
