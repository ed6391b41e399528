// pack_decode: the attention of one decode step over the plan's work items.
//
// Persistent. CTA w * num_kv_heads + h executes the items of worker w for KV head h, in order. Two producer warps
// keep a ring of KV stages and a ring of query tiles full across items; four consumer warps run the tile body
// that the item asks for. A row that is its request's only partial goes straight to the output, every other to
// the partials that merge_partials reads.
#pragma once

#include "pat/producer.cuh"
#include "pat/row_output.cuh"

namespace pat {

// One item in the body of tile kTile.
template <typename T, int kHeadDim, bool kSoftCap, int kTile>
__device__ __forceinline__ void execute_item(const DecodeParams& params,
                                             SharedStorage<kHeadDim>& storage,
                                             QueryPosition& position,
                                             RingPosition<SharedStorage<kHeadDim>::kStages>& ring,
                                             int warp) {
  using Layout = WarpLayout<kTile>;
  using Storage = SharedStorage<kHeadDim>;
  constexpr int kTileRows = Layout::kConfig.block_q;
  constexpr int kUnits = kTileRows / kUnitRows;

  // Anew per item: three bodies' lane addresses do not fit in registers.
  const uint32_t lane = ptx::lane_id();
  const ItemRecord& record = storage.records[position.record()];
  const int num_tokens = record.num_tokens;
  const int num_rows = record.num_rows;
  const int first_row = warp / Layout::kKvWarps * kUnitRows;
  const int kv_warp = warp % Layout::kKvWarps;
  // Kept in shared memory until the item's end: there is no register to spare.
  RowTarget* targets = storage.row_targets[warp];
  if (lane < kUnitRows) targets[lane] = record.targets[first_row + lane];

  WarpAttention<T, kHeadDim, kSoftCap> part;
  const int first_unit = position.first_unit(kUnits);
  part.begin(ptx::shared_address(storage.queries[first_unit % kQueryUnits]), kTileRows, first_row,
             lane);
  __syncwarp();
  if (lane == 0) {
    for (int unit = first_unit; unit < first_unit + kUnits; ++unit) {
      ptx::barrier_arrive(ptx::shared_address(&storage.queries_empty[unit % kQueryUnits]));
    }
  }
  position.advance(kUnits);

  const int own_stage = kv_warp / Layout::kWarpsPerStage;
  const int first_token = kv_warp % Layout::kWarpsPerStage * Layout::kWarpTokens;
  int stage_of_step = 0;
  for (int token = 0; token < num_tokens; token += kStageTokens) {
    ptx::barrier_wait(ptx::shared_address(&storage.kv_full[ring.stage]), ring.parity);
    const int num_valid = num_tokens - token - first_token;
    if (stage_of_step == own_stage && num_valid > 0) {
      const uint32_t keys = ptx::shared_address(storage.kv[ring.stage]);
      part.template attend<Layout::kWarpTokens>(keys, keys + Storage::kOperandBytes, first_token,
                                                num_valid, params.logit_scale, lane);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&storage.kv_empty[ring.stage]));
    ring.advance();
    stage_of_step = stage_of_step + 1 == Layout::kStagesPerStep ? 0 : stage_of_step + 1;
  }

  part.finish();
  if constexpr (Layout::kKvWarps == 1) {
    store_item(part, params, targets, lane);
  } else {
    const int num_parts = (num_tokens + Layout::kWarpTokens - 1) / Layout::kWarpTokens;
    combine_and_store_item<T, kHeadDim, kSoftCap, Layout::kKvWarps>(
        part, storage, params, targets, num_parts, num_rows, warp, lane);
  }
}

// Calls the body of `tile`: exactly the rows of the tile table.
template <int kTile = 0, typename Body>
__device__ __forceinline__ void dispatch_tile(int tile, Body&& body) {
  if constexpr (kTile < kNumTiles) {
    if (tile == kTile) {
      body.template operator()<kTile>();
    } else {
      dispatch_tile<kTile + 1>(tile, static_cast<Body&&>(body));
    }
  }
}

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
      ptx::barrier_init(ptx::shared_address(&storage.kv_empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < kQueryUnits; ++i) {
      ptx::barrier_init(ptx::shared_address(&storage.queries_full[i]), 32 + 1);  // copies, record
      ptx::barrier_init(ptx::shared_address(&storage.queries_empty[i]), kConsumerWarps);
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
    QueryPosition position;
    RingPosition<Storage::kStages> ring;
    while (position.item < storage.num_items) {
      ptx::barrier_wait(ptx::shared_address(&storage.queries_full[position.record()]),
                        position.item_parity());
      dispatch_tile(storage.records[position.record()].tile, [&]<int kTile>() {
        execute_item<T, kHeadDim, kSoftCap, kTile>(params, storage, position, ring, warp);
      });
    }
  }
}

}  // namespace pat
