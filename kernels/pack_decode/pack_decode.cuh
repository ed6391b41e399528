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

// Initialises the barriers of one of four kinds. Each kind needs one thread.
template <typename Dims>
__device__ __forceinline__ void init_barriers(SharedStorage<Dims>& storage, int kind) {
  using Storage = SharedStorage<Dims>;
  constexpr int kWarps = Dims::kIsWide ? 1 : kProducerWarps;
  constexpr int kReaders = kAllConsumerWarps<Dims> * kStageArrivals<Dims>;
  if (kind == 0) {
    for (int stage = 0; stage < Storage::kStages; ++stage) {
      ptx::barrier_init(storage.kv_full[stage], kWarps * 32 + 1);  // lanes + record
      if constexpr (Dims::kIsWide) ptx::barrier_init(storage.values_full[stage], 32);
    }
  } else if (kind == 1) {
    for (int stage = 0; stage < Storage::kStages; ++stage) {
      ptx::barrier_init(storage.kv_empty[stage],
                        kReaders + (kHasConverters<Dims> ? kConverterWarps * 32 : 0));
      if constexpr (Dims::kIsWide) ptx::barrier_init(storage.values_empty[stage], kReaders);
    }
  } else if (kind == 2) {
    for (int unit = 0; unit < kQueryUnits; ++unit) {
      ptx::barrier_init(storage.queries_full[unit], 32 + 1);  // lanes + record
      ptx::barrier_init(storage.queries_empty[unit], kAllConsumerWarps<Dims> * 32);
    }
  } else if (kind == 3) {
    for (int i = 0; i < kDrawsAhead; ++i) {
      ptx::barrier_init(storage.drawn_full[i], 32);
      ptx::barrier_init(storage.drawn_empty[i], 32);
    }
    if constexpr (kHasConverters<Dims>) {
      for (int stage = 0; stage < Storage::kStages; ++stage) {
        ptx::barrier_init(storage.kv_ready[stage], kConverterWarps);
      }
    }
  }
  if constexpr (kHasTma) ptx::fence_barrier_init();
}

// Runs with kDecodeThreads<Dims> threads and sizeof(SharedStorage<Dims>) bytes of dynamic shared memory.
template <typename T, typename Dims, bool kSoftCap>
__device__ __forceinline__ void pack_decode(const DecodeParams& params) {
  using Storage = SharedStorage<Dims>;
  static_assert(alignof(Storage) <= kSharedAlignment);
  alignas(kSharedAlignment) extern __shared__ uint8_t shared_bytes[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_bytes);

  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  // Four warps initialise barriers side by side, a thread in each. With wide rows it is one thread: four would spill.
  if constexpr (Dims::kIsWide) {
    if (threadIdx.x == 0) {
      for (int kind = 0; kind < 4; ++kind) init_barriers<Dims>(storage, kind);
    }
  } else if (lane == 0) {
    init_barriers<Dims>(storage, warp);
  }
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
