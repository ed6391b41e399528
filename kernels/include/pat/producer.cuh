// The producer warps of pack_decode: walk the worker's items and keep the KV ring and the query ring full, across
// items, so that the consumers find the next item's data already there.
//
// Latency is hidden three times: descriptors are read for 32 items at once (one per lane), slots eight stages ahead,
// and KV as far ahead as the ring is long.
#pragma once

#include "pat/decode_params.h"
#include "pat/index_array.cuh"
#include "pat/work_queue.cuh"

namespace pat {

// What the K producer must know to publish an item. Each lane holds one.
struct ItemHead {
  int32_t tile;
  int32_t num_requests;
  int32_t request_begin;

  __device__ __forceinline__ ItemHead of_lane(int lane) const {
    return {.tile = __shfl_sync(kFullWarp, tile, lane),
            .num_requests = __shfl_sync(kFullWarp, num_requests, lane),
            .request_begin = __shfl_sync(kFullWarp, request_begin, lane)};
  }
};

// An item's KV range, resolved against live lengths. Each lane holds one.
struct ItemRange {
  const int32_t* slots;  // of the first token
  int32_t num_tokens;

  __device__ static ItemRange resolve(const DecodeParams& params, int kv_request, int kv_begin,
                                      int kv_end) {
    ItemRange range{.slots = params.shared_slots + kv_begin, .num_tokens = kv_end - kv_begin};
    if (kv_request != kSharedKv) {
      const int64_t row = load_index(params.req_pool_indices, kv_request);
      range.slots = params.req_to_token + row * params.req_to_token_stride + kv_begin;
      if (kv_end == kOpenEnd) {
        range.num_tokens = static_cast<int32_t>(load_index(params.seq_lens, kv_request)) - kv_begin;
      }
    }
    range.num_tokens = max(range.num_tokens, 0);
    return range;
  }

  __device__ __forceinline__ ItemRange of_lane(int lane) const {
    return {.slots = reinterpret_cast<const int32_t*>(
                __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(slots), lane)),
            .num_tokens = __shfl_sync(kFullWarp, num_tokens, lane)};
  }
};

// The next stages of a batch of items, whatever items they belong to: their slots are read that far ahead. More than
// the ring holds, because loads return in order: slots arrive behind all the KV that was asked for before them.
// Lane l holds token l of each stage.
struct StageBatch {
  static constexpr int kStages = 8;
  int32_t slots[kStages];
  int left[kStages];  // tokens of the item from this stage on; 0: no stage
  int item[kStages];  // within the batch of items

  __device__ __forceinline__ void pop_front() {
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) {
      slots[i] = slots[i + 1];
      left[i] = left[i + 1];
      item[i] = item[i + 1];
    }
    left[kStages - 1] = 0;
  }
};

// Walks the stages of up to 32 items.
struct StageCursor {
  const ItemRange lane_range;
  const int num_items;
  int item;
  int token;
  ItemRange range;  // of `item`

  __device__ StageCursor(const ItemRange& lane_range, int num_items)
      : lane_range(lane_range),
        num_items(num_items),
        item(0),
        token(0),
        range(lane_range.of_lane(0)) {}

  __device__ __forceinline__ void fetch(StageBatch& batch, int lane) {
#pragma unroll
    for (int i = 0; i < StageBatch::kStages; ++i) {
      while (token >= range.num_tokens && item < num_items) {
        ++item;
        token = 0;
        range = lane_range.of_lane(min(item, num_items - 1));
      }
      batch.left[i] = item < num_items ? range.num_tokens - token : 0;
      batch.item[i] = item;
      batch.slots[i] = 0;
      if (lane < batch.left[i]) batch.slots[i] = range.slots[token + lane];
      token += kStageTokens;
    }
  }
};

// The requests of the query rows of an item: lane l holds those of rows l and 32 + l.
struct RowRequests {
  int2 rows[2];

  __device__ __forceinline__ void load(const DecodeParams& params, const ItemHead& head, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = request_of_row(params.rows, 32 * i + lane);
      rows[i] = {0, 0};
      if (index < head.num_requests) {
        const ItemRequest* request = params.plan.item_requests + head.request_begin + index;
        rows[i] = *reinterpret_cast<const int2*>(request);
      }
    }
  }
};

// How the 32 lanes of a warp cover rows of head_dim elements with 16-byte copies.
template <int kHeadDim>
struct RowCopy {
  static constexpr int kChunks = kHeadDim * 2 / kChunkBytes;
  static constexpr int kRowsPerCopy = 32 / kChunks;
  static constexpr int kPeriod = 8 / kRowsPerCopy;  // copies after which the swizzle repeats

  int row;  // of the first copy
  int chunk;

  __device__ explicit RowCopy(int lane) : row(lane / kChunks), chunk(lane % kChunks) {}
};

// Issues the copies of one stage of one operand. Rows from `num_tokens` on are zeroed: garbage would turn
// probability 0 into NaN.
template <int kHeadDim, bool kWholeStage>
__device__ __forceinline__ void copy_stage(uint32_t shared, const char* cache, uint32_t slot_bytes,
                                           int32_t lane_slot, int num_tokens,
                                           const RowCopy<kHeadDim>& copy) {
  using Copy = RowCopy<kHeadDim>;
  uint32_t offsets[Copy::kPeriod];
#pragma unroll
  for (int i = 0; i < Copy::kPeriod; ++i) {
    offsets[i] =
        shared + swizzled_offset(kStageTokens, i * Copy::kRowsPerCopy + copy.row, copy.chunk);
  }
#pragma unroll
  for (int i = 0; i < kStageTokens / Copy::kRowsPerCopy; ++i) {
    const int token = i * Copy::kRowsPerCopy + copy.row;
    const uint32_t slot = __shfl_sync(kFullWarp, lane_slot, token);
    const char* source = cache + static_cast<uint64_t>(slot) * slot_bytes;
    const uint32_t target = offsets[i % Copy::kPeriod] + i / Copy::kPeriod * 8 * kPanelRowBytes;
    if constexpr (kWholeStage) {
      ptx::copy_async_16(target, source);
    } else {
      ptx::copy_async_16_or_zero(target, source, token < num_tokens);
    }
  }
}

// Loads what its role says for every item of a worker. Who loads queries also writes the records.
template <typename T, int kHeadDim, ProducerRole kRole>
class Producer {
 public:
  static constexpr bool kLoadsKv = kRole != ProducerRole::kQueries;
  static constexpr bool kPublishes =
      kRole == ProducerRole::kQueries || kRole == ProducerRole::kKeysAndQueries;
  static constexpr bool kIsValue = kRole == ProducerRole::kValues;

  using Storage = SharedStorage<kHeadDim>;

  __device__ Producer(const DecodeParams& params, Storage& storage, int kv_head, int lane)
      : params_(params),
        storage_(storage),
        lane_(lane),
        first_head_(kv_head * params.rows.group_size),
        num_q_heads_(params.num_kv_heads * params.rows.group_size),
        copy_(lane) {
    const void* base = kIsValue ? params.v_cache : params.k_cache;
    cache_ =
        static_cast<const char*>(base) + kv_head * Storage::kRowBytes + copy_.chunk * kChunkBytes;
    slot_bytes_ = kIsValue ? params.v_slot_bytes : params.k_slot_bytes;
  }

  __device__ void run(int item_begin, int item_end) {
    for (int begin = item_begin; begin < item_end; begin += 32) {
      run_batch(begin, min(32, item_end - begin));
    }
  }

 private:
  __device__ __forceinline__ void run_batch(int first_item, int count) {
    const auto* item =
        reinterpret_cast<const int4*>(params_.plan.work_items + first_item + min(lane_, count - 1));
    const int4 fields = __ldcg(item);
    const int4 more_fields = __ldcg(item + 1);
    const ItemHead lane_head{.tile = fields.x, .num_requests = fields.y, .request_begin = fields.z};
    if constexpr (kPublishes) ptx::prefetch(params_.plan.item_requests + fields.z);
    const ItemRange lane_range =
        ItemRange::resolve(params_, fields.w, more_fields.x, more_fields.y);

    if constexpr (kLoadsKv) {
      // All items' first slots, so that only the first ones wait for DRAM.
      if (lane_range.num_tokens > 0) ptx::prefetch(lane_range.slots);
    }
    if constexpr (kRole == ProducerRole::kQueries) {
      publish_batch(lane_head, lane_range, count);
    } else {
      load_batch(lane_head, lane_range, count);
    }
  }

  // Reads the requests four items ahead.
  __device__ __forceinline__ void publish_batch(const ItemHead& lane_head,
                                                const ItemRange& lane_range, int count) {
    constexpr int kAhead = 4;
    RowRequests requests[kAhead], next_requests[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      next_requests[i].load(params_, lane_head.of_lane(min(i, count - 1)), lane_);
    }
    for (int first = 0; first < count; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        requests[i] = next_requests[i];
        const int ahead = min(first + kAhead + i, count - 1);
        next_requests[i].load(params_, lane_head.of_lane(ahead), lane_);
      }
#pragma unroll 1
      for (int item = first; item < min(first + kAhead, count); ++item) {
        publish(lane_head.of_lane(item), lane_range.of_lane(item).num_tokens, requests[0]);
#pragma unroll
        for (int i = 0; i + 1 < kAhead; ++i) requests[i] = requests[i + 1];
      }
    }
  }

  // One operand of all stages. Who also publishes does so right before an item's first stage: any earlier, it might
  // wait for consumers that wait for it.
  __device__ __forceinline__ void load_batch(const ItemHead& lane_head, const ItemRange& lane_range,
                                             int count) {
    int published = 0;
    RowRequests requests;
    if constexpr (kPublishes) requests.load(params_, lane_head.of_lane(0), lane_);
    const auto publish_until = [&](int end) {
      while (published < end) {
        publish(lane_head.of_lane(published), lane_range.of_lane(published).num_tokens, requests);
        ++published;
        requests.load(params_, lane_head.of_lane(min(published, count - 1)), lane_);
      }
    };

    StageCursor cursor(lane_range, count);
    StageBatch batch, next;
    cursor.fetch(next, lane_);
    while (next.left[0] > 0) {
      batch = next;
      cursor.fetch(next, lane_);
#pragma unroll 1  // unrolled, the copies would fill the instruction cache
      while (batch.left[0] > 0) {
        if constexpr (kPublishes) publish_until(batch.item[0] + 1);
        fill_stage(batch.slots[0], batch.left[0]);
        batch.pop_front();
      }
    }
    if constexpr (kPublishes) publish_until(count);
  }

  __device__ __forceinline__ void fill_stage(int32_t lane_slot, int num_tokens) {
    const int stage = ring_.stage;
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[stage]), ring_.parity ^ 1);
    const uint32_t target =
        ptx::shared_address(storage_.kv[stage]) + (kIsValue ? Storage::kOperandBytes : 0);
    if (num_tokens >= kStageTokens) {
      copy_stage<kHeadDim, true>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    } else {
      copy_stage<kHeadDim, false>(target, cache_, slot_bytes_, lane_slot, num_tokens, copy_);
    }
    ptx::barrier_arrive_after_copies(ptx::shared_address(&storage_.kv_full[stage]));
    ring_.advance();
  }

  // Queries and record of an item.
  __device__ __forceinline__ void publish(const ItemHead& head, int num_tokens,
                                          const RowRequests& requests) {
    const int units = tile_units(head.tile);
    const int first_unit = queries_.first_unit(units);
    for (int unit = queries_.next_unit; unit < first_unit + units; ++unit) {
      const uint32_t empty = ptx::shared_address(&storage_.queries_empty[unit % kQueryUnits]);
      ptx::barrier_wait(empty, ((unit / kQueryUnits) & 1) ^ 1);
      // A skipped unit is handed back at once, in the consumers' place: the item's own last units may be the
      // next lap of it.
      if (unit < first_unit && lane_ < kConsumerWarps) ptx::barrier_arrive(empty);
    }

    const int tile_rows = units * kUnitRows;
    const int num_rows = head.num_requests * params_.rows.group_size;
    ItemRecord& record = storage_.records[queries_.record()];
    if (lane_ == 0) {
      record.tile = head.tile;
      record.num_rows = num_rows;
      record.num_tokens = num_tokens;
    }
    uint32_t query_chunks[2];  // of this lane's rows, from the beginning of q
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 32 * i + lane_;
      const int head = first_head_ + head_of_row(params_.rows, row);
      query_chunks[i] =
          requests.rows[i].x * params_.q_stride_chunks + head * RowCopy<kHeadDim>::kChunks;
      const ItemRequest request{.request = requests.rows[i].x, .partial_slot = requests.rows[i].y};
      if (row < tile_rows) {
        record.targets[row] = row < num_rows ? row_target(request, num_q_heads_, head) : kNoTarget;
      }
    }
    for (int unit = 0; unit < units; ++unit) {
      copy_queries(first_unit, tile_rows, unit * kUnitRows, num_rows,
                   unit < 2 ? query_chunks[0] : query_chunks[1]);
    }

    const uint32_t full = ptx::shared_address(&storage_.queries_full[queries_.record()]);
    ptx::barrier_arrive_after_copies(full);
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(full);  // releases the record, which all lanes wrote
    queries_.advance(units);
  }

  // 16 query rows from first_row on. lane_chunk: where in q lane l's row l % 32 begins.
  __device__ __forceinline__ void copy_queries(int first_unit, int tile_rows, int first_row,
                                               int num_rows, uint32_t lane_chunk) {
    using Copy = RowCopy<kHeadDim>;
    const uint32_t target = ptx::shared_address(storage_.queries[first_unit % kQueryUnits]);
    const char* queries = static_cast<const char*>(params_.q) + copy_.chunk * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kUnitRows / Copy::kRowsPerCopy; ++i) {
      const int row = first_row + i * Copy::kRowsPerCopy + copy_.row;
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, row % 32);
      const bool valid = row < num_rows;
      const char* source = queries + uint64_t{valid ? chunk : 0} * kChunkBytes;
      ptx::copy_async_16_or_zero(target + swizzled_offset(tile_rows, row, copy_.chunk), source,
                                 valid);
    }
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int lane_;
  const int first_head_;  // query heads of the KV head: first_head_ to first_head_ + group_size
  const int num_q_heads_;
  const RowCopy<kHeadDim> copy_;
  const char* cache_;  // of this lane's chunk, slot 0
  uint32_t slot_bytes_;
  RingPosition<Storage::kStages> ring_;
  QueryPosition queries_;
};

}  // namespace pat
