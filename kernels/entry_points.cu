// Translation unit of one kernel variant. Defines the variant's kernels under unmangled names, and the facts that the
// host needs to launch them.
//
// PAT_ELEMENT (__half or __nv_bfloat16), PAT_KV_TYPE (element type of the cache: kAsQueries, kE4m3 or kE5m2),
// PAT_HEAD_DIM, PAT_V_HEAD_DIM and PAT_TARGET_ARCH (compute capability, e.g. 90) choose the variant. NVRTC compiles
// this file, with the headers in nvrtc/ in place of the standard library's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "contract/launch_facts.h"
#include "fill_rows.cuh"
#include "gather_slots.cuh"
#include "merge_partials.cuh"
#include "pack_decode/pack_decode.cuh"
#include "pack_decode/query_fp8_terms.cuh"
#include "write_kv.cuh"

#if !defined(PAT_ELEMENT) || !defined(PAT_KV_TYPE) || !defined(PAT_HEAD_DIM) || \
    !defined(PAT_V_HEAD_DIM)
#error \
    "PAT_ELEMENT must be __half or __nv_bfloat16; PAT_KV_TYPE a KvType; PAT_HEAD_DIM and PAT_V_HEAD_DIM columns"
#endif

namespace pat {
namespace {

using Element = PAT_ELEMENT;
using Dims = HeadDims<PAT_HEAD_DIM, PAT_V_HEAD_DIM, KvType::PAT_KV_TYPE,
                      kLatentTokens<KvType::PAT_KV_TYPE>, kQueryTerms<Element>>;
using Partial = ComputeType<Element, Dims>;
// Where latent attention uses wgmma, it also has a body on mma.sync. A plan that uses only the smallest tile runs on
// mma.sync, as do most plans without shared KV.
constexpr bool kHasTwoBodies = kHasLatentWgmma<Dims>;
using FewRows = HeadDims<PAT_HEAD_DIM, PAT_V_HEAD_DIM, KvType::PAT_KV_TYPE, kStageTokens>;
constexpr int kSharedBytes =
    std::max(sizeof(SharedStorage<Dims>), kHasTwoBodies ? sizeof(SharedStorage<FewRows>) : 0);

}  // namespace

extern "C" {

// The host reads this constant when it loads the kernels.
__constant__ LaunchFacts launch_facts = {.decode_threads = kDecodeThreads<Dims>,
                                         .decode_shared_bytes = kSharedBytes,
                                         .merge_threads = kMergeWarps * 32,
                                         .merge_ctas_per_sm = kMergeCtasPerSm,
                                         .merge_slices = kMergeSlices<Dims::kValue>,
                                         .gather_threads = kGatherThreads,
                                         .fill_threads = kFillThreads,
                                         .write_threads = kWriteThreads};

__global__ void __launch_bounds__(kDecodeThreads<Dims>, kCtasPerSm<Dims>)
    pack_decode_kernel(const __grid_constant__ DecodeParams params) {
  if constexpr (kHasTwoBodies) {
    if (params.plan.header->largest_tile == 0) return pack_decode<Element, FewRows, false>(params);
  }
  pack_decode<Element, Dims, false>(params);
}

#if PAT_HEAD_DIM != 576  // latent attention has no soft-cap
__global__ void __launch_bounds__(kDecodeThreads<Dims>, kCtasPerSm<Dims>)
    pack_decode_soft_cap_kernel(const __grid_constant__ DecodeParams params) {
  pack_decode<Element, Dims, true>(params);
}
#endif

__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtasPerSm)
    merge_partials_kernel(const __grid_constant__ DecodeParams params) {
  merge_partials<Element, Partial, Dims::kValue, Dims::kIsFp8, false>(params);
}

__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtasPerSm)
    merge_partials_sinks_kernel(const __grid_constant__ DecodeParams params) {
  merge_partials<Element, Partial, Dims::kValue, Dims::kIsFp8, true>(params);
}

__global__ void __launch_bounds__(kGatherThreads)
    gather_slots_kernel(const __grid_constant__ GatherParams params) {
  gather_slots(params);
}

__global__ void __launch_bounds__(kFillThreads)
    fill_rows_kernel(const __grid_constant__ FillParams params) {
  fill_rows(params);
}

__global__ void __launch_bounds__(kWriteThreads)
    write_kv_kernel(const __grid_constant__ WriteParams params) {
  write_kv<Element, Dims>(params);
}

}  // extern "C"
}  // namespace pat
