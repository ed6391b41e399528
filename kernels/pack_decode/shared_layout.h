// Layout of keys, values and queries in shared memory, and which part of them each lane copies. All of it is plain
// arithmetic, so that host tests can check that producers and consumers address the same bytes.
#pragma once

#include <cstdint>
#include <numeric>

#include "host_device.h"
#include "kv_type.h"

namespace pat {

inline constexpr int kStageTokens = 32;  // each lane of a producer warp holds one slot
inline constexpr int kUnitRows = 16;

// Layout of a matrix in shared memory. It is cut into panels of 64 columns of 2 bytes. Within a row of a panel, the
// index of each 16-byte chunk is XORed with the row number. This is the 128-byte swizzle of wgmma and TMA, and ldmatrix
// reads it without bank conflicts. The last panel may have more columns than the matrix needs. The surplus columns are
// never written, and no sum over columns reads them. A multiplication may compute result columns from them, but those
// result columns are not stored.
inline constexpr int kChunkBytes = 16;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kPanelColumns = 64;

PAT_HOST_DEVICE constexpr uint32_t swizzled_offset(uint32_t rows, uint32_t row, uint32_t chunk) {
  const uint32_t panel = chunk / 8, column = chunk % 8;
  return (panel * rows + row) * kPanelRowBytes + (column ^ row % 8) * kChunkBytes;
}

// Returns the address of chunk 2 * step + half of a row. first_chunk: the address of chunk `half` of the same row,
// where half is 0 or 1. If step is a constant, this costs one XOR and one addition, fewer than swizzled_offset().
PAT_HOST_DEVICE constexpr uint32_t step_address(uint32_t first_chunk, int rows, int step) {
  return (first_chunk ^ (step % 4 * 2 * kChunkBytes)) + step / 4 * rows * kPanelRowBytes;
}

PAT_HOST_DEVICE constexpr int panels(int row_bytes) {
  return (row_bytes + kPanelRowBytes - 1) / kPanelRowBytes;
}

// kKeyColumns: columns of keys and queries. kValueColumns: columns of values. kCacheType: type of keys and values in
// the cache. kLatentTokens: tokens per stage in latent attention. kQueryTerms: terms per query over one-byte keys
// (query_fp8_terms.cuh).
template <int kKeyColumns, int kValueColumns, KvType kCacheType = KvType::kAsQueries,
          int kLatentTokens = 2 * kStageTokens, int kQueryTerms = 2>
struct HeadDims {
  static constexpr int kKey = kKeyColumns;
  static constexpr int kValue = kValueColumns;
  static constexpr KvType kKv = kCacheType;
  static constexpr bool kIsFp8 = kKv != KvType::kAsQueries;
  static constexpr int kElementBytes = kIsFp8 ? 1 : 2;  // bytes of an element of the cache
  static constexpr int kTerms = kQueryTerms;
  static_assert(kKey % 16 == 0 && kValue % 16 == 0, "steps of matrix instructions");
  // Latent attention (MLA): values are the first columns of the keys, so keys and values are loaded once.
  static constexpr bool kIsLatent = kKey == 576 && kValue == 512;
  // Wide rows: two warpgroups have half of the value columns each, and queries stay in shared memory.
  static constexpr bool kIsWide = kKey == 512 && kValue == 512;
  static_assert(kIsLatent || kIsWide || (kKey <= 256 && kValue <= 256), "registers");
  static_assert(!kIsWide || !kIsFp8, "no body");

  using Converted = HeadDims<kKey, kValue>;  // after conversion to 16 bits

  static constexpr int kQueryPanels = panels(kKey * 2);
  static constexpr int kKeyPanels = panels(kKey * kElementBytes);
  static constexpr int kValuePanels = kIsLatent ? 0 : panels(kValue * kElementBytes);
  static constexpr int kTokens = kIsLatent ? kLatentTokens : kStageTokens;  // per stage
  static constexpr int kKeyBytes = kTokens * kKeyPanels * kPanelRowBytes;   // per stage
  static constexpr int kValueBytes = kTokens * kValuePanels * kPanelRowBytes;
  // Bytes that the key and the value of one token take in the cache, for one KV head.
  static constexpr int kTokenBytes = (kIsLatent ? kKey : kKey + kValue) * kElementBytes;
  static constexpr int kUnitBytes = kUnitRows * kQueryPanels * kPanelRowBytes;
};

// Which 16-byte chunk each lane copies when a warp copies consecutive rows of a matrix. No lane copies a padding chunk.
template <int kRowBytes>
struct RowCopy {
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  // True if one copy of 32 chunks covers whole rows, so that a lane copies the same chunk of each of its rows.
  static constexpr bool kWholeRows = 32 % kChunks == 0;
  // The swizzle of a lane's chunks repeats after kPeriod copies, which cover kPeriodRows rows.
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

// Which 16-byte chunk each lane copies when a warp copies 32 rows of a matrix, panel by panel. One copy covers 4 rows
// of a panel. From copy to copy, a lane's chunk alternates between two swizzled positions.
struct PanelCopy {
  static constexpr int kCopies = 8;  // copies per panel

  int lane;

  PAT_HOST_DEVICE constexpr int row(int copy) const { return 4 * copy + lane / 8; }
  // Byte offset in a row of the panel.
  PAT_HOST_DEVICE constexpr int source() const { return lane % 8 * kChunkBytes; }
  // Byte offset in the panel.
  PAT_HOST_DEVICE constexpr uint32_t target(int copy) const {
    return swizzled_offset(0, row(copy % 2), lane % 8) + copy / 2 * 8 * kPanelRowBytes;
  }
};

// How a stage's one-byte values are converted to fp16 in place. The asynchronous copies write the one-byte values to
// the end of the space for the fp16 values. A token has the same row in every panel, so its fp16 values overwrite its
// own one-byte values, but no other token's. A warp reads all of its tokens before it writes.
//
// Within each group of 16 columns, the conversion changes the order so that a lane of an accumulator has four
// neighbouring columns, as in mma_body.cuh. The 16 columns become two chunks, of which the first has columns 0, 1, 4,
// 5, 8, 9, 12 and 13.
template <int kColumns>
struct ValueConversion {
  static constexpr int kWarps = 2;
  static constexpr int kChunks = kColumns / 16;  // chunks of an unconverted token
  static constexpr int kTokens = kStageTokens / kWarps;
  static constexpr int kCopies = kTokens * kChunks / 32;  // one-chunk copies per lane
  static constexpr bool kFits = kColumns % 16 == 0 && 32 % kChunks == 0;

  int warp;
  int lane;

  PAT_HOST_DEVICE constexpr uint32_t chunk() const { return lane % kChunks; }
  // For chunks whose fp16 values go to the second panel, neighbouring tokens are swapped, so that the lanes'
  // simultaneous writes cause no bank conflicts.
  PAT_HOST_DEVICE constexpr uint32_t token(int copy) const {
    return warp * kTokens + (lane / kChunks ^ chunk() / 4 % 2) + copy * (32 / kChunks);
  }
  // Offset of the lane's chunk from the first one-byte value.
  PAT_HOST_DEVICE constexpr uint32_t source(int copy) const {
    return swizzled_offset(kStageTokens, token(copy), chunk());
  }
  // Offset of the first of the two fp16 chunks from the first fp16 value. The second chunk is at target() ^
  // kChunkBytes.
  PAT_HOST_DEVICE constexpr uint32_t target(int copy) const {
    return swizzled_offset(kStageTokens, token(copy), 2 * chunk());
  }
};

// The right-hand sides of wgmma in a stage: their addresses, and the distances that go into wgmma's descriptors.
struct KeyOperand {                                            // 32 tokens by 16 columns
  static constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;  // distance between 8-token groups
  PAT_HOST_DEVICE static constexpr uint32_t address(uint32_t keys, int step) {
    return keys + step / 4 * (kStageTokens * kPanelRowBytes) + step % 4 * 2 * kChunkBytes;
  }
};
struct ValueOperand {                                          // 16 tokens by all columns
  static constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;  // distance between 8-token groups
  static constexpr uint32_t kPanelBytes = kStageTokens * kPanelRowBytes;
  PAT_HOST_DEVICE static constexpr uint32_t address(uint32_t values, int step) {
    return values + step * 2 * kGroupBytes;
  }
};

// The operands of wgmma in latent attention. A row of a matrix is a query row or a token of a stage.
struct LatentOperand {
  static constexpr int kRows = 2 * kStageTokens;
  static constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;  // distance between 8-row groups
  static constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;
  // Address of 16 columns of all rows of queries, keys or weights.
  PAT_HOST_DEVICE static constexpr uint32_t columns(uint32_t matrix, int step) {
    return step_address(matrix, kRows, step);
  }
  // Address of the values of 16 tokens, from panel first_panel on.
  PAT_HOST_DEVICE static constexpr uint32_t tokens(uint32_t stage, int first_panel, int step) {
    return stage + first_panel * kPanelBytes + step * 2 * kGroupBytes;
  }
};

// The columns of a warp in latent attention on mma.sync, where four warps share a unit of 16 query rows. A warp has 16
// columns of every panel of queries and of two-byte keys, and a quarter of the panels of the values. A row of a matrix
// is a query row or a token.
struct LatentPart {
  static constexpr int kParts = kPanelColumns / 16;
  static constexpr int kRows = kStageTokens;
  static constexpr uint32_t kPanelBytes = kRows * kPanelRowBytes;

  uint32_t part;

  // Offset in a panel of the chunk that a lane addresses for ldmatrix. The offset is the same in every panel.
  PAT_HOST_DEVICE constexpr uint32_t queries(uint32_t unit, uint32_t lane) const {
    return swizzled_offset(kRows, unit * kUnitRows + lane % 16, 2 * part + lane / 16);
  }
  PAT_HOST_DEVICE constexpr uint32_t keys(uint32_t lane) const {  // 16 tokens
    return swizzled_offset(kRows, lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
  }
  // Offset of the lane's chunk in the first 16 tokens by 16 columns of the values. step_address() gives the next
  // columns.
  template <int kValuePanels>
  PAT_HOST_DEVICE constexpr uint32_t values(uint32_t lane) const {
    static_assert(kValuePanels % kParts == 0);
    return part * (kValuePanels / kParts) * kPanelBytes +
           swizzled_offset(kRows, lane % 16, lane / 16);
  }

  // With one-byte KV: byte offset of a lane's query columns in a panel. A lane has four neighbouring columns of a query
  // row, and the same four columns of the row that is 8 rows further on.
  PAT_HOST_DEVICE constexpr uint32_t byte_queries(uint32_t unit, uint32_t lane) const {
    return swizzled_offset(kRows, unit * kUnitRows + lane / 4, 2 * part + lane / 2 % 2) +
           lane % 2 * 8;
  }
  // Byte offset in a stage of the 16 one-byte key columns of token `lane` that this warp multiplies with query panel
  // query_panel.
  PAT_HOST_DEVICE constexpr uint32_t byte_keys(uint32_t query_panel, uint32_t lane) const {
    return swizzled_offset(kRows, lane, 4 * query_panel + part);
  }
};

}  // namespace pat
