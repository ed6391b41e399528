// pack_decode for latent attention (MLA) on mma.sync. pack_decode.cuh describes how pack_decode works; here, a CTA has
// eight consumer warps.
#pragma once

#include "pack_decode/latent_mma_body.cuh"
#include "pack_decode/producer.cuh"

namespace pat {

// Runs with kDecodeThreads<Dims> threads and sizeof(SharedStorage<Dims>) bytes of dynamic shared memory.
template <typename T, typename Dims, bool kSoftCap>
  requires(kHasPasses<Dims>)
__device__ __forceinline__ void pack_decode(const DecodeParams& params) {
  static_assert(!kSoftCap);
  using Storage = SharedStorage<Dims>;
  static_assert(Storage::kStages >= 2 && alignof(Storage) <= kSharedAlignment);
  alignas(kSharedAlignment) extern __shared__ uint8_t shared_bytes[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_bytes);

  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Storage::kStages; ++stage) {
      ptx::barrier_init(storage.kv_full[stage], kProducerWarps * 32 + 1);  // lanes + record
      ptx::barrier_init(storage.kv_empty[stage], kLatentConsumerWarps * 32);
    }
    for (int i = 0; i < kDrawsAhead; ++i) {
      ptx::barrier_init(storage.drawn_full[i], 32);
      ptx::barrier_init(storage.drawn_empty[i], 32);
    }
  }
  __syncthreads();

  if (warp < kLatentConsumerWarps) {
    if constexpr (kHasBothLatentBodies<Dims>) ptx::setmaxnreg_inc<kLatentConsumerRegisters>();
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.partials_owner = params.launch_tag;
    LatentMmaConsumer<T, Dims> consumer{
        .params = params,
        .storage = storage,
        .pass_unit = static_cast<uint32_t>(warp) / LatentPart::kParts,
        .share = {static_cast<uint32_t>(warp) % LatentPart::kParts}};
    while (consumer.execute_pass()) {
    }
    return;
  }
  if constexpr (kHasBothLatentBodies<Dims>) ptx::setmaxnreg_dec<kLatentProducerRegisters>();
  if (warp == kLatentConsumerWarps) {
    Producer<Dims, true>(params, storage, lane).run();
  } else if (warp == kLatentConsumerWarps + 1) {  // any further warps are idle
    Producer<Dims, false>(params, storage, lane).run();
  }
}

}  // namespace pat
