// The producer warps of pack_decode: walk the items of the CTA's tickets, segment by segment, and keep the KV ring and
// the query ring full, across items and tickets, so that the consumers find the next item's data already there.
//
// Latency is hidden three times: descriptors are read for up to 32 items and segments at once (one per lane), slots
// four stages ahead, whatever segments these belong to, and KV as far ahead as the ring is long.
#pragma once

#include "decode_params.h"
#include "pack_decode/kv_stages.cuh"
#include "pack_decode/segment_source.cuh"
#include "pack_decode/ticket_queue.cuh"
#include "pack_decode/work_queue.cuh"

namespace pat {

// A producer's facts about a work item. Each lane holds one.
struct ItemSource {
  int32_t tile;
  int32_t num_requests;
  int32_t request_begin;
  int32_t num_segments;

  __device__ static ItemSource load(const DecodeParams& params, int index) {
    const WorkItem& item = params.plan.work_items[index];
    const int4 head = reinterpret_cast<const int4*>(&item)[0];
    return {head.x, head.y, head.z, item.num_segments};
  }

  __device__ __forceinline__ ItemSource of_lane(int lane) const {
    return {.tile = __shfl_sync(kFullWarp, tile, lane),
            .num_requests = __shfl_sync(kFullWarp, num_requests, lane),
            .request_begin = __shfl_sync(kFullWarp, request_begin, lane),
            .num_segments = __shfl_sync(kFullWarp, num_segments, lane)};
  }
};

// Up to 4 stages of one item, which may be of several segments.
struct StageBatch {
  static constexpr int kStages = 4;

  int32_t slots[kStages];        // lane l holds that of token l of each stage
  StageRecord records[kStages];  // of the stages
  int count = 0;                 // 0: there are no more items
  bool begins_item = false;

  __device__ __forceinline__ int32_t pop_front() {
    const int32_t front = slots[0];
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) {
      slots[i] = slots[i + 1];
      records[i] = records[i + 1];
    }
    return front;
  }
};

// Loads one operand of every item of a CTA. The K producer also draws the tickets. The V producer, whose stages are
// needed later, also loads queries and writes the records.
//
// Where values lie in the keys, the two load one half each of a stage, and others load queries (latent_producer.cuh).
// On mma.sync these two load queries as well, through the KV ring (latent_mma_stages.cuh).
template <typename Dims, bool kIsKey>
class Producer {
 public:
  using Storage = SharedStorage<Dims>;
  using QueryCopy = RowCopy<Dims::kKey * 2>;
  static constexpr bool kPublishes = !kIsKey && !Dims::kIsLatent;
  static constexpr int kFirstToken = Dims::kTokens > kStageTokens && !kIsKey ? kStageTokens : 0;

  __device__ Producer(const DecodeParams& params, Storage& storage, int lane)
      : params_(params),
        storage_(storage),
        lane_(lane),
        num_q_heads_(params.num_q_heads),
        query_copy_{lane},
        tickets_(params, storage, lane),
        stages_(params, storage, lane) {}

  __device__ __forceinline__ void run() {
    bool has_stages = begin_ticket<true>(tickets_.first());
    stages_.set_streams(exceeds_l2(tickets_.num_kv_tokens()));
    while (has_stages) {
      StageBatch batch = next_;  // none in the first round
      if (batch.begins_item) {
        set_head(ticket_.kv_head);
        if constexpr (kPublishes) publish();
        if constexpr (kHasPasses<Dims>) publish_pass();
      }
      // Behind the first copies of an item: they are what the consumers wait for. Else before all.
      const int turn = batch.begins_item ? 0 : -1;
      int i = turn;
#pragma unroll 1  // unrolled, the copies would fill the instruction cache
      do {
        if (i >= 0) {
          const StageRecord record = batch.records[0];
          stages_.fill(batch.pop_front(), record);
        }
        if (i > turn) continue;
        if (tokens_left_ <= StageBatch::kStages * Dims::kTokens && !has_pass()) {
          tickets_.draw_ahead();
        }
        prefetch();
      } while (++i < batch.count);
      has_stages = next_.count > 0;
    }
    if constexpr (kHasConverters<Dims>) stages_.end();
    if constexpr (kIsKey) tickets_.end();
    if constexpr (kPublishes) publish_end();
    if constexpr (kHasPasses<Dims>) stages_.end();
  }

 private:
  // True if the plan reads more than the L2 keeps for long. Where it reads less, hints cost up to 2%.
  __device__ __forceinline__ bool exceeds_l2(int32_t num_kv_tokens) const {
    constexpr int64_t kBytes = 16'000'000;  // measured on an H100, whose L2 has 50 MB
    return num_kv_tokens * (int64_t{Dims::kTokenBytes} * params_.num_kv_heads) > kBytes;
  }

  // kIsFirst: waits for the predecessor once the plan, which was there before that one began, has been read. All else
  // may be what the predecessor writes.
  template <bool kIsFirst>
  __device__ __forceinline__ bool begin_ticket(const TicketRange& ticket) {
    ticket_ = ticket;
    if (!ticket.has_items()) return false;
    next_item_ = ticket.first_item;
    next_segment_ = ticket.first_segment;
    load_items();
    start_item();
    load_segments<kIsFirst>();
    return true;
  }

  // The ticket's items from next_item_ on, one per lane.
  __device__ __forceinline__ void load_items() {
    first_lane_item_ = next_item_;
    lane_item_ = ItemSource::load(params_, min(next_item_ + lane_, ticket_.end_item - 1));
  }

  // The ticket's segments from next_segment_ on, one per lane.
  template <bool kWaits = false>
  __device__ __forceinline__ void load_segments() {
    first_lane_segment_ = next_segment_;
    const int index = next_segment_ + lane_;
    const int4 segment = SegmentSource::read(params_, min(index, ticket_.end_segment - 1));
    if constexpr (kWaits) ptx::wait_for_dependencies();
    lane_segment_ = SegmentSource::resolve(params_, segment);
    not_empty_ = __ballot_sync(kFullWarp, lane_segment_.num_tokens > 0);
    if constexpr (kIsKey) {
      const bool counts = index < ticket_.end_segment && lane_segment_.num_tokens > 0;
      tokens_left_ = next_segment_ + 32 < ticket_.end_segment
                         ? INT32_MAX
                         : __reduce_add_sync(kFullWarp, counts ? lane_segment_.num_tokens : 0);
    }
  }

  // The next item becomes the present one. false: there is none.
  __device__ __forceinline__ bool begin_item() {
    if (next_item_ == ticket_.end_item) return begin_ticket<false>(tickets_.next());
    if (next_item_ == first_lane_item_ + 32) load_items();
    start_item();
    return true;
  }

  __device__ __forceinline__ void start_item() {
    item_ = lane_item_.of_lane(next_item_ - first_lane_item_);
    ++next_item_;
    end_segment_ = next_segment_ + item_.num_segments;
    is_complete_ = false;
    is_new_ = true;
    first_row_ = 0;
    load_requests();
  }

  // True if rows of the present item follow those of the present pass.
  __device__ __forceinline__ bool has_pass() const {
    return kHasPasses<Dims> &&
           first_row_ + kPassRows < item_.num_requests * params_.rows.group_size;
  }

  // Goes back to the first segment of the present item, for its next rows. false: there are none.
  __device__ __forceinline__ bool begin_pass() {
    if (!has_pass()) return false;
    first_row_ += kPassRows;
    next_segment_ = end_segment_ - item_.num_segments;
    load_segments();
    is_complete_ = false;
    is_new_ = true;
    return true;
  }

  // Lists the item's segments that the lanes hold, next_segment_ being the first, as far as they are not empty.
  __device__ __forceinline__ void list_segments() {
    if (next_segment_ == first_lane_segment_ + 32) load_segments();
    const int first = next_segment_ - first_lane_segment_;
    const int end = min(end_segment_ - first_lane_segment_, 32);
    pending_ = not_empty_ & (kFullWarp << first) & (kFullWarp >> (32 - end));
    if constexpr (kHasPasses<Dims>) {
      // Those that count for a row of the pass.
      const int group_size = params_.rows.group_size;
      pending_ &= __ballot_sync(
          kFullWarp, lane_segment_.first_request() * group_size < first_row_ + kPassRows &&
                         lane_segment_.end_request() * group_size > first_row_);
    }
    next_segment_ = first_lane_segment_ + end;
  }

  // True if a listed segment has another stage. Goes on to the next one where the last has ended.
  __device__ __forceinline__ bool has_stage() {
    if (left_ > 0) return true;
    if (pending_ == 0) return false;
    const SegmentSource segment = lane_segment_.of_lane(__ffs(pending_) - 1);
    pending_ &= pending_ - 1;
    slots_ = segment.slots;
    left_ = segment.num_tokens;
    const int group_size = params_.rows.group_size;
    const int first = segment.first_request(), end = segment.end_request();
    record_ = StageRecord::of_rows(first * group_size, end * group_size,
                                   item_.num_requests * group_size, Dims::kTokens)
                  .template of_tile<Dims>(item_.tile)
                  .as_read_once(segment.is_read_once());
    return true;
  }

  // Has the slots of the next stages on their way, and the requests of an item that begins with them. The present
  // one's last stages may still be to fill.
  __device__ __forceinline__ void prefetch() {
    while (!has_stage()) {
      if (next_segment_ < end_segment_) {
        list_segments();
      } else if (!is_complete_) {
        // Without any KV, or what follows after the lanes' last segments is empty.
        next_.slots[0] = 0;
        next_.records[0] = StageRecord::empty().template of_tile<Dims>(item_.tile);
        next_.count = 1;
        next_.begins_item = is_new_;
        is_new_ = false;
        is_complete_ = true;
        return;
      } else if (!begin_pass() && !begin_item()) {
        next_.count = 0;
        return;
      }
    }
    next_.begins_item = is_new_;
    is_new_ = false;
    if (left_ > StageBatch::kStages * Dims::kTokens) {
#pragma unroll
      for (int i = 0; i < StageBatch::kStages; ++i) {
        next_.slots[i] = slots_[i * Dims::kTokens + kFirstToken + lane_];
        next_.records[i] = record_;
      }
      next_.count = StageBatch::kStages;
      slots_ += StageBatch::kStages * Dims::kTokens;
      left_ -= StageBatch::kStages * Dims::kTokens;
      if constexpr (kIsKey) tokens_left_ -= StageBatch::kStages * Dims::kTokens;
      return;
    }
    next_.count = 0;
#pragma unroll
    for (int i = 0; i < StageBatch::kStages; ++i) {
      if (!has_stage()) break;
      const int num_tokens = min(left_, Dims::kTokens);
      // On its way before the next stage is looked for: the first one's is waited for.
      const int token = kFirstToken + lane_;
      next_.slots[i] = token < num_tokens ? slots_[token] : 0;
      slots_ += Dims::kTokens;
      left_ -= Dims::kTokens;
      if constexpr (kIsKey) tokens_left_ -= num_tokens;
      is_complete_ = left_ <= 0 && pending_ == 0 && next_segment_ == end_segment_;
      next_.records[i] = record_.with_tokens(num_tokens).as_last(is_complete_);
      ++next_.count;
    }
  }

  __device__ __forceinline__ void set_head(int kv_head) {
    stages_.set_head(params_, kv_head);
    first_head_ = kv_head * params_.rows.group_size;
  }

  // The request of each query row of the item: lane l holds rows l and 32 + l.
  __device__ __forceinline__ void load_requests() {
    if constexpr (kPublishes || kHasPasses<Dims>) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int index = request_of_row(params_.rows, 32 * i + lane_);
        if (index < item_.num_requests) {
          const ItemRequest* request = params_.plan.item_requests + item_.request_begin + index;
          requests_[i] = *reinterpret_cast<const int2*>(request);
        }
      }
    }
  }

  // Queries and record of the item, whose requests have been loaded.
  __device__ __forceinline__ void publish() {
    const int units = tile_units(item_.tile);
    const int first_unit = queries_.first_unit(units);
    for (int unit = queries_.next_unit; unit < first_unit + units; ++unit) {
      const uint32_t empty = ptx::shared_address(&storage_.queries_empty[unit % kQueryUnits]);
      ptx::barrier_wait(empty, ((unit / kQueryUnits) & 1) ^ 1);
      // A skipped unit is handed back at once, in the consumers' place: the item's own last units may be the
      // next lap of it.
      for (int warp = 0; unit < first_unit && warp < kConsumerWarps; ++warp) {
        ptx::barrier_arrive(empty);
      }
    }

    const int tile_rows = units * kUnitRows;
    const int num_rows = item_.num_requests * params_.rows.group_size;
    ItemRecord& record = storage_.records[queries_.record()];
    if (lane_ == 0) {
      record.tile = item_.tile;
      record.num_rows = num_rows;
      // Without KV in the item, record_ is an earlier one's: then either answer is right.
      const bool mixes = item_.num_segments > 1 || !record_.counts_for_all_rows();
      record.mixed_item = mixes ? next_item_ - 1 : kNotMixed;
    }
    uint32_t query_chunks[2];  // of this lane's rows, from the beginning of q
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 32 * i + lane_;
      const int head = first_head_ + head_of_row(params_.rows, row);
      query_chunks[i] = requests_[i].x * params_.q.row_chunks + head * QueryCopy::kChunks;
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

  // Queries and record of the pass, whose requests have been loaded.
  __device__ __forceinline__ void publish_pass() {
    const int2 entry = first_row_ == 0 ? requests_[0] : requests_[1];
    const int row = first_row_ + lane_, head = first_head_ + head_of_row(params_.rows, row);
    // For an item without KV, record_ is an earlier one's: then either answer is right.
    const bool mixes = item_.num_segments > 1 || !record_.counts_for_all_rows();
    stages_.fill_queries({.request = entry.x, .partial_slot = entry.y}, head, first_row_,
                         item_.num_requests * params_.rows.group_size,
                         mixes ? next_item_ - 1 : kNotMixed);
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
    const char* queries = static_cast<const char*>(params_.q.data);
    if constexpr (QueryCopy::kWholeRows) queries += query_copy_.chunk(0) * kChunkBytes;
#pragma unroll
    for (int i = 0; i < QueryCopy::copies(kUnitRows); ++i) {
      const int row = first_row + query_copy_.row(i);
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, row % 32);
      const bool valid = row < num_rows;
      const char* source = queries + uint64_t{valid ? chunk : 0} * kChunkBytes;
      if constexpr (!QueryCopy::kWholeRows) source += query_copy_.chunk(i) * kChunkBytes;
      ptx::copy_async_16_or_zero(target + swizzled_offset(tile_rows, row, query_copy_.chunk(i)),
                                 source, valid);
    }
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int lane_;
  const int num_q_heads_;
  const QueryCopy query_copy_;
  TicketQueue<Storage, kIsKey> tickets_;
  KvStages<Dims, kIsKey> stages_;

  // Where prefetch() is: up to four stages ahead of what is filled.
  TicketRange ticket_;
  ItemSource lane_item_;        // first_lane_item_ + lane
  SegmentSource lane_segment_;  // first_lane_segment_ + lane
  int first_lane_item_;
  int first_lane_segment_;
  uint32_t not_empty_;           // lanes whose segment has KV
  int tokens_left_ = INT32_MAX;  // in the ticket, once the lanes hold its last segment
  int next_item_;
  int next_segment_ = 0;     // first of the item that is not listed
  ItemSource item_;          // the present item
  int end_segment_ = 0;      // its segments' end
  int first_row_ = 0;        // of the present pass
  bool is_complete_ = true;  // its last stage has been prefetched
  bool is_new_ = false;      // none of its stages has been
  uint32_t pending_ = 0;     // lanes whose segments of the item are to come
  const int32_t* slots_;     // of the present segment's next stage
  int left_ = 0;             // its tokens from there on
  StageRecord record_;       // of its whole stages
  StageBatch next_;

  int first_head_;  // query heads of the KV head: first_head_ to first_head_ + group_size
  QueryPosition queries_;
  int2 requests_[2] = {};  // of this lane's rows of the item
};

}  // namespace pat
