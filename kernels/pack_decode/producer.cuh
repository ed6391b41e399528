// The producer warps of pack_decode: walk the items of the CTA's tickets and keep the KV ring and the query ring
// full, across items and tickets, so that the consumers find the next item's data already there.
//
// Latency is hidden three times: descriptors are read for up to 32 items at once (one per lane), slots four stages ahead,
// and KV as far ahead as the ring is long.
#pragma once

#include "decode_params.h"
#include "index_array.cuh"
#include "pack_decode/kv_stages.cuh"
#include "pack_decode/ticket_queue.cuh"
#include "pack_decode/work_queue.cuh"

namespace pat {

// A work item with its KV range resolved against live lengths. Each lane holds one.
struct ItemSource {
  const int32_t* slots;  // of the range's first token
  int32_t num_tokens;
  int32_t tile;
  int32_t num_requests;
  int32_t request_begin;

  // An item that no one executes, as the successor of the last.
  __device__ static ItemSource none() { return {nullptr, 0, 0, 0, 0}; }

  __device__ static ItemSource load(const DecodeParams& params, int index) {
    const WorkItem& item = params.plan.work_items[index];
    const int4 head = reinterpret_cast<const int4*>(&item)[0];
    const int2 range = reinterpret_cast<const int2*>(&item)[2];
    ItemSource source{.slots = params.shared_slots + range.x,
                      .num_tokens = range.y - range.x,
                      .tile = head.x,
                      .num_requests = head.y,
                      .request_begin = head.z};
    const int kv_request = head.w;
    if (kv_request != kSharedKv) {
      const int64_t row = load_index(params.req_pool_indices, kv_request);
      source.slots = params.req_to_token + row * params.req_to_token_stride + range.x;
      if (range.y == kOpenEnd) {
        const int64_t length = load_index(params.seq_lens, kv_request);
        source.num_tokens =
            static_cast<int32_t>(min(length, int64_t{params.table_width})) - range.x;
      }
    }
    source.num_tokens = max(source.num_tokens, 0);
    return source;
  }

  __device__ ItemSource of_lane(int lane) const {
    return {.slots = reinterpret_cast<const int32_t*>(
                __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(slots), lane)),
            .num_tokens = __shfl_sync(kFullWarp, num_tokens, lane),
            .tile = __shfl_sync(kFullWarp, tile, lane),
            .num_requests = __shfl_sync(kFullWarp, num_requests, lane),
            .request_begin = __shfl_sync(kFullWarp, request_begin, lane)};
  }
};

// Slots of up to 4 stages: lane l holds token l of each.
struct SlotBatch {
  static constexpr int kStages = 4;
  static constexpr int kTokens = kStages * kStageTokens;
  int32_t slots[kStages];

  __device__ __forceinline__ void load(const int32_t* source, int num_tokens, int lane) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      const int token = i * kStageTokens + lane;
      slots[i] = token < num_tokens ? source[token] : 0;
    }
  }

  __device__ __forceinline__ int32_t pop_front() {
    const int32_t front = slots[0];
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) slots[i] = slots[i + 1];
    return front;
  }
};

// Loads one operand of every item of a CTA; the K producer also draws the tickets, loads queries and writes the
// records.
template <typename T, typename Dims, bool kIsKey>
class Producer {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr int kColumns = kIsKey ? Dims::kKey : Dims::kValue;
  using Copy = RowCopy<kColumns>;

  __device__ Producer(const DecodeParams& params, Storage& storage, int lane)
      : params_(params),
        storage_(storage),
        lane_(lane),
        num_q_heads_(params.num_q_heads),
        copy_{lane},
        tickets_(params, storage, lane),
        stages_(params, storage, lane) {}

  __device__ __forceinline__ void run() {
    batch_ = tickets_.first();
    lane_source_ = load_batch();
    ItemSource source = lane_source_.of_lane(0);
    prefetch(source);
    while (source.num_requests > 0) {
      set_head(batch_.kv_head);
      if constexpr (kIsKey) publish(source);
      ItemSource next;
      if (source.num_tokens == 0) next = prefetch_next();
      for (int first = 0; first < source.num_tokens; first += SlotBatch::kTokens) {
        const SlotBatch slots = next_slots_;
        const int left = source.num_tokens - first;
        if (left <= 2 * SlotBatch::kTokens && is_last_of_ticket()) tickets_.draw_ahead();
        if (left > SlotBatch::kTokens) {
          next_slots_.load(source.slots + first + SlotBatch::kTokens, left - SlotBatch::kTokens,
                           lane_);
        } else {
          next = prefetch_next();
        }
        fill_stages(slots, left);
      }
      source = next;
    }
    stages_.finish();
    if constexpr (kIsKey) {
      publish_end();
      tickets_.end();
    }
  }

 private:
  // The batch's items, one per lane.
  __device__ __forceinline__ ItemSource load_batch() const {
    if (batch_.count == 0) return ItemSource::none();
    return ItemSource::load(params_, batch_.first_item + min(lane_, batch_.count - 1));
  }

  __device__ __forceinline__ bool is_last_of_ticket() const {
    return batch_.first_item + index_ + 1 == batch_.ticket_end;
  }

  // Goes on to the next item and has its slots and requests on their way. The present one's last stages may still be
  // to fill.
  __device__ __forceinline__ ItemSource prefetch_next() {
    if (++index_ == batch_.count) {
      batch_ = tickets_.after(batch_, stages_);
      lane_source_ = load_batch();
      index_ = 0;
    }
    const ItemSource next = lane_source_.of_lane(index_);
    prefetch(next);
    return next;
  }

  __device__ __forceinline__ void prefetch(const ItemSource& source) {
    next_slots_.load(source.slots, source.num_tokens, lane_);
    load_requests(source);
  }

  __device__ __forceinline__ void set_head(int kv_head) {
    stages_.set_head(params_, kv_head);
    first_head_ = kv_head * params_.rows.group_size;
  }

  // Up to SlotBatch::kStages stages, of an item of which num_tokens tokens are left.
  __device__ __forceinline__ void fill_stages(SlotBatch slots, int num_tokens) {
#pragma unroll 1  // unrolled, the copies would fill the instruction cache
    for (int token = 0; token < min(num_tokens, SlotBatch::kTokens); token += kStageTokens) {
      stages_.fill(slots.pop_front(), num_tokens - token);
    }
  }

  // The request of each query row of an item: lane l holds rows l and 32 + l.
  __device__ __forceinline__ void load_requests(const ItemSource& source) {
    if constexpr (kIsKey) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int index = request_of_row(params_.rows, 32 * i + lane_);
        if (index < source.num_requests) {
          const ItemRequest* request = params_.plan.item_requests + source.request_begin + index;
          requests_[i] = *reinterpret_cast<const int2*>(request);
        }
      }
    }
  }

  // Queries and record of an item, whose requests have been loaded.
  __device__ __forceinline__ void publish(const ItemSource& source) {
    const int units = tile_units(source.tile);
    const int first_unit = queries_.first_unit(units);
    for (int unit = queries_.next_unit; unit < first_unit + units; ++unit) {
      const uint32_t empty = ptx::shared_address(&storage_.queries_empty[unit % kQueryUnits]);
      stages_.wait(empty, ((unit / kQueryUnits) & 1) ^ 1);
      // A skipped unit is handed back at once, in the consumers' place: the item's own last units may be the
      // next lap of it.
      for (int warp = 0; unit < first_unit && warp < kConsumerWarps; ++warp) {
        ptx::barrier_arrive(empty);
      }
    }

    const int tile_rows = units * kUnitRows;
    const int num_rows = source.num_requests * params_.rows.group_size;
    ItemRecord& record = storage_.records[queries_.record()];
    if (lane_ == 0) {
      record.tile = source.tile;
      record.num_rows = num_rows;
      record.num_tokens = source.num_tokens;
    }
    uint32_t query_chunks[2];  // of this lane's rows, from the beginning of q
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 32 * i + lane_;
      const int head = first_head_ + head_of_row(params_.rows, row);
      query_chunks[i] = requests_[i].x * params_.q_stride_chunks + head * Copy::kChunks;
      const ItemRequest request{.request = requests_[i].x, .partial_slot = requests_[i].y};
      if (row < tile_rows) {
        record.targets[row] = row < num_rows ? row_target(request, num_q_heads_, head) : kNoTarget;
      }
    }
    for (int unit = 0; unit < units; ++unit) {
      copy_queries(first_unit, tile_rows, unit * kUnitRows, num_rows,
                   unit < 2 ? query_chunks[0] : query_chunks[1]);
    }

    release_record();
    queries_.advance(units);
  }

  __device__ __forceinline__ void publish_end() {
    const int unit = queries_.next_unit;
    ptx::barrier_wait(ptx::shared_address(&storage_.queries_empty[unit % kQueryUnits]),
                      ((unit / kQueryUnits) & 1) ^ 1);
    if (lane_ == 0) storage_.records[queries_.record()].tile = kNoMoreItems;
    release_record();
  }

  // All lanes, once a record is written and its copies are issued.
  __device__ __forceinline__ void release_record() {
    const uint32_t full = ptx::shared_address(&storage_.queries_full[queries_.record()]);
    ptx::barrier_arrive_after_copies(full);
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(full);
  }

  // 16 query rows from first_row on. lane_chunk: where in q lane l's row l % 32 begins.
  __device__ __forceinline__ void copy_queries(int first_unit, int tile_rows, int first_row,
                                               int num_rows, uint32_t lane_chunk) {
    const uint32_t target = ptx::shared_address(storage_.queries[first_unit % kQueryUnits]);
    const char* queries = static_cast<const char*>(params_.q);
    if constexpr (Copy::kWholeRows) queries += copy_.chunk(0) * kChunkBytes;
#pragma unroll
    for (int i = 0; i < Copy::copies(kUnitRows); ++i) {
      const int row = first_row + copy_.row(i);
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, row % 32);
      const bool valid = row < num_rows;
      const char* source = queries + uint64_t{valid ? chunk : 0} * kChunkBytes;
      if constexpr (!Copy::kWholeRows) source += copy_.chunk(i) * kChunkBytes;
      ptx::copy_async_16_or_zero(target + swizzled_offset(tile_rows, row, copy_.chunk(i)), source,
                                 valid);
    }
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int lane_;
  const int num_q_heads_;
  const Copy copy_;
  TicketQueue<Storage, kIsKey> tickets_;
  KvStages<T, Dims, kIsKey> stages_;
  ItemBatch batch_;
  ItemSource lane_source_;  // this lane's item of the batch
  int index_ = 0;           // in the batch, of the item whose slots were loaded last
  int first_head_;          // query heads of the KV head: first_head_ to first_head_ + group_size
  SlotBatch next_slots_;
  QueryPosition queries_;
  int2 requests_[2] = {};  // of this lane's rows of the item to be published next
};

}  // namespace pat
