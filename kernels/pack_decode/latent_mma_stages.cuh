// Shared memory of pack_decode for latent attention on mma.sync, and how the producer warps fill it (producer.cuh walks
// the items). A CTA computes 32 query rows at a time. An item with more rows takes two passes over its KV.
//
//   KV ring     2 to 4 stages. The first stage of a pass has the pass's queries, which the consumers keep in registers.
//               Each further stage has 32 tokens.
//   exchange    partial scores of a stage (latent_mma_body.cuh)
//   records     what the consumers must know of a pass
#pragma once

#include "decode_params.h"
#include "pack_decode/kv_stages.cuh"
#include "pack_decode/work_queue.cuh"

namespace pat {

inline constexpr int kPassUnits = kPassRows / kUnitRows;
static_assert(kPassRows == LatentPart::kRows &&
              kPassUnits * LatentPart::kParts == kLatentConsumerWarps);
static_assert(kLatentTileTable[0].block_q == kPassRows &&
              kLatentTileTable[0].block_kv == LatentPart::kRows &&
              kLatentTileTable[0].num_warps == kLatentConsumerWarps &&
              kLatentTileTable.largest_block_q() <= kMaxTileRows);
// Number of pass records in shared memory. The ring holds the first stages of at most (kMaxPassStages + 1) / 2 passes,
// because a pass has at least two stages. One more record is needed: a consumer may still be at the end of the pass
// before those in the ring.
inline constexpr int kPassRecords = (kMaxPassStages + 1) / 2 + 1;

struct PassRecord {
  int32_t first_unit;  // the pass's first unit, counted in the item; or kNoMoreItems
  int32_t mixed_item;  // ItemRecord::mixed_item
  RowTarget targets[kPassRows];
};

// The shared memory of a CTA, except the KV ring.
template <typename Dims>
  requires(kHasPasses<Dims>)
struct SharedState<Dims> {
  // exchange[unit][warp][group of 8 tokens][lane]: the warp's partial scores or, for the group that this warp adds up,
  // the sums.
  alignas(kSharedAlignment) float4 exchange[kPassUnits][LatentPart::kParts][Dims::kTokens / 8][32];
  PassRecord records[kPassRecords];
  StageRecord stage_records[kMaxPassStages];
  int32_t drawn[kDrawsAhead];  // draws that the K producer passes to the V producer
  alignas(8) uint64_t kv_full[kMaxPassStages];
  uint64_t kv_empty[kMaxPassStages];
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
  float query_factors[Dims::kIsFp8 ? kLatentConsumerWarps : 1][kUnitRows];  // narrow_queries()
};

// Fills half of the panels of every stage, in the order of the stages.
template <typename Dims, bool kIsKey>
  requires(kHasPasses<Dims>)
class KvStages<Dims, kIsKey> {
 public:
  using Storage = SharedStorage<Dims>;
  // The panels that this producer copies: the first half (kIsKey) or the second half.
  template <int kPanels>
  static constexpr int kBegin = kIsKey ? 0 : (kPanels + 1) / 2;
  template <int kPanels>
  static constexpr int kEnd = kIsKey ? (kPanels + 1) / 2 : kPanels;
  static_assert(Dims::kTokens == LatentPart::kRows);

  __device__ KvStages(const DecodeParams& params, Storage& storage, int lane)
      : params_(params), storage_(storage), copy_{lane} {}

  __device__ __forceinline__ void set_head(const DecodeParams&, int kv_head) {
    first_byte_ = kv_head * Dims::kTokenBytes;
  }

  // streams: whether KV that only one work item reads is copied as kWholeOnce.
  __device__ __forceinline__ void set_streams(bool streams) { streams_ = streams; }

  // Fills this producer's panels of the next stage. lane_slot: the slot of the stage's token `lane`.
  __device__ __forceinline__ void fill(int32_t lane_slot, const StageRecord& record) {
    const uint32_t full = begin();
    if constexpr (kIsKey) {
      ptx::store_and_arrive(ptx::shared_address(&storage_.stage_records[ring_.stage]),
                            record.packed, full, copy_.lane == 0);
    }
    const int num_tokens = record.num_tokens();
    if (num_tokens < Dims::kTokens) {
      copy<StageCopy::kPart>(lane_slot, num_tokens);
    } else if (streams_ && record.is_read_once()) {
      copy<StageCopy::kWholeOnce>(lane_slot, num_tokens);
    } else {
      copy<StageCopy::kWhole>(lane_slot, num_tokens);
    }
    finish(full);
  }

  // Fills the next stage with the queries of a pass: rows [first_row, first_row + kPassRows) of the item's num_rows
  // rows. request, head: the request and the query head of row first_row + lane.
  __device__ __forceinline__ void fill_queries(const ItemRequest& request, int head, int first_row,
                                               int num_rows, int mixed_item) {
    const uint32_t full = begin();
    const int lane = copy_.lane, rows_left = num_rows - first_row;
    if constexpr (kIsKey) {
      PassRecord& record = storage_.records[num_passes_ % kPassRecords];
      if (lane == 0) {
        record.first_unit = first_row / kUnitRows;
        record.mixed_item = mixed_item;
      }
      record.targets[lane] =
          lane < rows_left ? row_target(request, params_.num_q_heads, head) : kNoTarget;
      release_record(full);
    }
    constexpr int kRope = Dims::kQueryPanels - 1;
    const auto chunk = [&](const QueryArray& queries) {
      return request.request * queries.row_chunks + head * queries.head_chunks;
    };
    constexpr int kPanels = Dims::kQueryPanels;
    copy_queries<kBegin<kPanels>, std::min(kEnd<kPanels>, kRope)>(params_.q, chunk(params_.q),
                                                                  rows_left);
    if constexpr (kEnd<kPanels> > kRope) {
      copy_queries<kRope, kPanels>(params_.q_rope, chunk(params_.q_rope), rows_left);
    }
    finish(full);
  }

  // Marks the end after the last pass.
  __device__ __forceinline__ void end() {
    const uint32_t full = begin();
    if constexpr (kIsKey) {
      if (copy_.lane == 0) storage_.records[num_passes_ % kPassRecords].first_unit = kNoMoreItems;
      release_record(full);
    }
    finish(full);
  }

 private:
  // Waits until the next stage may be filled. Returns the barrier for the stage's copies.
  __device__ __forceinline__ uint32_t begin() const {
    ptx::barrier_wait(ptx::shared_address(&storage_.kv_empty[ring_.stage]), ring_.parity ^ 1);
    return ptx::shared_address(&storage_.kv_full[ring_.stage]);
  }

  __device__ __forceinline__ void finish(uint32_t full) {
    ptx::barrier_arrive_after_copies(full);
    ring_.advance();
  }

  // Publishes a pass's record after the lanes have written it. A stage with queries has no StageRecord, so this arrival
  // takes the place of the StageRecord's arrival.
  __device__ __forceinline__ void release_record(uint32_t full) {
    __syncwarp();
    if (copy_.lane == 0) ptx::barrier_arrive(full);
    ++num_passes_;
  }

  __device__ __forceinline__ uint32_t target() const {
    return ptx::shared_address(storage_.kv[ring_.stage]);
  }

  // Copies this producer's panels. With kPart, zeroes the tokens from num_tokens on, because a probability of 0 times
  // leftover data could be NaN.
  template <StageCopy kKind>
  __device__ __forceinline__ void copy(int32_t lane_slot, int num_tokens) const {
    const char* cache = static_cast<const char*>(params_.k_cache) + first_byte_;
    const PanelSources sources(cache, params_.k_slot_bytes, lane_slot, copy_);
    const uint32_t target = this->target();
    constexpr int kPanels = Dims::kKeyPanels;
#pragma unroll
    for (int panel = kBegin<kPanels>; panel < kEnd<kPanels>; ++panel) {
      const bool is_part = (panel + 1) * kPanelRowBytes > Dims::kTokenBytes;
      if (is_part && panel * kPanelRowBytes + copy_.source() >= Dims::kTokenBytes) continue;
      sources.copy_panel<kKind>(target + panel * LatentPart::kPanelBytes, panel, num_tokens, copy_);
    }
  }

  // Copies query panels. lane_chunk: chunk of `queries` at which row `lane` of the pass begins. Zeroes the rows from
  // rows_left on.
  template <int kBeginPanel, int kEndPanel>
  __device__ __forceinline__ void copy_queries(const QueryArray& queries, uint32_t lane_chunk,
                                               int rows_left) const {
    const uint32_t target = this->target();
    const char* data = static_cast<const char*>(queries.data) + copy_.source();
#pragma unroll
    for (int i = 0; i < PanelCopy::kCopies; ++i) {
      const uint32_t chunk = __shfl_sync(kFullWarp, lane_chunk, copy_.row(i));
      const bool valid = copy_.row(i) < rows_left;
      const char* source = data + uint64_t{valid ? chunk : 0} * kChunkBytes;
#pragma unroll
      for (int panel = kBeginPanel; panel < kEndPanel; ++panel) {
        // The last panel comes from q_rope, where its columns begin at 0.
        const int column = kEndPanel == Dims::kQueryPanels ? panel - kBeginPanel : panel;
        ptx::copy_async_16_or_zero(target + panel * LatentPart::kPanelBytes + copy_.target(i),
                                   source + column * kPanelRowBytes, valid);
      }
    }
  }

  const DecodeParams& params_;
  Storage& storage_;
  const PanelCopy copy_;
  bool streams_ = false;
  int32_t first_byte_;       // offset of the KV head's row in a slot
  uint32_t num_passes_ = 0;  // passes begun so far
  RingPosition<Storage::kStages> ring_;
};

}  // namespace pat
