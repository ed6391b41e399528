// Layout of keys, values and queries in shared memory, and the part that each lane copies. Plain arithmetic,
// so that a host compiler can check that the producers and the consumers mean the same bytes.
#pragma once

#include <cstdint>
#include <numeric>

#include "host_device.h"
#include "kv_type.h"

namespace pat {

inline constexpr int kStageTokens = 32;  // one slot per lane of a producer warp
inline constexpr int kUnitRows = 16;

// A matrix in shared memory, `rows` rows of 2-byte elements: panels of 64 columns (128 bytes), and within a row the
// 16-byte chunks are XORed with the row number. Free of bank conflicts for ldmatrix, and the canonical 128-byte swizzle
// that wgmma and TMA know. Columns that the last panel has beyond the matrix are never written. No sum over columns
// reads them. A multiplication may compute columns of its result from them, but these are not stored.
inline constexpr int kChunkBytes = 16;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kPanelColumns = 64;

PAT_HOST_DEVICE constexpr uint32_t swizzled_offset(uint32_t rows, uint32_t row, uint32_t chunk) {
  const uint32_t panel = chunk / 8, column = chunk % 8;
  return (panel * rows + row) * kPanelRowBytes + (column ^ row % 8) * kChunkBytes;
}

// Address of chunk 2 * step + half of a row, from the address of chunk `half` of the same row (half is 0 or 1):
// one XOR with a constant, where swizzled_offset would take the chunk apart again.
PAT_HOST_DEVICE constexpr uint32_t step_address(uint32_t first_chunk, int rows, int step) {
  return (first_chunk ^ (step % 4 * 2 * kChunkBytes)) + step / 4 * rows * kPanelRowBytes;
}

PAT_HOST_DEVICE constexpr int panels(int row_bytes) {
  return (row_bytes + kPanelRowBytes - 1) / kPanelRowBytes;
}

// The columns of keys (and queries) and of values, and the type in which the cache has them. The last panel may be
// partly empty. kLatentTokens: of a stage of latent attention. kQueryTerms: of a query over one-byte keys
// (query_fp8_terms.cuh).
template <int kKeyColumns, int kValueColumns, KvType kCacheType = KvType::kAsQueries,
          int kLatentTokens = 2 * kStageTokens, int kQueryTerms = 2>
struct HeadDims {
  static constexpr int kKey = kKeyColumns;
  static constexpr int kValue = kValueColumns;
  static constexpr KvType kKv = kCacheType;
  static constexpr bool kIsFp8 = kKv != KvType::kAsQueries;
  static constexpr int kElementBytes = kIsFp8 ? 1 : 2;  // of the cache
  static constexpr int kTerms = kQueryTerms;
  static_assert(kKey % 16 == 0 && kValue % 16 == 0, "steps of matrix instructions");
  // Latent attention (MLA): values are the first columns of the keys, so one load and one stage serve both.
  static constexpr bool kIsLatent = kKey == 576 && kValue == 512;
  // Each of two warpgroups has half of the values' columns, and no registers for queries.
  static constexpr bool kIsWide = kKey == 512 && kValue == 512;
  static_assert(kIsLatent || kIsWide || (kKey <= 256 && kValue <= 256), "registers");
  static_assert(!kIsWide || !kIsFp8, "no body");

  using Converted = HeadDims<kKey, kValue>;  // to numbers of the queries' size

  static constexpr int kQueryPanels = panels(kKey * 2);
  static constexpr int kKeyPanels = panels(kKey * kElementBytes);
  static constexpr int kValuePanels = kIsLatent ? 0 : panels(kValue * kElementBytes);
  static constexpr int kTokens = kIsLatent ? kLatentTokens : kStageTokens;  // of a stage
  static constexpr int kKeyBytes = kTokens * kKeyPanels * kPanelRowBytes;   // of a stage
  static constexpr int kValueBytes = kTokens * kValuePanels * kPanelRowBytes;
  // Bytes of a token in the cache.
  static constexpr int kTokenBytes = (kIsLatent ? kKey : kKey + kValue) * kElementBytes;
  static constexpr int kUnitBytes = kUnitRows * kQueryPanels * kPanelRowBytes;
};

// How the 32 lanes of a warp copy consecutive rows of a matrix in 16-byte chunks, and nothing else.
template <int kRowBytes>
struct RowCopy {
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  // If a copy covers whole rows, a lane has the same chunk in each row.
  static constexpr bool kWholeRows = 32 % kChunks == 0;
  // Copies, and rows, after which the swizzle of a lane's chunks repeats.
  static constexpr int kPeriod = 8 * kChunks / std::gcd(32, 8 * kChunks);
  static constexpr int kPeriodRows = 32 * kPeriod / kChunks;

  int lane;

  PAT_HOST_DEVICE static constexpr int copies(int rows) { return rows * kChunks / 32; }

  PAT_HOST_DEVICE constexpr int row(int copy) const {
    if constexpr (kWholeRows) return copy * (32 / kChunks) + lane / kChunks;
    return copy / kPeriod * kPeriodRows + (copy % kPeriod * 32 + lane) / kChunks;
  }

  PAT_HOST_DEVICE constexpr int chunk(int copy) const {
    if constexpr (kWholeRows) return lane % kChunks;
    return (copy % kPeriod * 32 + lane) % kChunks;
  }
};

// How a warp copies 32 rows of a matrix, panel by panel. Each copy is of 4 rows of a panel. From row to row, a lane's
// chunk alternates between two places.
struct PanelCopy {
  static constexpr int kCopies = 8;  // of a panel

  int lane;

  PAT_HOST_DEVICE constexpr int row(int copy) const { return 4 * copy + lane / 8; }
  PAT_HOST_DEVICE constexpr int source() const {
    return lane % 8 * kChunkBytes;
  }  // offset within a row of the panel
  // Offset within the panel.
  PAT_HOST_DEVICE constexpr uint32_t target(int copy) const {
    return swizzled_offset(0, row(copy % 2), lane % 8) + copy / 2 * 8 * kPanelRowBytes;
  }
};

// Conversion of a stage's one-byte values to fp16, in place. The one-byte values land at the end of the room for the
// converted ones. So the converted numbers of a token lie where its bytes were, and in the panels before. A warp reads
// all of its tokens before it writes.
//
// Within each group of 16, columns change places, so that a lane of an accumulator has four neighbouring columns, as in
// mma_body.cuh. Of the two chunks that 16 columns become, the first has columns 0, 1, 4, 5, 8, 9, 12 and 13.
template <int kColumns>
struct ValueConversion {
  static constexpr int kWarps = 2;
  static constexpr int kChunks = kColumns / 16;  // of a token before it is converted
  static constexpr int kTokens = kStageTokens / kWarps;
  static constexpr int kCopies = kTokens * kChunks / 32;  // per lane, each of one chunk
  static constexpr bool kFits = kColumns % 16 == 0 && 32 % kChunks == 0;

  int warp;
  int lane;

  PAT_HOST_DEVICE constexpr uint32_t chunk() const { return lane % kChunks; }
  // Tokens of the second panel are swapped in pairs, so that lanes that write at the same time never meet in a bank.
  PAT_HOST_DEVICE constexpr uint32_t token(int copy) const {
    return warp * kTokens + (lane / kChunks ^ chunk() / 4 % 2) + copy * (32 / kChunks);
  }
  // Offset of the lane's chunk from where values land.
  PAT_HOST_DEVICE constexpr uint32_t source(int copy) const {
    return swizzled_offset(kStageTokens, token(copy), chunk());
  }
  // Offset of the first of the two chunks that the lane's chunk becomes, from where wgmma reads values. The second
  // chunk is at ^ kChunkBytes.
  PAT_HOST_DEVICE constexpr uint32_t target(int copy) const {
    return swizzled_offset(kStageTokens, token(copy), 2 * chunk());
  }
};

// The right-hand sides of wgmma in a stage, as addresses and the distances that its descriptors hold.
struct KeyOperand {                                            // 32 tokens, 16 columns
  static constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;  // from 8 tokens to the next 8
  PAT_HOST_DEVICE static constexpr uint32_t address(uint32_t keys, int step) {
    return keys + step / 4 * (kStageTokens * kPanelRowBytes) + step % 4 * 2 * kChunkBytes;
  }
};
struct ValueOperand {                                          // 16 tokens, all columns
  static constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;  // from 8 tokens to the next 8
  static constexpr uint32_t kPanelBytes = kStageTokens * kPanelRowBytes;
  PAT_HOST_DEVICE static constexpr uint32_t address(uint32_t values, int step) {
    return values + step * 2 * kGroupBytes;
  }
};

// The operands of wgmma in latent attention, in matrices of 64 rows: queries, or the tokens of a stage.
struct LatentOperand {
  static constexpr int kRows = 2 * kStageTokens;
  static constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;  // from 8 rows to the next 8
  static constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;
  // 16 columns of all rows: of queries, keys and weights.
  PAT_HOST_DEVICE static constexpr uint32_t columns(uint32_t matrix, int step) {
    return step_address(matrix, kRows, step);
  }
  // The values of 16 tokens, from a panel on.
  PAT_HOST_DEVICE static constexpr uint32_t tokens(uint32_t stage, int first_panel, int step) {
    return stage + first_panel * kPanelBytes + step * 2 * kGroupBytes;
  }
};

// A warp's share of the work on 16 query rows of latent attention on mma.sync. Four warps share such a unit. Matrices
// have 32 rows: queries, or the tokens of a stage. A warp has 16 columns of every panel of queries and keys, and two
// panels of the values.
struct LatentPart {
  static constexpr int kParts = kPanelColumns / 16;
  static constexpr int kRows = kStageTokens;
  static constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;

  uint32_t part;

  // Place of the first chunk that a lane addresses for ldmatrix. Its chunks in the other panels are at the same place.
  PAT_HOST_DEVICE constexpr uint32_t queries(uint32_t unit, uint32_t lane) const {
    return swizzled_offset(kRows, unit * kUnitRows + lane % 16, 2 * part + lane / 16);
  }
  PAT_HOST_DEVICE constexpr uint32_t keys(uint32_t lane) const {  // of the first 16 tokens
    return swizzled_offset(kRows, lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
  }
  // The same place in the values: the lane's first chunk of 16 tokens by 16 columns. step_address() gives the next
  // columns.
  template <int kValuePanels>
  PAT_HOST_DEVICE constexpr uint32_t values(uint32_t lane) const {
    static_assert(kValuePanels % kParts == 0);
    return part * (kValuePanels / kParts) * kPanelBytes +
           swizzled_offset(kRows, lane % 16, lane / 16);
  }

  // Place of a lane's first columns in the queries over one-byte KV. A lane has four neighbouring columns of a query
  // row, and the same four columns of the row 8 further on.
  PAT_HOST_DEVICE constexpr uint32_t byte_queries(uint32_t unit, uint32_t lane) const {
    return swizzled_offset(kRows, unit * kUnitRows + lane / 4, 2 * part + lane / 2 % 2) +
           lane % 2 * 8;
  }
  // Place of the lane's token in the 16 columns of the keys that belong to a panel of the queries.
  PAT_HOST_DEVICE constexpr uint32_t byte_keys(uint32_t query_panel, uint32_t lane) const {
    return swizzled_offset(kRows, lane, 4 * query_panel + part);
  }
};

}  // namespace pat
