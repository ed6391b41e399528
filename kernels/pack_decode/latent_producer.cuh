// The producer warps of pack_decode for latent attention on wgmma. Two warps fill the KV ring; each copies half of
// every stage's tokens (producer.cuh walks the items). Two more warps load the queries; each loads half of every item's
// rows.
#pragma once

#include "decode_params.h"
#include "pack_decode/kv_stages.cuh"
#include "pack_decode/latent_storage.cuh"
#include "pack_decode/segment_source.cuh"
#include "pack_decode/ticket_queue.cuh"

namespace pat {

// Copies half of the tokens of every stage, in the order of the stages.
template <typename Dims, bool kIsKey>
  requires(kHasLatentWgmma<Dims>)
class KvStages<Dims, kIsKey> {
 public:
  using Storage = SharedStorage<Dims>;
  static constexpr int kFirstToken = kIsKey ? 0 : kStageTokens;
  static constexpr int kPanelBytes = Dims::kTokens * kPanelRowBytes;

  __device__ KvStages(const DecodeParams& params, Storage& storage, int lane)
      : params_(params), storage_(storage), copy_{lane} {}

  __device__ __forceinline__ void set_head(const DecodeParams&, int kv_head) {
    first_byte_ = kv_head * Dims::kTokenBytes;
  }

  // streams: whether KV that only one work item reads is copied as kWholeOnce.
  __device__ __forceinline__ void set_streams(bool streams) { streams_ = streams; }

  // Fills this warp's half of the next stage. lane_slot: the slot of token `lane` of this half.
  __device__ __forceinline__ void fill(int32_t lane_slot, const StageRecord& record) {
    const uint32_t target =
        ptx::shared_address(storage_.kv[ring_.stage]) + kFirstToken * kPanelRowBytes;
    const int num_tokens = record.num_tokens() - kFirstToken;
    const bool is_read_once = streams_ && record.is_read_once();
    const int32_t first_slot = __shfl_sync(kFullWarp, lane_slot, 0);
    if (params_.has_kv_maps && num_tokens >= kStageTokens &&
        __all_sync(kFullWarp, lane_slot == first_slot + copy_.lane)) {
      copy_run(target, first_slot, record, is_read_once);
    } else if (num_tokens < kStageTokens) {
      copy<StageCopy::kPart>(target, lane_slot, record);
    } else if (is_read_once) {
      copy<StageCopy::kWholeOnce>(target, lane_slot, record);
    } else {
      copy<StageCopy::kWhole>(target, lane_slot, record);
    }
    ring_.advance();
  }

 private:
  // Copies this warp's tokens. With kPart, zeroes the tokens from num_tokens on, because a probability of 0 times
  // leftover data could be NaN.
  template <StageCopy kKind>
  __device__ __forceinline__ void copy(uint32_t target, int32_t lane_slot,
                                       const StageRecord& record) const {
    const int num_tokens = record.num_tokens() - kFirstToken;
    const PanelSources sources(static_cast<const char*>(params_.k_cache) + first_byte_,
                               params_.k_slot_bytes, lane_slot, copy_);
    uint32_t full;
#pragma unroll
    for (int panel = 0; panel < Dims::kKeyPanels; ++panel) {
      if (panel % kPartPanels == 0) full = begin(panel / kPartPanels, record);
      sources.copy_panel<kKind>(target + panel * kPanelBytes, panel, num_tokens, copy_);
      if (is_last_of_part(panel)) ptx::barrier_arrive_after_copies(full);
    }
  }

  __device__ __forceinline__ static constexpr bool is_last_of_part(int panel) {
    return panel % kPartPanels == kPartPanels - 1 || panel == Dims::kKeyPanels - 1;
  }

  // Copies consecutive slots, with one TMA copy per panel.
  __device__ __forceinline__ void copy_run(uint32_t target, int32_t first_slot,
                                           const StageRecord& record, bool is_read_once) const {
    const void* map = &params_.kv_maps[0];
    uint32_t full;
#pragma unroll
    for (int panel = 0; panel < Dims::kKeyPanels; ++panel) {
      if (panel % kPartPanels == 0) full = begin(panel / kPartPanels, record);
      if (copy_.lane == 0) {
        const uint32_t box = target + panel * kPanelBytes;
        const int column = first_byte_ + panel * kPanelRowBytes;
        ptx::barrier_expect(full, kStageTokens * kPanelRowBytes);
        if (is_read_once) {
          ptx::copy_box(box, map, column, first_slot, full, ptx::evict_first());
        } else {
          ptx::copy_box(box, map, column, first_slot, full);
        }
        if (is_last_of_part(panel)) ptx::barrier_arrive_for<32>(full);
      }
      __syncwarp();
    }
  }

  // Waits until a part of the stage may be filled. Returns the barrier for the part's copies. The stage's record is
  // stored with the last part, because all consumers release that part.
  __device__ __forceinline__ uint32_t begin(int part, const StageRecord& record) const {
    const int stage = ring_.stage;
    const uint32_t full = ptx::shared_address(&storage_.kv_full[stage][part]);
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[stage][part]), ring_.parity ^ 1);
    if (kIsKey && part == kStageParts - 1) {
      ptx::store_and_arrive(ptx::shared_address(&storage_.stage_records[stage]), record.packed,
                            full, copy_.lane == 0);
    }
    return full;
  }

  const DecodeParams& params_;
  Storage& storage_;
  const PanelCopy copy_;
  bool streams_ = false;
  int32_t first_byte_;  // offset of the KV head's row in a slot
  RingPosition<Storage::kStages> ring_;
};

// For each of a CTA's items, loads 32 of its 64 query rows and writes their part of the item's record.
template <typename Dims>
class LatentQueryProducer {
 public:
  using Storage = SharedStorage<Dims>;

  // first_row: first row that this warp loads, 0 or 32.
  __device__ LatentQueryProducer(const DecodeParams& params, Storage& storage, int first_row,
                                 int lane)
      : params_(params),
        storage_(storage),
        first_row_(first_row),
        lane_(lane),
        tickets_(params, storage, lane) {}

  __device__ __forceinline__ void run() {
    TicketRange ticket = tickets_.first();
    ptx::wait_for_dependencies();
    for (; ticket.has_items(); ticket = tickets_.next()) {
#pragma unroll 1
      for (int item = ticket.first_item; item < ticket.end_item; ++item) {
        publish(item, ticket.kv_head * params_.rows.group_size);
      }
    }
    wait();
    if (lane_ == 0) record().tile = kNoMoreItems;
    release();
  }

 private:
  __device__ __forceinline__ ItemRecord& record() const {
    return storage_.records[num_items_ % kLatentRecords];
  }

  // Waits until the consumers have read the previous item's queries.
  __device__ __forceinline__ void wait() const {
    ptx::barrier_wait(ptx::shared_address(&storage_.queries_empty), num_items_ & 1 ^ 1);
  }

  // Announces the item to the consumers. All lanes call it after they have written the record and issued the copies.
  __device__ __forceinline__ void release() {
    const uint32_t full = ptx::shared_address(&storage_.queries_full);
    ptx::barrier_arrive_after_copies(full);
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(full);
    ++num_items_;
  }

  __device__ __forceinline__ void publish(int index, int first_head) {
    const WorkItem& item = params_.plan.work_items[index];
    const int row = first_row_ + lane_;
    const int request_index = request_of_row(params_.rows, row);
    const int head = first_head + head_of_row(params_.rows, row);
    const int num_requests = item.num_requests, num_rows = num_requests * params_.rows.group_size;
    ItemRequest request{.request = 0, .partial_slot = kDirectStore};
    if (request_index < num_requests) {
      request = params_.plan.item_requests[item.request_begin + request_index];
    }
    const KvSegment segment = params_.plan.kv_segments[item.segment_begin];
    const bool mixes = item.num_segments > 1 || segment.first_request() != 0 ||
                       segment.end_request() != num_requests;
    const int tile = item.tile;

    wait();
    if (lane_ == 0 && first_row_ == 0) {
      record().tile = tile;
      record().num_rows = num_rows;
      record().mixed_item = mixes ? index : kNotMixed;
    }
    record().targets[row] =
        row < num_rows ? row_target(request, params_.num_q_heads, head) : kNoTarget;
    const auto chunk = [&](const QueryArray& queries) {
      return request.request * queries.row_chunks + head * queries.head_chunks;
    };
    copy_panels<0, Dims::kQueryPanels - 1>(params_.q, chunk(params_.q), num_rows);
    copy_panels<Dims::kQueryPanels - 1, Dims::kQueryPanels>(params_.q_rope, chunk(params_.q_rope),
                                                            num_rows);
    release();
  }

  // Copies query panels. lane_chunk: chunk of `queries` at which row first_row_ + lane of the item begins.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void copy_panels(const QueryArray& queries, uint32_t lane_chunk,
                                              int num_rows) const {
    const PanelCopy copy{lane_};
    const uint32_t target = ptx::shared_address(storage_.queries) + first_row_ * kPanelRowBytes;
    const char* data = static_cast<const char*>(queries.data) + copy.source();
#pragma unroll
    for (int i = 0; i < PanelCopy::kCopies; ++i) {
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, copy.row(i));
      const bool valid = first_row_ + copy.row(i) < num_rows;
      const char* source = data + uint64_t{valid ? chunk : 0} * kChunkBytes;
#pragma unroll
      for (int panel = kBegin; panel < kEnd; ++panel) {
        ptx::copy_async_16_or_zero(target + panel * kMaxTileRows * kPanelRowBytes + copy.target(i),
                                   source + (panel - kBegin) * kPanelRowBytes, valid);
      }
    }
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int first_row_;
  const int lane_;
  TicketQueue<Storage, false> tickets_;
  uint32_t num_items_ = 0;
};

}  // namespace pat
