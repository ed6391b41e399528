// pack_decode for latent attention (MLA) on wgmma. pack_decode.cuh describes how pack_decode works; here, a CTA has two
// warpgroups of consumers and one warpgroup of producers.
#pragma once

#include "pack_decode/latent_body.cuh"
#include "pack_decode/latent_producer.cuh"
#include "pack_decode/producer.cuh"

namespace pat {

// Runs with kDecodeThreads<Dims> threads and sizeof(SharedStorage<Dims>) bytes of dynamic shared memory.
template <typename T, typename Dims, bool kSoftCap>
  requires(kHasLatentWgmma<Dims>)
__device__ __forceinline__ void pack_decode(const DecodeParams& params) {
  static_assert(!kSoftCap);
  using Storage = SharedStorage<Dims>;
  static_assert(Storage::kStages == kLatentStages && alignof(Storage) <= kSharedAlignment);
  alignas(kSharedAlignment) extern __shared__ uint8_t shared_bytes[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_bytes);

  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kLatentStages; ++stage) {
      for (int part = 0; part < kStageParts; ++part) {
        const bool is_shared = part == kStageParts - 1;
        ptx::barrier_init(storage.kv_full[stage][part],
                          kProducerWarps * 32 + is_shared);  // lanes + record
        ptx::barrier_init(storage.kv_empty[stage][part],
                          is_shared ? kLatentConsumerWarps : kLatentConsumerWarps / kLatentGroups);
      }
    }
    ptx::barrier_init(storage.queries_full, kLatentQueryWarps * (32 + 1));  // lanes + record
    ptx::barrier_init(storage.queries_empty, kBarrierThreads);
    ptx::barrier_init(storage.sums_full, kBarrierThreads);
    for (int i = 0; i < kDrawsAhead; ++i) {
      ptx::barrier_init(storage.drawn_full[i], 32);
      ptx::barrier_init(storage.drawn_empty[i], (1 + kLatentQueryWarps) * 32);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warp < kLatentConsumerWarps) {
    ptx::setmaxnreg_inc<kLatentConsumerRegisters>();
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.partials_owner = params.launch_tag;
    const auto consume = [&]<int kGroup>(LatentConsumer<T, Dims, kGroup> consumer) {
      while (consumer.wait_for_item()) consumer.execute_item();
    };
    const uint32_t consumer_lane = lane;
    if (warp < 4) {
      consume(LatentConsumer<T, Dims, 0>{params, storage, warp, consumer_lane});
    } else {
      consume(LatentConsumer<T, Dims, 1>{params, storage, warp - 4, consumer_lane});
    }
    return;
  }
  ptx::setmaxnreg_dec<kLatentProducerRegisters>();
  const int role = warp - kLatentConsumerWarps;
  if (role == 0) {
    Producer<Dims, true>(params, storage, lane).run();
  } else if (role == 1) {
    Producer<Dims, false>(params, storage, lane).run();
  } else {
    LatentQueryProducer<Dims>(params, storage, (role - kProducerWarps) * kStageTokens, lane).run();
  }
}

}  // namespace pat
