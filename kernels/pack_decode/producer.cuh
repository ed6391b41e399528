// The producer warps of pack_decode. They walk the items of the CTA's tickets, segment by segment, and keep the KV ring
// and the query ring full across items and tickets, so that the consumers find the next item's data already there.
//
// Three kinds of loads are issued early to hide their latency: descriptors for up to 32 items and 32 segments at once
// (one per lane), slots up to four stages ahead, and KV as far ahead as the ring is long.
//
// The walk is in the first state of this list whose condition holds. look_ahead() leaves one state after the other
// until it has a batch of stages, or until there are no more items. Latent attention on mma.sync reads an item's
// segments once for every 32 rows; each time is a pass. Elsewhere, an item has one pass.
//
//   state        holds if                               left by
//   in segment   left_ > 0                              take_whole_stages(), take_last_stages(): a batch
//   listed       listed_ != 0                           begin_segment() -> in segment
//   unlisted     next_segment_ < end_segment_           list_segments() -> listed, or the next state that holds
//   unclosed     !is_closed_: last stage not taken yet  take_empty_stage(): a batch
//   pass ended   has_pass()                             begin_pass() -> unlisted
//   item ended   next_item_ < ticket_.end_item          begin_item() -> unlisted
//   ticket ended otherwise                              begin_ticket() -> unlisted, or the end of the walk
//
// The rings. In lap n, a full barrier completes with parity n % 2. A warp that fills a stage waits for the empty
// barrier with the other parity, so in the first lap it does not wait.
//
//   barrier         arrivals                                              waited for by
//   kv_full         both producers' lanes after their copies, and the     consumers, converters
//                   K producer's lane 0 after the stage's record
//   kv_ready        converter warps (one-byte KV on Hopper)               consumers of tiles for wgmma
//   kv_empty        consumers, converters                                 both producers
//   queries_full    V producer's lanes after their copies, and its        consumers
//                   lane 0 after the item's record
//   queries_empty   consumers; for a skipped unit, the V producer         V producer
//   drawn_full      K producer                                            V producer (ticket_queue.cuh)
//   drawn_empty     V producer                                            K producer
//
// In latent attention on wgmma, other warps load the queries, and each part of a stage has its own kv_full and kv_empty
// (latent_storage.cuh).
#pragma once

#include "decode_params.h"
#include "pack_decode/kv_stages.cuh"
#include "pack_decode/query_ring.cuh"
#include "pack_decode/segment_source.cuh"
#include "pack_decode/stage_batch.cuh"
#include "pack_decode/ticket_queue.cuh"
#include "pack_decode/work_queue.cuh"

namespace pat {

// Loads the keys (kIsKey) or the values of every item of a CTA. The K producer also draws the tickets. The V producer
// has more time, because values are needed later, so it also loads the queries and writes the records.
//
// In latent attention, values lie in the keys, and each of the two producers loads half of a stage. On wgmma, other
// warps load the queries (latent_producer.cuh). On mma.sync, the two producers also load the queries, through the KV
// ring (latent_mma_stages.cuh).
template <typename Dims, bool kIsKey>
class Producer {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr bool kPublishes = !kIsKey && !Dims::kIsLatent;
  static constexpr int kFirstToken = Dims::kTokens > kStageTokens && !kIsKey ? kStageTokens : 0;
  static constexpr int kBatchTokens = StageBatch::kStages * Dims::kTokens;

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
      StageBatch batch = next_;  // empty in the first round
      if (batch.begins_pass) {
        set_head(ticket_.kv_head);
        if constexpr (kPublishes) publish();
        if constexpr (kHasPasses<Dims>) publish_pass();
      }
      // Calls look_ahead() once per batch. If the batch begins a pass, its first stage is filled before the call,
      // because the consumers already wait for this stage. Otherwise the call comes first. One loop does both, so that
      // there is one copy of the code.
      const int turn = batch.begins_pass ? 0 : -1;
      int i = turn;
#pragma unroll 1  // unrolled copies would fill the instruction cache
      do {
        if (i >= 0) {
          const StageRecord record = batch.records[0];
          stages_.fill(batch.pop_front(), record);
        }
        if (i > turn) continue;
        if (tokens_left_ <= kBatchTokens && !has_pass()) {
          tickets_.draw_ahead();
        }
        look_ahead();
      } while (++i < batch.count);
      has_stages = next_.count > 0;
    }
    if constexpr (kHasConverters<Dims>) stages_.end();
    if constexpr (kIsKey) tickets_.end();
    if constexpr (kPublishes) publish_end();
    if constexpr (kHasPasses<Dims>) stages_.end();
  }

 private:
  // True if the plan reads so much KV that the L2 cannot keep it. If the plan reads less, eviction hints cost up to 2%
  // of the kernel's time.
  __device__ __forceinline__ bool exceeds_l2(int32_t num_kv_tokens) const {
    constexpr int64_t kBytes = 16'000'000;  // tuned on an H100, which has 50 MB of L2
    return num_kv_tokens * (int64_t{Dims::kTokenBytes} * params_.num_kv_heads) > kBytes;
  }

  // Makes `ticket` the current ticket. Returns false if it is empty. kIsFirst: reads the plan, and then waits for the
  // preceding kernel, which may write everything that this kernel reads except the plan.
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

  // Loads the ticket's next 32 items, one per lane.
  __device__ __forceinline__ void load_items() {
    first_lane_item_ = next_item_;
    lane_item_ = ItemSource::load(params_, min(next_item_ + lane_, ticket_.end_item - 1));
  }

  // Loads the ticket's next 32 segments, one per lane. kWaits: after the reads of the plan, and before all other reads,
  // waits for the preceding kernel.
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

  // Makes the next item the current one. Returns false if no item is left.
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
    is_closed_ = false;
    is_new_ = true;
    first_row_ = 0;
    load_requests();
  }

  // True if the current item has more rows, for another pass.
  __device__ __forceinline__ bool has_pass() const {
    return kHasPasses<Dims> &&
           first_row_ + kPassRows < item_.num_requests * params_.rows.group_size;
  }

  // Returns to the first segment of the current item, for its next rows. Returns false if the item has no more rows.
  __device__ __forceinline__ bool begin_pass() {
    if (!has_pass()) return false;
    first_row_ += kPassRows;
    next_segment_ = end_segment_ - item_.num_segments;
    load_segments();
    is_closed_ = false;
    is_new_ = true;
    return true;
  }

  // Lists the item's next segments that have KV: sets listed_ to the lanes that hold them.
  __device__ __forceinline__ void list_segments() {
    if (next_segment_ == first_lane_segment_ + 32) load_segments();
    const int first = next_segment_ - first_lane_segment_;
    const int end = min(end_segment_ - first_lane_segment_, 32);
    listed_ = not_empty_ & (kFullWarp << first) & (kFullWarp >> (32 - end));
    if constexpr (kHasPasses<Dims>) {
      // Drops segments to which no row of the pass attends.
      const int group_size = params_.rows.group_size;
      listed_ &= __ballot_sync(
          kFullWarp, lane_segment_.first_request() * group_size < first_row_ + kPassRows &&
                         lane_segment_.end_request() * group_size > first_row_);
    }
    next_segment_ = first_lane_segment_ + end;
    if (listed_ >> lane_ & 1) {
      const int group_size = params_.rows.group_size;
      lane_record_ = StageRecord::of_rows(lane_segment_.first_request() * group_size,
                                          lane_segment_.end_request() * group_size,
                                          item_.num_requests * group_size, Dims::kTokens)
                         .template of_tile<Dims>(item_.tile)
                         .as_read_once(lane_segment_.is_read_once());
    }
  }

  // If the current segment has ended, begins the next listed segment. Returns false if no segment is listed.
  __device__ __forceinline__ bool has_stage() {
    if (left_ > 0) return true;
    if (listed_ == 0) return false;
    begin_segment();
    return true;
  }

  // Begins the first listed segment.
  __device__ __forceinline__ void begin_segment() {
    const int lane = __ffs(listed_) - 1;
    listed_ &= listed_ - 1;
    slots_ = lane_segment_.slots_of_lane(lane);
    left_ = __shfl_sync(kFullWarp, lane_segment_.num_tokens, lane);
    record_ = {__shfl_sync(kFullWarp, lane_record_.packed, lane)};
  }

  // Puts the walk's next stages into next_ and starts to load their slots. If these stages begin an item, also starts
  // to load the item's requests. Some stages of the previous batch may still have to be filled.
  __device__ __forceinline__ void look_ahead() {
    while (!has_stage()) {
      if (next_segment_ < end_segment_) {
        list_segments();
      } else if (!is_closed_) {
        take_empty_stage();
        return;
      } else if (!begin_pass() && !begin_item()) {
        next_.count = 0;
        return;
      }
    }
    begin_batch();
    if (left_ > kBatchTokens) {
      take_whole_stages();
    } else {
      take_last_stages();
    }
  }

  __device__ __forceinline__ void begin_batch() {
    next_.begins_pass = is_new_;
    is_new_ = false;
  }

  // Makes a batch of one empty stage. It is the only stage of an item without KV, or the last stage of an item whose
  // remaining segments turned out to be empty.
  __device__ __forceinline__ void take_empty_stage() {
    next_.slots[0] = 0;
    next_.records[0] = StageRecord::empty().template of_tile<Dims>(item_.tile);
    next_.count = 1;
    begin_batch();
    is_closed_ = true;
  }

  // Makes a batch of full stages of the current segment, which has more tokens than the batch.
  __device__ __forceinline__ void take_whole_stages() {
#pragma unroll
    for (int i = 0; i < StageBatch::kStages; ++i) {
      next_.slots[i] = slots_[i * Dims::kTokens + kFirstToken + lane_];
      next_.records[i] = record_;
    }
    next_.count = StageBatch::kStages;
    slots_ += kBatchTokens;
    left_ -= kBatchTokens;
    if constexpr (kIsKey) tokens_left_ -= kBatchTokens;
  }

  // Makes a batch of the last stages of the current segment and of stages of the segments listed after it.
  __device__ __forceinline__ void take_last_stages() {
    next_.count = 0;
#pragma unroll
    for (int i = 0; i < StageBatch::kStages; ++i) {
      if (!has_stage()) break;
      const int num_tokens = min(left_, Dims::kTokens);
      // Issues this load before it calls has_stage() for the next stage: the warp will soon wait for the batch's first
      // slots, so their load must start early.
      const int token = kFirstToken + lane_;
      next_.slots[i] = token < num_tokens ? slots_[token] : 0;
      slots_ += Dims::kTokens;
      left_ -= Dims::kTokens;
      if constexpr (kIsKey) tokens_left_ -= num_tokens;
      is_closed_ = left_ <= 0 && listed_ == 0 && next_segment_ == end_segment_;
      next_.records[i] = record_.with_tokens(num_tokens).as_last(is_closed_);
      ++next_.count;
    }
  }

  __device__ __forceinline__ void set_head(int kv_head) {
    stages_.set_head(params_, kv_head);
    first_head_ = kv_head * params_.rows.group_size;
  }

  // Loads the request of each query row of the item. Lane l holds those of rows l and 32 + l.
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

  // Loads the item's queries and writes the item's record. load_requests() must have been called for the item.
  __device__ __forceinline__ void publish() {
    const int units = tile_units(item_.tile);
    const int first_unit = queries_.first_unit(units);
    wait_for_units(storage_, queries_, first_unit, first_unit + units);

    const int tile_rows = units * kUnitRows;
    const int num_rows = item_.num_requests * params_.rows.group_size;
    ItemRecord& record = storage_.records[queries_.record()];
    if (lane_ == 0) {
      record.tile = item_.tile;
      record.num_rows = num_rows;
      // If the item has no KV, record_ still belongs to an earlier item. Then either value of `mixes` is correct.
      const bool mixes = item_.num_segments > 1 || !record_.counts_for_all_rows();
      record.mixed_item = mixes ? next_item_ - 1 : kNotMixed;
    }
    uint32_t query_chunks[2];  // chunks of q at which this lane's rows begin
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 32 * i + lane_;
      const int head = first_head_ + head_of_row(params_.rows, row);
      query_chunks[i] = requests_[i].x * params_.q.row_chunks + head * QueryCopy<Dims>::kChunks;
      const ItemRequest request{.request = requests_[i].x, .partial_slot = requests_[i].y};
      if (row < tile_rows) {
        record.targets[row] = row < num_rows ? row_target(request, num_q_heads_, head) : kNoTarget;
      }
    }
    for (int unit = 0; unit < units; ++unit) {
      copy_queries<Dims>(params_, storage_, query_copy_, first_unit, query_rows<Dims>(units),
                         unit * kUnitRows, num_rows, unit < 2 ? query_chunks[0] : query_chunks[1]);
    }

    release_record(storage_, queries_, lane_);
    queries_.advance(units);
  }

  // Loads the queries of the pass and writes the pass's record. load_requests() must have been called for the item.
  __device__ __forceinline__ void publish_pass() {
    const int2 entry = first_row_ == 0 ? requests_[0] : requests_[1];
    const int row = first_row_ + lane_, head = first_head_ + head_of_row(params_.rows, row);
    // The same rule as in publish(), for items with passes.
    const bool mixes = item_.num_segments > 1 || !record_.counts_for_all_rows();
    stages_.fill_queries({.request = entry.x, .partial_slot = entry.y}, head, first_row_,
                         item_.num_requests * params_.rows.group_size,
                         mixes ? next_item_ - 1 : kNotMixed);
  }

  __device__ __forceinline__ void publish_end() {
    wait_for_unit(storage_, queries_.next_unit);
    if (lane_ == 0) storage_.records[queries_.record()].tile = kNoMoreItems;
    release_record(storage_, queries_, lane_);
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int lane_;
  const int num_q_heads_;
  const QueryCopy<Dims> query_copy_;
  TicketQueue<Storage, kIsKey> tickets_;
  KvStages<Dims, kIsKey> stages_;

  // State of the walk, which is up to four stages ahead of the stages that have been filled.
  TicketRange ticket_;
  ItemSource lane_item_;        // item first_lane_item_ + lane
  SegmentSource lane_segment_;  // segment first_lane_segment_ + lane
  StageRecord lane_record_;     // of that segment's full stages, if it is listed
  int first_lane_item_;
  int first_lane_segment_;
  uint32_t not_empty_;           // bit mask of the lanes whose segment has KV
  int tokens_left_ = INT32_MAX;  // tokens left in the ticket; INT32_MAX: unknown
  int next_item_;
  int next_segment_ = 0;   // the item's first unlisted segment
  ItemSource item_;        // the current item
  int end_segment_ = 0;    // the end of the item's segments
  int first_row_ = 0;      // first row of the current pass
  bool is_closed_ = true;  // the pass's last stage is in a batch
  bool is_new_ = false;    // no stage of the pass is in a batch yet
  uint32_t listed_ = 0;    // bit mask of the lanes with listed segments
  const int32_t* slots_;   // slots of the current segment's next stage
  int left_ = 0;           // tokens left in the current segment
  StageRecord record_;     // record of the current segment's full stages
  StageBatch next_;

  int first_head_;  // first of the group_size query heads of the KV head
  QueryPosition queries_;
  int2 requests_[2] = {};  // requests of the item's rows lane and 32 + lane
};

}  // namespace pat
