// pack_decode: the attention of one decode step over the plan's work items.
//
// The kernel is persistent. A CTA draws tickets until none is left: its block index gives the first ticket, and a
// counter gives all later tickets. So a CTA that finishes early draws more tickets. Two producer warps keep a ring of
// KV stages and a ring of queries full across items and tickets. Four consumer warps execute each item with the body of
// the item's tile. For one-byte KV on Hopper, two converter warps prepare the stages for wgmma. If a request is in one
// work item only, its rows are stored to the output. All other rows are stored as partials, which merge_partials reads.
#pragma once

#include "pack_decode/converter.cuh"
#include "pack_decode/latent_mma_decode.cuh"
#include "pack_decode/mma_body.cuh"
#include "pack_decode/producer.cuh"
#ifdef PAT_USES_WGMMA
#include "pack_decode/latent_decode.cuh"
#include "pack_decode/wgmma_body.cuh"
#endif

namespace pat {

// Runs with kDecodeThreads<Dims> threads and sizeof(SharedStorage<Dims>) bytes of dynamic shared memory.
template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void pack_decode(const DecodeParams& params) {
  using Storage = SharedStorage<Dims>;
  static_assert(alignof(Storage) <= kSharedAlignment);
  alignas(kSharedAlignment) extern __shared__ uint8_t shared_bytes[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_bytes);

  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  // Thread i initialises barrier i of every kind.
  const int i = threadIdx.x;
  if (i < Storage::kStages) {
    constexpr int kWarps = Dims::kIsWide ? 1 : kProducerWarps;
    constexpr int kReaders = kAllConsumerWarps<Dims> * kStageArrivals<Dims>;
    ptx::barrier_init(ptx::shared_address(&storage.kv_full[i]), kWarps * 32 + 1);  // lanes + record
    ptx::barrier_init(ptx::shared_address(&storage.kv_empty[i]),
                      kReaders + (kHasConverters<Dims> ? kConverterWarps * 32 : 0));
    if constexpr (Dims::kIsWide) {
      ptx::barrier_init(ptx::shared_address(&storage.values_full[i]), 32);
      ptx::barrier_init(ptx::shared_address(&storage.values_empty[i]), kReaders);
    }
    if constexpr (kHasConverters<Dims>) {
      ptx::barrier_init(ptx::shared_address(&storage.kv_ready[i]), kConverterWarps);
    }
  }
  if (i < kQueryUnits) {
    ptx::barrier_init(ptx::shared_address(&storage.queries_full[i]), 32 + 1);  // lanes + record
    ptx::barrier_init(ptx::shared_address(&storage.queries_empty[i]), kAllConsumerWarps<Dims> * 32);
  }
  if (i < kDrawsAhead) {
    ptx::barrier_init(ptx::shared_address(&storage.drawn_full[i]), 32);
    ptx::barrier_init(ptx::shared_address(&storage.drawn_empty[i]), 32);
  }
  if constexpr (kHasTma) ptx::fence_barrier_init();
  __syncthreads();

  if (warp < kAllConsumerWarps<Dims>) {
    constexpr int kRegisters = Dims::kIsWide ? kLatentConsumerRegisters : kConsumerRegisters;
    if constexpr (kMovesRegisters<Dims>) ptx::setmaxnreg_inc<kRegisters>();
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.partials_owner = params.launch_tag;
    Consumer<Dims> consumer{.storage = storage,
                            .warp = warp,
                            .scales = KvScales<Dims::kIsFp8>::load(params),
                            .position = {},
                            .ring = {}};
    while (consumer.wait_for_item()) execute_item<T, Dims, kSoftCap>(params, consumer);
    return;
  }
  if constexpr (kMovesRegisters<Dims>) ptx::setmaxnreg_dec<kOtherRegisters>();
  if (warp == kAllConsumerWarps<Dims>) {
    Producer<Dims, true>(params, storage, lane).run();
  } else if (warp == kAllConsumerWarps<Dims> + 1) {
    Producer<Dims, false>(params, storage, lane).run();
  } else if constexpr (kHasConverters<Dims>) {
    Converter<Dims>(storage, warp - kAllConsumerWarps<Dims> - kProducerWarps, lane).run();
  }
}

}  // namespace pat
