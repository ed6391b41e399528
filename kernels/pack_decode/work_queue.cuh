// Shared memory of pack_decode and the positions in its rings: what the producer warps hand to the consumers.
//
//   KV ring     kStages stages. A stage has the keys and values of up to 32 tokens of one segment, and a record that
//               tells the consumers about them. The ring runs on across work items, so loads never drain.
//   query ring  4 units of 16 query rows; an item takes block_q / 16 units, aligned to that number
//   records     what the consumers must know of an item, one per query ring item
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
// PAT_FORCE_MMA_SYNC: Hopper runs what Ampere, Ada and Blackwell run, so that its tests execute that code.
#if PAT_TARGET_ARCH == 90 && !defined(PAT_FORCE_MMA_SYNC)
#define PAT_USES_WGMMA
#endif

namespace pat {

inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr int kConsumerWarps = 4;  // of a warpgroup
inline constexpr int kProducerWarps = 2;  // one loads K, one V
inline constexpr int kQueryUnits = 4;
inline constexpr int kMaxTileRows = kQueryUnits * kUnitRows;
inline constexpr int kDrawsAhead = 2;  // draws that the K producer may be ahead of the V producer

#ifdef PAT_USES_WGMMA
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif
// True if separate warps convert one-byte values for wgmma (converter.cuh). They do if a thread has room for the terms
// of its queries and the accumulators.
template <typename Dims>
inline constexpr bool kHasConverters =
    kHasWgmma && Dims::kIsFp8 && !Dims::kIsLatent && Dims::kKey % 32 == 0 &&
    ValueConversion<Dims::kValue>::kFits && Dims::kKey / 8 * Dims::kTerms + Dims::kValue / 2 <= 192;
// The first tile, by the number of its rows, that is multiplied by wgmma. In small tiles, consumers convert in
// registers, each its own tokens.
template <typename Dims>
inline constexpr int kFirstWgmmaTile = !kHasWgmma             ? kNumTiles
                                       : !Dims::kIsFp8        ? 0
                                       : kHasConverters<Dims> ? 1
                                                              : kNumTiles;
template <typename Dims>
inline constexpr bool kUsesWgmma = kFirstWgmmaTile<Dims> == 0;  // in all tiles

template <typename Dims>
inline constexpr int kConsumerGroups = Dims::kIsWide ? 2 : 1;
template <typename Dims>
inline constexpr int kAllConsumerWarps = kConsumerGroups<Dims> * kConsumerWarps;
inline constexpr int kConverterWarps = ValueConversion<16>::kWarps;
// Warps over latent attention.
inline constexpr int kLatentConsumerWarps = 8, kLatentQueryWarps = 2;
// True for latent attention on mma.sync. It takes an item's rows in passes of 32, each over all of the item's KV, and
// stages of 32 tokens. On wgmma, stages have 64 tokens.
template <typename Dims>
inline constexpr bool kHasPasses = Dims::kIsLatent && Dims::kTokens == kStageTokens;
template <typename Dims>
inline constexpr bool kHasLatentWgmma = Dims::kIsLatent && !kHasPasses<Dims>;
inline constexpr int kPassRows = 32;
// Tokens of a stage of latent attention. Only mma.sync multiplies one-byte KV there.
template <KvType kKv>
inline constexpr int kLatentTokens =
    kHasWgmma && kKv == KvType::kAsQueries ? 2 * kStageTokens : kStageTokens;
// True if a kernel of latent attention has the body on wgmma, beside that on mma.sync.
template <typename Dims>
inline constexpr bool kHasBothLatentBodies = kHasWgmma && Dims::kIsLatent && !Dims::kIsFp8;
template <typename Dims>
inline constexpr int kDecodeThreads =
    32 * (Dims::kIsLatent ? kLatentConsumerWarps + kProducerWarps +
                                (kHasBothLatentBodies<Dims> ? kLatentQueryWarps : 0)
                          : kAllConsumerWarps<Dims> + (Dims::kIsWide ? 4 : kProducerWarps) +
                                (kHasConverters<Dims> ? kConverterWarps : 0));
// Registers of a thread if two CTAs with converters share an SM: 128 on average.
inline constexpr int kConsumerRegisters = 184, kOtherRegisters = 72;
// Registers of a thread over wide rows, and over latent attention on Hopper: 168 on average. With more, some threads
// would wait for ever.
inline constexpr int kLatentConsumerRegisters = 216, kLatentProducerRegisters = 72;

// The arrivals with which a consumer warp hands back a stage: that of the lane that waited for wgmma, or those of all
// lanes that read the stage.
template <typename Dims>
inline constexpr int kStageArrivals = kUsesWgmma<Dims> ? 1 : 32;

// A stage holds keys, then values. Values that are converted in place land at the end of the room for them.
template <typename Dims>
inline constexpr int kValueRoom =
    kHasConverters<Dims> ? Dims::Converted::kValueBytes : Dims::kValueBytes;
template <typename Dims>
inline constexpr int kLandingOffset = Dims::kKeyBytes + kValueRoom<Dims> - Dims::kValueBytes;
// If items are executed in passes, a stage may also hold the queries of a pass.
template <typename Dims>
inline constexpr int kStageBytes =
    std::max(Dims::kKeyBytes + kValueRoom<Dims>,
             kHasPasses<Dims> ? kPassRows* Dims::kQueryPanels* kPanelRowBytes : 0);

inline constexpr bool kHas228Kb = PAT_TARGET_ARCH == 90 || PAT_TARGET_ARCH == 100 ||
                                  PAT_TARGET_ARCH == 103 || PAT_TARGET_ARCH == 110;
inline constexpr bool kHas164Kb = PAT_TARGET_ARCH == 80 || PAT_TARGET_ARCH == 87;
// Shared memory that one CTA can have: 1 KB less than an SM has. Other GPUs have 100 KB per SM.
inline constexpr int kMaxSharedBytes = (kHas228Kb ? 227 : kHas164Kb ? 163 : 99) * 1024;
// Bytes of the KV ring if two CTAs share an SM.
inline constexpr int kRingBytes = (kHas228Kb ? 80 : 48) * 1024;

// Columns of a warp's accumulators. wgmma multiplies whole panels, because its swizzles cannot describe a part of one.
template <typename Dims>
inline constexpr int kOutColumns =
    (kUsesWgmma<Dims> ? panels(Dims::kValue * 2) * kPanelColumns : Dims::kValue) /
    kConsumerGroups<Dims>;

// True if the tensor memory accelerator copies slots that follow one another, for rows of whole panels.
inline constexpr bool kHasTma = PAT_TARGET_ARCH == 90;

__device__ __forceinline__ int request_of_row(const QueryRows& rows, int row) {
  return row * rows.reciprocal >> 16;
}

// The query head of a row, counted within the KV head's group.
__device__ __forceinline__ int head_of_row(const QueryRows& rows, int row) {
  return row - request_of_row(rows, row) * rows.group_size;
}

// Destination of a query row's result: a row of partial_out and partial_lse, or the complement of a row of out and
// out_lse (the request's only partial), or nowhere.
using RowTarget = int32_t;
inline constexpr RowTarget kNoTarget = INT32_MIN;  // padding

__device__ __forceinline__ RowTarget row_target(const ItemRequest& request, int num_q_heads,
                                                int head) {
  return request.partial_slot == kDirectStore ? ~(request.request * num_q_heads + head)
                                              : request.partial_slot * num_q_heads + head;
}

inline constexpr int32_t kNoMoreItems = -1;
inline constexpr int32_t kNotMixed = -1;

// Written with the queries of an item, read by all consumer warps.
struct ItemRecord {
  int32_t tile;      // or kNoMoreItems
  int32_t num_rows;  // query rows in use
  int32_t
      mixed_item;  // the item's index if some of its KV counts for some of its rows only, else kNotMixed
  RowTarget targets[kMaxTileRows];
};

// The K producer's message to the consumers about a stage. Each unit of 16 rows has two bits. They tell the unit's warp
// whether the stage counts for any of the unit's rows, and whether the stage is full and counts for all of these rows.
// An item without KV has one stage, which is empty.
struct StageRecord {
  // The first bit of each field.
  static constexpr int kEndRow = 6, kTokens = 13, kLast = 20, kWgmma = 21, kEnd = 22,
                       kReadOnce = 23, kAny = 24, kWhole = 28;

  uint32_t packed;

  // The record of stages that have all of their num_tokens tokens, and count for rows [first_row, end_row) of num_rows.
  __device__ __forceinline__ static StageRecord of_rows(int first_row, int end_row, int num_rows,
                                                        int num_tokens) {
    const uint32_t any = (1u << units(end_row)) - 1 & -(1u << first_row / kUnitRows);
    // If the last row counts, rows that the item does not have count too, so that nothing is masked for them.
    if (end_row == num_rows) end_row = kMaxTileRows;
    const uint32_t whole = (1u << end_row / kUnitRows) - 1 & -(1u << units(first_row));
    return {static_cast<uint32_t>(first_row | end_row << kEndRow | num_tokens << kTokens) |
            any << kAny | whole << kWhole};
  }
  __device__ __forceinline__ static StageRecord empty() { return {1u << kLast}; }
  // The record after the last stage.
  __device__ __forceinline__ static StageRecord end() { return {1u << kEnd}; }

  // The record of a whole stage, with another number of tokens.
  __device__ __forceinline__ StageRecord with_tokens(int num_tokens) const {
    if (num_tokens == this->num_tokens()) return *this;
    constexpr uint32_t kOthers = (1u << kTokens) - 1 | 1u << kWgmma | 15u << kAny;
    return {packed & kOthers | static_cast<uint32_t>(num_tokens) << kTokens};
  }
  __device__ __forceinline__ StageRecord as_last(bool is_last) const {
    return {packed | uint32_t{is_last} << kLast};
  }

  // For the producers: see KvSegment::kReadOnce.
  __device__ __forceinline__ StageRecord as_read_once(bool is_read_once) const {
    return {packed | uint32_t{is_read_once} << kReadOnce};
  }

  // Notes whether the item's tile is multiplied by wgmma.
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
  __device__ __forceinline__ bool is_last() const { return packed >> kLast & 1; }  // of its item
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

// Columns, in tiles of 8, that each of `warps` warps gathers when they combine their parts of a row. The last warp
// may have fewer.
template <typename Dims>
__host__ __device__ constexpr int own_tiles(int warps) {
  constexpr int kTogether = Dims::kIsFp8 ? 2 : 1;  // tiles that a lane's neighbouring columns span
  return (Dims::kValue / 8 / kTogether + warps - 1) / warps * kTogether;
}

inline constexpr int kMaxStages = 12;
// The most stages of a ring that also holds queries of passes. Hopper with PAT_FORCE_MMA_SYNC takes two, as the
// smallest GPUs do.
inline constexpr int kMaxPassStages = PAT_TARGET_ARCH == 90 && !kHasWgmma ? 2 : 4;

// The shared memory without the KV ring.
template <typename Dims>
struct SharedState {
  alignas(kSharedAlignment) uint8_t queries[kQueryUnits][Dims::kUnitBytes];
  // What the consumer warps of a tile exchange when they combine their parts (mma_body.cuh), 8 rows at a time. Every
  // warp passes on the columns that are not its own.
  float2 exchange[kUsesWgmma<Dims> ? 1
                                   : kConsumerWarps * (kConsumerWarps - 1) *
                                         own_tiles<Dims>(kConsumerWarps) * 32];
  float2 row_states[kConsumerWarps][kUnitRows];                       // maximum and sum
  float query_factors[Dims::kIsFp8 ? kConsumerWarps : 1][kUnitRows];  // WarpAttention
  RowTarget row_targets[kAllConsumerWarps<Dims>][kUnitRows];          // of the warp's present item
  int32_t mixed_items[kAllConsumerWarps<Dims>];  // ItemRecord::mixed_item of that item
  ItemRecord records[kQueryUnits];
  StageRecord stage_records[kMaxStages];
  int32_t drawn[kDrawsAhead];  // tickets drawn by the K producer, for the V producer
  alignas(8) uint64_t kv_full[kMaxStages];
  uint64_t kv_ready[kHasConverters<Dims> ? kMaxStages : 1];  // converted
  uint64_t kv_empty[kMaxStages];
  // Values that arrive and are handed back by themselves have these barriers. kv_full and kv_empty are then those of
  // the keys.
  uint64_t values_full[Dims::kIsWide ? kMaxStages : 1];
  uint64_t values_empty[Dims::kIsWide ? kMaxStages : 1];
  uint64_t queries_full[kQueryUnits];   // per item, modulo kQueryUnits
  uint64_t queries_empty[kQueryUnits];  // per unit
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
};

// Shared memory of a CTA if two share an SM.
template <typename Dims>
inline constexpr int kHalfBytes =
    kHasConverters<Dims> ? kMaxSharedBytes / 2 - 1024
                         : static_cast<int>(sizeof(SharedState<Dims>)) +
                               kRingBytes / kStageBytes<Dims> * kStageBytes<Dims>;

// An SM has two CTAs if the queries and the accumulators leave each thread with 168 registers, and both rings fit. The
// bodies on mma.sync need more registers. An SM has 1 KB more than one CTA can have, and each CTA takes 1 KB itself.
template <typename Dims>
inline constexpr int kCtasPerSm = Dims::kKey + Dims::kValue <= (kUsesWgmma<Dims> ? 320 : 256) &&
                                          2 * (kHalfBytes<Dims> + 1024) <= kMaxSharedBytes + 1024
                                      ? 2
                                      : 1;

// True if some warpgroups give registers to others. Elsewhere, if an SM has one CTA, each thread already has as many
// registers as a thread can have.
template <typename Dims>
inline constexpr bool kMovesRegisters =
    Dims::kIsWide || kHasConverters<Dims> && kCtasPerSm<Dims> == 2;

template <typename Dims>
inline constexpr int kRoom = kMaxSharedBytes - static_cast<int>(sizeof(SharedState<Dims>));
// Room for KV. If an SM has one CTA, its ring is as long as fits.
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

// Rows of the matrix in which a tile's queries lie. Wide rows always lie in a matrix of all units, so that wgmma, which
// reads them there, finds the panels at one distance.
template <typename Dims>
__device__ __forceinline__ int query_rows(int units) {
  return Dims::kIsWide ? kMaxTileRows : units * kUnitRows;
}
template <typename Dims>
__device__ __forceinline__ uint32_t query_tile(SharedStorage<Dims>& storage, int first_unit) {
  constexpr int kUnitBytes = Dims::kIsWide ? kUnitRows * kPanelRowBytes : Dims::kUnitBytes;
  return ptx::shared_address(storage.queries[0]) + first_unit % kQueryUnits * kUnitBytes;
}

// A stage of the KV ring and how often the ring has been passed through.
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

// Items and query units since the kernel began. Producer and consumers step through the same sequence, so they
// agree on units and parities without talking.
struct QueryPosition {
  int item = 0;
  int next_unit = 0;

  __device__ __forceinline__ int record() const { return item % kQueryUnits; }
  __device__ __forceinline__ uint32_t item_parity() const { return (item / kQueryUnits) & 1; }
  // The first unit of an item of `units` (1, 2 or 4) units. The consumers skip the units between next_unit and that
  // unit.
  __device__ __forceinline__ int first_unit(int units) const {
    return (next_unit + units - 1) & -units;
  }
  __device__ __forceinline__ void advance(int units) {
    next_unit = first_unit(units) + units;
    ++item;
  }
};

// Query units of a tile of the table.
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
