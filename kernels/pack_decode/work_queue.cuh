// Shared memory of pack_decode and the positions in its rings: what the producer warps hand to the consumers.
//
//   KV ring     kStages stages of 32 tokens, K and V. It runs on across work items, so loads never drain.
//   query ring  4 units of 16 query rows; an item takes block_q / 16 of them, aligned to their number
//   records     what the consumers must know of an item, one per query ring item
#pragma once

#include <cstdint>

#include "contract/tile_table.h"
#include "decode_params.h"
#include "ptx/ptx.cuh"

#ifndef PAT_TARGET_ARCH
#error "PAT_TARGET_ARCH must be the compute capability the kernels are compiled for, e.g. 90"
#endif

namespace pat {

inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr int kConsumerWarps = 4;
inline constexpr int kProducerWarps = 2;  // one loads K, one V
inline constexpr int kDecodeThreads = 32 * (kConsumerWarps + kProducerWarps);
inline constexpr int kStageTokens = 32;  // one slot per lane of a producer warp
inline constexpr int kQueryUnits = 4;
inline constexpr int kUnitRows = 16;
inline constexpr int kMaxTileRows = kQueryUnits * kUnitRows;
inline constexpr int kDrawsAhead = 2;  // draws that the K producer may be ahead of the V producer

// Two CTAs per SM share 228 KB on sm_90 and sm_100, 164 KB on sm_80; elsewhere 100 KB hold one.
inline constexpr int kRingBytes =
    (PAT_TARGET_ARCH == 90 || PAT_TARGET_ARCH == 100 || PAT_TARGET_ARCH == 103) ? 80 * 1024
                                                                                : 48 * 1024;

// A matrix of T in shared memory, `kRows` rows of head_dim elements: panels of 64 columns (128 bytes), and within
// a row the 16-byte chunks are XORed with the row number. Free of bank conflicts for ldmatrix, and the canonical
// 128-byte swizzle that wgmma and TMA know.
inline constexpr int kChunkBytes = 16;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kPanelColumns = 64;

__device__ __forceinline__ uint32_t swizzled_offset(uint32_t rows, uint32_t row, uint32_t chunk) {
  const uint32_t panel = chunk / 8, column = chunk % 8;
  return (panel * rows + row) * kPanelRowBytes + (column ^ row % 8) * kChunkBytes;
}

// Address of chunk 2 * step + half of a row, from the address of chunk `half` of the same row (half is 0 or 1):
// one XOR with a constant, where swizzled_offset would take the chunk apart again.
__device__ __forceinline__ uint32_t step_address(uint32_t first_chunk, int rows, int step) {
  return (first_chunk ^ (step % 4 * 2 * kChunkBytes)) + step / 4 * rows * kPanelRowBytes;
}

__device__ __forceinline__ int request_of_row(const QueryRows& rows, int row) {
  return row * rows.reciprocal >> 16;
}

// Query head of the KV head's group.
__device__ __forceinline__ int head_of_row(const QueryRows& rows, int row) {
  return row - request_of_row(rows, row) * rows.group_size;
}

// Where a query row's result goes: a row of partial_out and partial_lse, or the complement of a row of out and
// out_lse (the request's only partial), or nowhere.
using RowTarget = int32_t;
inline constexpr RowTarget kNoTarget = INT32_MIN;  // padding

__device__ __forceinline__ RowTarget row_target(const ItemRequest& request, int num_q_heads,
                                                int head) {
  return request.partial_slot == kDirectStore ? ~(request.request * num_q_heads + head)
                                              : request.partial_slot * num_q_heads + head;
}

inline constexpr int32_t kNoMoreItems = -1;

// Written by the K producer with the queries of an item, read by all consumer warps.
struct ItemRecord {
  int32_t tile;        // or kNoMoreItems
  int32_t num_rows;    // query rows in use
  int32_t num_tokens;  // of the item's KV range, 0 if it is empty
  int32_t reserved;
  RowTarget targets[kMaxTileRows];
};

// The swizzle is one of addresses: its pattern repeats after this many bytes.
inline constexpr int kSharedAlignment = 1024;

template <int kHeadDim>
struct SharedStorage {
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kOperandBytes = kStageTokens * kRowBytes;
  static constexpr int kStageBytes = 2 * kOperandBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kUnitBytes = kUnitRows * kRowBytes;

  alignas(kSharedAlignment) uint8_t kv[kStages][kStageBytes];  // K, then V
  alignas(kSharedAlignment) uint8_t queries[kQueryUnits][kUnitBytes];
  // Combination across the consumer warps of a tile (mma_body.cuh), 8 rows at a time; every warp passes on the columns that
  // are not its own.
  float2 exchange[kConsumerWarps * (kConsumerWarps - 1) * (kHeadDim / kConsumerWarps / 8) * 32];
  float2 row_states[kConsumerWarps][kUnitRows];      // maximum and sum
  RowTarget row_targets[kConsumerWarps][kUnitRows];  // of the item a warp is at
  ItemRecord records[kQueryUnits];
  int32_t drawn[kDrawsAhead];  // from the K producer to the V producer
  alignas(8) uint64_t kv_full[kStages];
  uint64_t kv_empty[kStages];
  uint64_t queries_full[kQueryUnits];   // per item, modulo kQueryUnits
  uint64_t queries_empty[kQueryUnits];  // per unit
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
};

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
  // The first unit of an item of `units` (1, 2 or 4) units. Units between next_unit and it are skipped
  // by the consumers.
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
