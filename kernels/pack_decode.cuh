// pack_decode: the attention of one decode step over the plan's work items.
//
// Persistent. CTA w * num_kv_heads + h executes the items of worker w for KV head h, in order. Two producer warps
// keep a ring of KV stages and a ring of query tiles full across items; four consumer warps run the tile body
// that the item asks for. A row that is its request's only partial goes straight to the output, every other to
// the partials that merge_partials reads.
#pragma once

#include "pat/producer.cuh"
#if PAT_TARGET_ARCH == 90
#include "pat/wgmma_body.cuh"
#else
#include "pat/mma_body.cuh"
#endif

namespace pat {

template <typename T, int kHeadDim, bool kSoftCap>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    pack_decode_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ uint8_t shared_bytes[];
  using Storage = SharedStorage<kHeadDim>;
  Storage& storage = *reinterpret_cast<Storage*>(shared_bytes);

  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  const int kv_head = blockIdx.x % params.num_kv_heads;
  const int worker = blockIdx.x / params.num_kv_heads;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Storage::kStages; ++i) {
      ptx::barrier_init(ptx::shared_address(&storage.kv_full[i]), kProducerWarps * 32);
      ptx::barrier_init(ptx::shared_address(&storage.kv_empty[i]), kConsumerWarps * 32);
    }
    for (int i = 0; i < kQueryUnits; ++i) {
      ptx::barrier_init(ptx::shared_address(&storage.queries_full[i]), 32 + 1);  // copies, record
      ptx::barrier_init(ptx::shared_address(&storage.queries_empty[i]), kConsumerWarps * 32);
    }
  }
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  const int item_begin = params.plan.worker_begin[worker];
  const int item_end = params.plan.worker_begin[worker + 1];
  if (threadIdx.x == 0) storage.num_items = item_end - item_begin;
  __syncthreads();

  if (warp == kConsumerWarps) {
    Producer<T, kHeadDim, true>(params, storage, kv_head, lane).run(item_begin, item_end);
  } else if (warp == kConsumerWarps + 1) {
    Producer<T, kHeadDim, false>(params, storage, kv_head, lane).run(item_begin, item_end);
  } else {
    Consumer<kHeadDim> consumer{.storage = storage, .warp = warp, .position = {}, .ring = {}};
    while (consumer.position.item < storage.num_items) {
      consumer.wait_for_queries();
      execute_item<T, kHeadDim, kSoftCap>(params, consumer);
    }
  }
}

}  // namespace pat
