// The shared memory through which the producer warps of pack_decode pass data to the consumers, and the positions in
// its rings.
//
//   KV ring     kStages stages. A stage has the keys and values of up to 32 tokens of one segment, and a record that
//               describes them (StageRecord). The next item's stages follow at once, so loads never pause.
//   query ring  4 units of 16 query rows. An item takes block_q / 16 units, aligned to that number.
//   records     what the consumers must know of an item (ItemRecord), for up to 4 items
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/tile_table.h"
#include "decode_params.h"
#include "pack_decode/shared_layout.h"
#include "ptx/ptx.cuh"

#ifndef PAT_TARGET_ARCH
#error "PAT_TARGET_ARCH must be the compute capability the kernels are compiled for, e.g. 90"
#endif
// PAT_FORCE_MMA_SYNC: compiles for Hopper the code that Ampere, Ada and Blackwell run, so that tests on Hopper can
// execute it.
#if PAT_TARGET_ARCH == 90 && !defined(PAT_FORCE_MMA_SYNC)
#define PAT_USES_WGMMA
#endif

namespace pat {

inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr int kConsumerWarps = 4;  // per warpgroup
inline constexpr int kProducerWarps = 2;  // one for keys, one for values
inline constexpr int kQueryUnits = 4;
inline constexpr int kMaxTileRows = kQueryUnits * kUnitRows;
inline constexpr int kDrawsAhead = 2;  // draws by which the K producer may lead the V producer

#ifdef PAT_USES_WGMMA
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif
// True if separate warps convert one-byte values for wgmma (converter.cuh). A thread must then have enough registers
// for the terms of its queries and for its accumulators.
template <typename Dims>
inline constexpr bool kHasConverters =
    kHasWgmma && Dims::kIsFp8 && !Dims::kIsLatent && Dims::kKey % 32 == 0 &&
    ValueConversion<Dims::kValue>::kFits && Dims::kKey / 8 * Dims::kTerms + Dims::kValue / 2 <= 192;
// Index of the smallest tile that runs on wgmma. For smaller tiles, each consumer warp converts its own tokens, in
// registers.
template <typename Dims>
inline constexpr int kFirstWgmmaTile = !kHasWgmma             ? kNumTiles
                                       : !Dims::kIsFp8        ? 0
                                       : kHasConverters<Dims> ? 1
                                                              : kNumTiles;
template <typename Dims>
inline constexpr bool kUsesWgmma = kFirstWgmmaTile<Dims> == 0;  // true if all tiles run on wgmma

template <typename Dims>
inline constexpr int kConsumerGroups = Dims::kIsWide ? 2 : 1;
template <typename Dims>
inline constexpr int kAllConsumerWarps = kConsumerGroups<Dims> * kConsumerWarps;
inline constexpr int kConverterWarps = ValueConversion<16>::kWarps;
// Consumer warps in latent attention, and warps that load queries for its wgmma body.
inline constexpr int kLatentConsumerWarps = 8, kLatentQueryWarps = 2;
// True for latent attention on mma.sync, which executes an item in passes of 32 rows. Each pass reads all of the item's
// KV.
template <typename Dims>
inline constexpr bool kHasPasses = Dims::kIsLatent && Dims::kTokens == kStageTokens;
template <typename Dims>
inline constexpr bool kHasLatentWgmma = Dims::kIsLatent && !kHasPasses<Dims>;
inline constexpr int kPassRows = 32;
// Tokens of a stage in latent attention: 64 on wgmma, 32 on mma.sync. One-byte latent KV always runs on mma.sync.
template <KvType kKv>
inline constexpr int kLatentTokens =
    kHasWgmma && kKv == KvType::kAsQueries ? 2 * kStageTokens : kStageTokens;
// True if a latent attention kernel is compiled with both bodies, one on wgmma and one on mma.sync.
template <typename Dims>
inline constexpr bool kHasBothLatentBodies = kHasWgmma && Dims::kIsLatent && !Dims::kIsFp8;
template <typename Dims>
inline constexpr int kDecodeThreads =
    32 * (Dims::kIsLatent ? kLatentConsumerWarps + kProducerWarps +
                                (kHasBothLatentBodies<Dims> ? kLatentQueryWarps : 0)
                          : kAllConsumerWarps<Dims> + (Dims::kIsWide ? 4 : kProducerWarps) +
                                (kHasConverters<Dims> ? kConverterWarps : 0));
// Registers per thread if two CTAs with converters share an SM. The average over all threads is 128.
inline constexpr int kConsumerRegisters = 184, kOtherRegisters = 72;
// Registers per thread for wide rows and for latent attention on wgmma. The average over all threads must be at most
// 168, or setmaxnreg would never return.
inline constexpr int kLatentConsumerRegisters = 216, kLatentProducerRegisters = 72;

// Arrivals by which a consumer warp releases a stage: one lane arrives if wgmma has read the stage, else every lane.
template <typename Dims>
inline constexpr int kStageArrivals = kUsesWgmma<Dims> ? 1 : 32;

// A stage holds keys, then values. kValueRoom: bytes for the values. kLandingOffset: where the asynchronous copies
// write the values. Values that are converted in place are written to the end of their room: converted, they are larger
// and fill it.
template <typename Dims>
inline constexpr int kValueRoom =
    kHasConverters<Dims> ? Dims::Converted::kValueBytes : Dims::kValueBytes;
template <typename Dims>
inline constexpr int kLandingOffset = Dims::kKeyBytes + kValueRoom<Dims> - Dims::kValueBytes;
// Bytes of a stage. With passes, a stage may hold the queries of a pass instead of KV.
template <typename Dims>
inline constexpr int kStageBytes =
    std::max(Dims::kKeyBytes + kValueRoom<Dims>,
             kHasPasses<Dims> ? kPassRows* Dims::kQueryPanels* kPanelRowBytes : 0);

inline constexpr bool kHas228Kb = PAT_TARGET_ARCH == 90 || PAT_TARGET_ARCH == 100 ||
                                  PAT_TARGET_ARCH == 103 || PAT_TARGET_ARCH == 110;
inline constexpr bool kHas164Kb = PAT_TARGET_ARCH == 80 || PAT_TARGET_ARCH == 87;
// The most shared memory that one CTA can have: 1 KB less than an SM has. SMs without 228 or 164 KB have 100 KB.
inline constexpr int kMaxSharedBytes = (kHas228Kb ? 227 : kHas164Kb ? 163 : 99) * 1024;
// Bytes of the KV ring if two CTAs share an SM.
inline constexpr int kRingBytes = (kHas228Kb ? 80 : 48) * 1024;

// Output columns that a warp accumulates. wgmma multiplies whole panels, because a descriptor cannot address part of
// one.
template <typename Dims>
inline constexpr int kOutColumns =
    (kUsesWgmma<Dims> ? panels(Dims::kValue * 2) * kPanelColumns : Dims::kValue) /
    kConsumerGroups<Dims>;

// True if TMA copies consecutive slots. TMA can do so only if the rows are whole panels.
inline constexpr bool kHasTma = PAT_TARGET_ARCH == 90;

__device__ __forceinline__ int request_of_row(const QueryRows& rows, int row) {
  return row * rows.reciprocal >> 16;
}

// The query head of a row, counted within the KV head's group.
__device__ __forceinline__ int head_of_row(const QueryRows& rows, int row) {
  return row - request_of_row(rows, row) * rows.group_size;
}

// Where a query row's result is stored. If the RowTarget r is negative: row ~r of out and out_lse, else row r of
// partial_out and partial_lse.
using RowTarget = int32_t;
inline constexpr RowTarget kNoTarget = INT32_MIN;  // padding rows are not stored

__device__ __forceinline__ RowTarget row_target(const ItemRequest& request, int num_q_heads,
                                                int head) {
  return request.partial_slot == kDirectStore ? ~(request.request * num_q_heads + head)
                                              : request.partial_slot * num_q_heads + head;
}

inline constexpr int32_t kNoMoreItems = -1;
inline constexpr int32_t kNotMixed = -1;

// What the consumers must know of an item. Written with the item's queries.
struct ItemRecord {
  int32_t tile;      // index in the tile table, or kNoMoreItems
  int32_t num_rows;  // query rows in use
  // The item's index in the plan if some rows do not attend to all of the item's KV, else kNotMixed.
  int32_t mixed_item;
  RowTarget targets[kMaxTileRows];
};

// What the consumers must know of a stage. Written by the K producer. Each unit of 16 rows has two bits: kAny is set if
// any of the unit's rows attends to the stage, and kWhole if the stage is full and all of the unit's rows attend to it.
// An item without KV has one empty stage.
struct StageRecord {
  // The first bit of each field.
  static constexpr int kEndRow = 6, kTokens = 13, kLast = 20, kWgmma = 21, kEnd = 22,
                       kReadOnce = 23, kAny = 24, kWhole = 28;

  uint32_t packed;

  // Makes the record of a full stage, which has num_tokens tokens. Of the item's num_rows rows, [first_row, end_row)
  // attend to the stage.
  __device__ __forceinline__ static StageRecord of_rows(int first_row, int end_row, int num_rows,
                                                        int num_tokens) {
    const uint32_t any = (1u << units(end_row)) - 1 & -(1u << first_row / kUnitRows);
    // If the item's last row attends, lets the padding rows after it attend too, so that no masking is needed for them.
    if (end_row == num_rows) end_row = kMaxTileRows;
    const uint32_t whole = (1u << end_row / kUnitRows) - 1 & -(1u << units(first_row));
    return {static_cast<uint32_t>(first_row | end_row << kEndRow | num_tokens << kTokens) |
            any << kAny | whole << kWhole};
  }
  __device__ __forceinline__ static StageRecord empty() { return {1u << kLast}; }
  // The record that marks the end after the last stage.
  __device__ __forceinline__ static StageRecord end() { return {1u << kEnd}; }

  // Returns this record with another number of tokens. This record must be that of a full stage.
  __device__ __forceinline__ StageRecord with_tokens(int num_tokens) const {
    if (num_tokens == this->num_tokens()) return *this;
    constexpr uint32_t kOthers = (1u << kTokens) - 1 | 1u << kWgmma | 15u << kAny;
    return {packed & kOthers | static_cast<uint32_t>(num_tokens) << kTokens};
  }
  __device__ __forceinline__ StageRecord as_last(bool is_last) const {
    return {packed | uint32_t{is_last} << kLast};
  }

  // Sets the bit for KV that no other item reads (KvSegment::kReadOnce). Only producers read this bit.
  __device__ __forceinline__ StageRecord as_read_once(bool is_read_once) const {
    return {packed | uint32_t{is_read_once} << kReadOnce};
  }

  // Sets the bit for stages that wgmma reads. Only converters read this bit.
  template <typename Dims>
  __device__ __forceinline__ StageRecord of_tile(int tile) const {
    if constexpr (!kHasConverters<Dims>) return *this;
    return {packed | uint32_t{tile >= kFirstWgmmaTile<Dims>} << kWgmma};
  }

  __device__ __forceinline__ int first_row() const { return packed & 0x3f; }
  __device__ __forceinline__ int end_row() const { return packed >> kEndRow & 0x7f; }
  __device__ __forceinline__ bool counts_for_all_rows() const {
    return first_row() == 0 && end_row() == kMaxTileRows;
  }
  __device__ __forceinline__ int num_tokens() const { return packed >> kTokens & 0x7f; }
  // True for the last stage of an item or of a pass.
  __device__ __forceinline__ bool is_last() const { return packed >> kLast & 1; }
  __device__ __forceinline__ bool is_for_wgmma() const { return packed >> kWgmma & 1; }
  __device__ __forceinline__ bool is_end() const { return packed >> kEnd & 1; }
  __device__ __forceinline__ bool is_read_once() const { return packed >> kReadOnce & 1; }
  __device__ __forceinline__ bool counts_for(int unit) const { return packed >> kAny >> unit & 1; }
  __device__ __forceinline__ bool is_whole(int unit) const { return packed >> kWhole >> unit & 1; }

 private:
  __device__ __forceinline__ static int units(int rows) {
    return (rows + kUnitRows - 1) / kUnitRows;
  }
};

// The swizzle depends on the address, and its pattern repeats after this many bytes.
inline constexpr int kSharedAlignment = 1024;

// If `warps` warps have split a row's KV, each of them combines and stores this many tiles of 8 columns. The last warp
// may have fewer tiles.
template <typename Dims>
__host__ __device__ constexpr int own_tiles(int warps) {
  constexpr int kTogether = Dims::kIsFp8 ? 2 : 1;  // tiles that hold a lane's neighbouring columns
  return (Dims::kValue / 8 / kTogether + warps - 1) / warps * kTogether;
}

inline constexpr int kMaxStages = 12;
// The most stages of a ring that also holds the queries of passes. With PAT_FORCE_MMA_SYNC, Hopper has two stages, like
// the GPUs with the least shared memory.
inline constexpr int kMaxPassStages = PAT_TARGET_ARCH == 90 && !kHasWgmma ? 2 : 4;

// The shared memory of a CTA, except the KV ring.
template <typename Dims>
struct SharedState {
  alignas(kSharedAlignment) uint8_t queries[kQueryUnits][Dims::kUnitBytes];
  // Output sums that the consumer warps exchange at the end of an item whose KV they have split, 8 rows at a time. Each
  // warp sends the columns that another warp combines (combine_and_store_item()).
  float2 exchange[kUsesWgmma<Dims> ? 1
                                   : kConsumerWarps * (kConsumerWarps - 1) *
                                         own_tiles<Dims>(kConsumerWarps) * 32];
  float2 row_states[kConsumerWarps][kUnitRows];                       // maximum and sum of weights
  float query_factors[Dims::kIsFp8 ? kConsumerWarps : 1][kUnitRows];  // see narrow_queries()
  RowTarget row_targets[kAllConsumerWarps<Dims>][kUnitRows];          // of the warp's current item
  int32_t mixed_items[kAllConsumerWarps<Dims>];  // mixed_item of the warp's current item
  ItemRecord records[kQueryUnits];
  StageRecord stage_records[kMaxStages];
  int32_t drawn[kDrawsAhead];  // draws that the K producer passes to the V producer
  alignas(8) uint64_t kv_full[kMaxStages];
  uint64_t kv_ready[kHasConverters<Dims> ? kMaxStages : 1];  // the stage's values are converted
  uint64_t kv_empty[kMaxStages];
  // Barriers for the values of wide rows, which arrive and are released independently of the keys. kv_full and kv_empty
  // are then for the keys only.
  uint64_t values_full[Dims::kIsWide ? kMaxStages : 1];
  uint64_t values_empty[Dims::kIsWide ? kMaxStages : 1];
  uint64_t queries_full[kQueryUnits];   // for item i: entry i % kQueryUnits
  uint64_t queries_empty[kQueryUnits];  // for each query unit
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
};

// Bytes of shared memory that a CTA gets if two CTAs share an SM.
template <typename Dims>
inline constexpr int kHalfBytes =
    kHasConverters<Dims> ? kMaxSharedBytes / 2 - 1024
                         : static_cast<int>(sizeof(SharedState<Dims>)) +
                               kRingBytes / kStageBytes<Dims> * kStageBytes<Dims>;

// Two CTAs share an SM if a thread has enough registers for the columns, and if the SM has enough shared memory for
// both CTAs. The mma.sync bodies need more registers, so they allow fewer columns. An SM has 1 KB more shared memory
// than one CTA can have, and the hardware reserves 1 KB per CTA.
template <typename Dims>
inline constexpr int kCtasPerSm = Dims::kKey + Dims::kValue <= (kUsesWgmma<Dims> ? 320 : 256) &&
                                          2 * (kHalfBytes<Dims> + 1024) <= kMaxSharedBytes + 1024
                                      ? 2
                                      : 1;

// True if some warpgroups give registers to others (setmaxnreg). With one CTA per SM, only wide rows need this: their
// CTAs have more threads. In other CTAs that have an SM to themselves, each thread already has the largest possible
// number of registers. With two CTAs per SM, only kernels with converters need it.
template <typename Dims>
inline constexpr bool kMovesRegisters =
    Dims::kIsWide || kHasConverters<Dims> && kCtasPerSm<Dims> == 2;

template <typename Dims>
inline constexpr int kRoom = kMaxSharedBytes - static_cast<int>(sizeof(SharedState<Dims>));
// Bytes for the KV ring. If an SM has only one CTA, the ring takes all that is left of the shared memory.
template <typename Dims>
inline constexpr int kKvRoom =
    kCtasPerSm<Dims> == 1 ? kRoom<Dims>
                          : kHalfBytes<Dims> - static_cast<int>(sizeof(SharedState<Dims>));

template <typename Dims>
struct SharedStorage : SharedState<Dims> {
  static constexpr int kStages = std::max(
      1,
      std::min(kHasPasses<Dims> ? kMaxPassStages : kMaxStages, kKvRoom<Dims> / kStageBytes<Dims>));
  static constexpr int kKvBytes = kStages * kStageBytes<Dims>;
  static_assert(kStages >= 1 && kKvBytes <= kRoom<Dims>);

  alignas(kSharedAlignment) uint8_t kv[kStages][kStageBytes<Dims>];
};

// Rows of the shared matrix that holds a tile's queries. wgmma reads wide queries from shared memory and needs a
// constant distance between panels, so their matrix always has the rows of all units.
template <typename Dims>
__device__ __forceinline__ int query_rows(int units) {
  return Dims::kIsWide ? kMaxTileRows : units * kUnitRows;
}
template <typename Dims>
__device__ __forceinline__ uint32_t query_tile(SharedStorage<Dims>& storage, int first_unit) {
  constexpr int kUnitBytes = Dims::kIsWide ? kUnitRows * kPanelRowBytes : Dims::kUnitBytes;
  return ptx::shared_address(storage.queries[0]) + first_unit % kQueryUnits * kUnitBytes;
}

// A position in the KV ring: the stage, and the parity of the number of completed laps.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Counts the items and query units of a CTA. Producer and consumers count the same sequence, so they agree on units and
// parities without communication.
struct QueryPosition {
  int item = 0;
  int next_unit = 0;

  __device__ __forceinline__ int record() const { return item % kQueryUnits; }
  __device__ __forceinline__ uint32_t item_parity() const { return (item / kQueryUnits) & 1; }
  // The first unit of an item that takes `units` (1, 2 or 4) units, aligned to that number. The units before it, from
  // next_unit on, stay unused.
  __device__ __forceinline__ int first_unit(int units) const {
    return (next_unit + units - 1) & -units;
  }
  __device__ __forceinline__ void advance(int units) {
    next_unit = first_unit(units) + units;
    ++item;
  }
};

// Number of query units that a tile of the tile table takes.
template <int kTile = 0>
__device__ __forceinline__ int tile_units(int tile) {
  constexpr int kUnits = kTileTable[kTile].block_q / kUnitRows;
  static_assert(kUnits <= kQueryUnits && (kUnits & (kUnits - 1)) == 0);
  if constexpr (kTile + 1 < kNumTiles) {
    if (tile != kTile) return tile_units<kTile + 1>(tile);
  }
  return kUnits;
}

}  // namespace pat
