// Checks on the host that producers and consumers of pack_decode address the same bytes of shared memory, for each pair
// of head_dims in PAT_PAIRS. The producer's side is the arithmetic of copy_stage, copy_run and copy_queries; the
// consumers' is ldmatrix as mma_body.cuh addresses it, and the operands of wgmma as PTX defines their canonical
// layouts.
#include "pack_decode/shared_layout.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

namespace {

using namespace pat;

void expect(bool right, const char* what, int columns) {
  if (right) return;
  std::printf("%d columns: %s\n", columns, what);
  std::exit(1);
}

// Address -> element (row * 1024 + column) after the copies of a warp.
template <int kColumns, int kElementBytes>
std::map<uint32_t, int> copied(int rows, int tile_rows, int first_row, uint32_t base) {
  using Copy = RowCopy<kColumns * kElementBytes>;
  std::map<uint32_t, int> memory;
  std::vector<int> times(rows * Copy::kChunks);
  for (int lane = 0; lane < 32; ++lane) {
    const Copy copy{lane};
    for (int i = 0; i < Copy::copies(rows); ++i) {
      const int row = copy.row(i), chunk = copy.chunk(i);
      expect(row < rows && chunk < Copy::kChunks, "a copy is outside of the rows", kColumns);
      ++times[row * Copy::kChunks + chunk];
      const uint32_t target = base + swizzled_offset(tile_rows, first_row + row, chunk);
      // Like copy_stage, use the offset of the same copy in the first period.
      const int first = i % Copy::kPeriod;
      const uint32_t shortened =
          base + swizzled_offset(tile_rows, first_row + copy.row(first), copy.chunk(first)) +
          i / Copy::kPeriod * Copy::kPeriodRows * kPanelRowBytes;
      expect(target == shortened, "the swizzle does not repeat", kColumns);
      if constexpr (Copy::kWholeRows) {
        expect(chunk == copy.chunk(0), "a lane changes its chunk", kColumns);
      }
      for (int byte = 0; byte < kChunkBytes; byte += kElementBytes) {
        const int element = (first_row + row) * 1024 + (chunk * kChunkBytes + byte) / kElementBytes;
        expect(memory.emplace(target + byte, element).second, "two copies overlap", kColumns);
      }
    }
  }
  for (const int count : times) expect(count == 1, "a chunk is not copied once", kColumns);
  return memory;
}

// Address -> element after TMA copies of a stage's panels: chunk c of the 128-byte row r is at c ^ (r % 8). Rows must
// be whole panels.
template <int kColumns, int kElementBytes>
std::map<uint32_t, int> boxes(uint32_t base) {
  constexpr int kRowBytes = kColumns * kElementBytes;
  expect(base % 1024 == 0, "a box begins within its swizzle", kColumns);
  std::map<uint32_t, int> memory;
  for (int panel = 0; panel < kRowBytes / kPanelRowBytes; ++panel) {
    const uint32_t box =
        base + panel * kStageTokens * kPanelRowBytes;  // as in KvStages::copy_run
    for (int row = 0; row < kStageTokens; ++row) {
      for (int byte = 0; byte < kPanelRowBytes; byte += kElementBytes) {
        const uint32_t chunk = byte / 16 ^ row % 8;
        const uint32_t target = box + row * kPanelRowBytes + chunk * 16 + byte % 16;
        memory[target] = row * 1024 + (panel * kPanelRowBytes + byte) / kElementBytes;
      }
    }
  }
  return memory;
}

// Checks that runs of slots have the same layout in a stage as scattered slots.
template <int kColumns, int kElementBytes>
void check_boxes(const std::map<uint32_t, int>& stage, uint32_t base) {
  if (kColumns * kElementBytes % kPanelRowBytes != 0) return;
  expect(boxes<kColumns, kElementBytes>(base) == stage, "boxes and copies differ", kColumns);
}

// Returns the element at an address, or -1.
int at(const std::map<uint32_t, int>& memory, uint32_t address) {
  const auto found = memory.find(address);
  return found == memory.end() ? -1 : found->second;
}

// Checks `count` adjacent elements of a row: a lane's 16 bytes for ldmatrix, or its own load.
template <int kElementBytes = 2>
void expect_row(const std::map<uint32_t, int>& memory, uint32_t address, int row, int column,
                const char* what, int columns, int count = kChunkBytes / kElementBytes) {
  for (int i = 0; i < count; ++i) {
    expect(at(memory, address + kElementBytes * i) == row * 1024 + column + i, what, columns);
  }
}

// The 128-byte swizzle of wgmma: bits 4 to 6 of an address are XORed with bits 7 to 9.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Checks a stage of one-byte numbers that ldmatrix reads: a matrix is 16 columns of 8 tokens.
template <int kKey, int kValue>
void check_bytes() {
  using Dims = HeadDims<kKey, kValue, KvType::kE4m3>;
  constexpr uint32_t kBase = 3 * 1024, kValueBase = kBase + Dims::kKeyBytes,
                     kEnd = kValueBase + Dims::kValueBytes;
  static_assert(Dims::kKeyBytes % 1024 == 0 && Dims::kValueBytes % 1024 == 0);
  static_assert(Dims::kUnitBytes == HeadDims<kKey, kValue>::kUnitBytes);
  const auto keys = copied<kKey, 1>(kStageTokens, kStageTokens, 0, kBase);
  expect(keys.rbegin()->first < kValueBase, "bytes of keys reach into the values", kKey);
  const auto values = copied<kValue, 1>(kStageTokens, kStageTokens, 0, kValueBase);
  expect(values.rbegin()->first < kEnd, "bytes of values leave", kValue);
  check_boxes<kKey, 1>(keys, kBase);
  check_boxes<kValue, 1>(values, kValueBase);
  for (int lane = 0; lane < 32; ++lane) {
    for (int first_token = 0; first_token < kStageTokens; first_token += 16) {
      const int row = first_token + lane / 16 * 8 + lane % 8;
      const uint32_t first_key = kBase + swizzled_offset(kStageTokens, row, lane / 8 % 2);
      for (int chunk = lane / 8 % 2; chunk < panels(kKey) * 8; chunk += 2) {
        const uint32_t address = step_address(first_key, kStageTokens, chunk / 2);
        expect(address + kChunkBytes <= kValueBase, "ldmatrix leaves the keys", kKey);
        if (chunk >= kKey / 16) continue;  // loaded with the last chunk, but not used
        expect_row<1>(keys, address, row, chunk * 16, "ldmatrix of bytes of keys", kKey);
      }
      const int token = first_token + lane % 16;
      const uint32_t first_value = kValueBase + swizzled_offset(kStageTokens, token, lane / 16);
      for (int chunk = lane / 16; chunk < panels(kValue) * 8; chunk += 2) {
        const uint32_t address = step_address(first_value, kStageTokens, chunk / 2);
        expect(address + kChunkBytes <= kEnd, "ldmatrix leaves", kValue);
        if (chunk >= kValue / 16) continue;
        expect_row<1>(values, address, token, chunk * 16, "ldmatrix of bytes of values", kValue);
      }
    }
  }
}

// Checks the canonical layouts of wgmma. element_of(column): the column of V, or -1 for columns that pad the last
// panel.
template <typename Dims, typename ElementOf>
void check_wgmma_values(const std::map<uint32_t, int>& values, uint32_t base, uint32_t end,
                        ElementOf element_of, const char* what) {
  for (int step = 0; step < kStageTokens / 16; ++step) {  // MN-major: n is the column
    for (int n = 0; n < panels(Dims::kValue * 2) * kPanelColumns; ++n) {
      for (int k = 0; k < 16; ++k) {
        const uint32_t address =
            ValueOperand::address(base, step) + n / kPanelColumns * ValueOperand::kPanelBytes +
            k / 8 * ValueOperand::kGroupBytes + k % 8 * kPanelRowBytes + n % kPanelColumns * 2;
        const int column = element_of(n);
        const int element = column < 0 ? -1 : (step * 16 + k) * 1024 + column;
        expect(at(values, swizzled(address)) == element, what, Dims::kValue);
        expect(address < end, "wgmma reads beyond the stage", Dims::kValue);
      }
    }
  }
}

// Checks one-byte K for wgmma, and V after the converter warps.
template <int kColumns>
void check_conversion() {
  using Dims = HeadDims<kColumns, kColumns, KvType::kE4m3>;
  using Conversion = ValueConversion<kColumns>;
  static_assert(Conversion::kFits);
  constexpr uint32_t kBase = 3 * 1024, kEnd = kBase + Dims::Converted::kValueBytes;
  const auto keys = copied<kColumns, 1>(kStageTokens, kStageTokens, 0, kBase);
  for (int step = 0; step < kColumns / 32; ++step) {  // K-major: n is the token
    for (int n = 0; n < kStageTokens; ++n) {
      for (int k = 0; k < 32; ++k) {
        const uint32_t address = KeyOperand::address(kBase, step) +
                                 n / 8 * KeyOperand::kGroupBytes + n % 8 * kPanelRowBytes + k;
        expect(at(keys, swizzled(address)) == n * 1024 + step * 32 + k, "wgmma of bytes", kColumns);
      }
    }
  }

  constexpr uint32_t kLanding = kEnd - Dims::kValueBytes;
  auto memory = copied<kColumns, 1>(kStageTokens, kStageTokens, 0, kLanding);
  check_boxes<kColumns, 1>(memory, kLanding);
  // Run the warps one after another: no warp may read what another one writes.
  for (int warp = 0; warp < Conversion::kWarps; ++warp) {
    std::map<uint32_t, int> written;
    std::vector<uint32_t> read;
    for (int lane = 0; lane < 32; ++lane) {
      const Conversion conversion{warp, lane};
      for (int i = 0; i < Conversion::kCopies; ++i) {
        const uint32_t source = kLanding + conversion.source(i);
        const int token = conversion.token(i), column = conversion.chunk() * 16;
        expect_row<1>(memory, source, token, column, "the converters' bytes", kColumns);
        for (int byte = 0; byte < kChunkBytes; ++byte) {
          read.push_back(source + byte);
          const uint32_t target = (kBase + conversion.target(i)) ^ (byte / 2 % 2 * kChunkBytes);
          const uint32_t half = target + byte / 4 * 4 + byte % 2 * 2;
          const bool first = written.emplace(half, token * 1024 + column + byte).second;
          expect(first, "two converted numbers overlap", kColumns);
        }
      }
    }
    for (const uint32_t address : read) memory.erase(address);
    for (const auto& [address, element] : written) {
      expect(at(memory, address) == -1 && at(memory, address + 1) == -1,
             "a converter overwrites what the other one reads", kColumns);
    }
    memory.merge(written);
  }
  const auto column = [](int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2; };
  check_wgmma_values<Dims>(memory, kBase, kEnd, column, "wgmma of converted values");
}

// Address -> element of `rows` rows; each warp copies 32 rows panel by panel.
std::map<uint32_t, int> copied_by_panels(int columns, uint32_t base,
                                         int rows = LatentOperand::kRows) {
  std::map<uint32_t, int> memory;
  for (int first_row = 0; first_row < rows; first_row += 32) {
    for (int lane = 0; lane < 32; ++lane) {
      const PanelCopy copy{lane};
      for (int panel = 0; panel < columns / kPanelColumns; ++panel) {
        for (int i = 0; i < PanelCopy::kCopies; ++i) {
          const uint32_t target =
              base + first_row * kPanelRowBytes + panel * rows * kPanelRowBytes + copy.target(i);
          for (int byte = 0; byte < kChunkBytes; byte += 2) {
            const int element = (first_row + copy.row(i)) * 1024 + panel * kPanelColumns +
                                (copy.source() + byte) / 2;
            expect(memory.emplace(target + byte, element).second, "two copies overlap", columns);
          }
        }
      }
    }
  }
  return memory;
}

// Checks latent attention on mma.sync: queries and stages are matrices of 32 rows for four warps. Exactly one warp
// reads each element of a unit's queries, of K and of V.
template <int kKey, int kValue>
void check_latent_parts() {
  using Dims = HeadDims<kKey, kValue, KvType::kAsQueries, LatentPart::kRows>;
  constexpr uint32_t kBase = 3 * 1024;
  static_assert(Dims::kKeyBytes % 1024 == 0 && Dims::kTokens == LatentPart::kRows);
  const auto stage = copied_by_panels(kKey, kBase, LatentPart::kRows);
  expect(stage.size() == size_t{LatentPart::kRows} * kKey, "elements are missing", kKey);
  expect(stage.rbegin()->first < kBase + Dims::kKeyBytes, "the stage is too small", kKey);
  std::map<uint32_t, int> read[3];  // number of reads of queries, keys, values
  for (uint32_t part = 0; part < LatentPart::kParts; ++part) {
    const LatentPart share{part};
    const int depth = part * 16, first_column = part * (kValue / LatentPart::kParts);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const int half = lane / 16, token = lane / 16 * 8 + lane % 8, key_half = lane / 8 % 2;
      for (int panel = 0; panel < Dims::kKeyPanels; ++panel) {
        const uint32_t offset = panel * LatentPart::kPanelBytes;
        const int column = panel * kPanelColumns + depth;
        for (int unit = 0; unit < 2; ++unit) {
          const uint32_t address = kBase + share.queries(unit, lane) + offset;
          expect_row(stage, address, unit * kUnitRows + lane % 16, column + half * 8,
                     "ldmatrix of a part of queries", kKey);
          ++read[0][address];
        }
        for (int pair = 0; pair < LatentPart::kRows / 16; ++pair) {
          const uint32_t address = kBase + share.keys(lane) + offset + pair * 16 * kPanelRowBytes;
          expect_row(stage, address, pair * 16 + token, column + key_half * 8,
                     "ldmatrix of a part of keys", kKey);
          ++read[1][address];
        }
      }
      const uint32_t first = kBase + share.values<kValue / kPanelColumns>(lane);
      for (int step = 0; step < LatentPart::kRows / 16; ++step) {
        for (int pair = 0; pair < kValue / LatentPart::kParts / 16; ++pair) {
          const uint32_t address =
              step_address(first, LatentPart::kRows, pair) + step * 16 * kPanelRowBytes;
          expect_row(stage, address, step * 16 + lane % 16, first_column + pair * 16 + half * 8,
                     "ldmatrix of a part of values", kValue);
          ++read[2][address];
        }
      }
    }
  }
  for (int i = 0; i < 3; ++i) {
    const int columns = i == 2 ? kValue : kKey;
    expect(read[i].size() == size_t{LatentPart::kRows} * columns / 8, "parts leave chunks",
           columns);
    for (const auto& [address, times] : read[i]) expect(times == 1, "parts overlap", columns);
  }
}

// Checks latent attention on wgmma: queries and stages are matrices of 64 rows; V is a stage's first columns.
template <int kKey, int kValue>
  requires(HeadDims<kKey, kValue>::kIsLatent)
void check() {
  using Dims = HeadDims<kKey, kValue>;
  using Operand = LatentOperand;
  constexpr uint32_t kBase = 3 * 1024;
  static_assert(Dims::kKeyBytes % 1024 == 0 && Dims::kTokens == Operand::kRows);
  static_assert(Dims::kValueBytes == 0 && Dims::kKey % kPanelColumns == 0);
  const auto stage = copied_by_panels(kKey, kBase);
  expect(stage.size() == size_t{Operand::kRows} * kKey, "elements are missing", kKey);
  expect(stage.rbegin()->first < kBase + Dims::kKeyBytes, "the stage is too small", kKey);
  std::map<uint32_t, int> runs;  // two TMA boxes of 32 tokens per panel
  for (const auto& [address, element] : boxes<kKey, 2>(0)) {
    constexpr uint32_t kBoxBytes = kStageTokens * kPanelRowBytes;
    for (int half = 0; half < 2; ++half) {
      const uint32_t box = address / kBoxBytes * 2 + half;
      runs[kBase + box * kBoxBytes + address % kBoxBytes] = element + half * kStageTokens * 1024;
    }
  }
  expect(runs == stage, "boxes and copies differ", kKey);
  for (int n = 0; n < Operand::kRows; ++n) {
    for (int step = 0; step < kKey / 16; ++step) {  // K-major: n is the token, or the row
      for (int k = 0; k < 16; ++k) {
        const uint32_t address = Operand::columns(kBase, step) + n / 8 * Operand::kGroupBytes +
                                 n % 8 * kPanelRowBytes + k * 2;
        expect(at(stage, swizzled(address)) == n * 1024 + step * 16 + k, "wgmma of keys", kKey);
      }
    }
  }
  for (int column = 0; column < kValue; ++column) {  // MN-major
    const int panel = column / kPanelColumns, first_panel = panel / 4 * 4;
    for (int step = 0; step < Operand::kRows / 16; ++step) {
      for (int k = 0; k < 16; ++k) {
        const uint32_t address = Operand::tokens(kBase, first_panel, step) +
                                 (panel - first_panel) * Operand::kPanelBytes +
                                 k / 8 * Operand::kGroupBytes + k % 8 * kPanelRowBytes +
                                 column % kPanelColumns * 2;
        expect(at(stage, swizzled(address)) == (step * 16 + k) * 1024 + column, "wgmma of values",
               kValue);
      }
    }
  }
  check_latent_parts<kKey, kValue>();
  std::printf("%d/%d\n", kKey, kValue);
}

// Checks K for wgmma, of wide and other rows: K-major, n is the token.
template <int kKey>
void check_wgmma_keys(const std::map<uint32_t, int>& keys, uint32_t base) {
  for (int step = 0; step < kKey / 16; ++step) {
    for (int n = 0; n < kStageTokens; ++n) {
      for (int k = 0; k < 16; ++k) {
        const uint32_t address = KeyOperand::address(base, step) + n / 8 * KeyOperand::kGroupBytes +
                                 n % 8 * kPanelRowBytes + k * 2;
        expect(at(keys, swizzled(address)) == n * 1024 + step * 16 + k, "wgmma of keys", kKey);
      }
    }
  }
}

// Checks wide rows, which are copied by panels. wgmma reads queries wherever their tile begins in the ring of 64 rows.
template <int kKey, int kValue>
  requires(HeadDims<kKey, kValue>::kIsWide)
void check() {
  using Dims = HeadDims<kKey, kValue>;
  constexpr uint32_t kBase = 3 * 1024;
  constexpr int kRingRows = 4 * kUnitRows;
  const uint32_t value_base = kBase + Dims::kKeyBytes, end = value_base + Dims::kValueBytes;
  const auto keys = copied_by_panels(kKey, kBase, kStageTokens);
  const auto values = copied_by_panels(kValue, value_base, kStageTokens);
  expect(keys.rbegin()->first < value_base, "keys reach into the values", kKey);
  expect(values.rbegin()->first < end, "values leave the stage", kValue);
  check_boxes<kKey, 2>(keys, kBase);
  check_boxes<kValue, 2>(values, value_base);
  check_wgmma_keys<kKey>(keys, kBase);
  check_wgmma_values<Dims>(values, value_base, end, [](int n) { return n; }, "wgmma of values");

  for (int units = 1; units <= 4; units *= 2) {
    for (int first_unit = 0; first_unit < 4; first_unit += units) {
      const uint32_t tile = kBase + first_unit * kUnitRows * kPanelRowBytes;
      std::map<uint32_t, int> queries;
      for (int unit = 0; unit < units; ++unit) {  // as in copy_queries
        for (int lane = 0; lane < 32; ++lane) {
          const PanelCopy copy{lane};
          for (int i = 0; i < PanelCopy::kCopies * kUnitRows / kStageTokens; ++i) {
            const int row = unit * kUnitRows + copy.row(i);
            for (int panel = 0; panel < Dims::kQueryPanels; ++panel) {
              for (int byte = 0; byte < kChunkBytes; byte += 2) {
                const uint32_t target =
                    tile + (panel * kRingRows + unit * kUnitRows) * kPanelRowBytes + copy.target(i);
                const int column = panel * kPanelColumns + (copy.source() + byte) / 2;
                queries[target + byte] = row * 1024 + column;
              }
            }
          }
        }
      }
      const int rows = units * kUnitRows;
      expect(queries.size() == static_cast<size_t>(rows) * kKey, "queries overlap", kKey);
      expect(queries.rbegin()->first < kBase + 4 * Dims::kUnitBytes, "queries leave", kKey);
      for (int step = 0; step < kKey / 16; ++step) {
        for (int row = 0; row < rows; ++row) {
          for (int k = 0; k < 16; ++k) {
            const uint32_t address = tile + step_address(0, kRingRows, step) +
                                     row / 8 * KeyOperand::kGroupBytes + row % 8 * kPanelRowBytes +
                                     k * 2;
            expect(at(queries, swizzled(address)) == row * 1024 + step * 16 + k, "wgmma of queries",
                   kKey);
          }
        }
      }
    }
  }
  std::printf("%d/%d\n", kKey, kValue);
}

template <int kKey, int kValue>
void check() {
  using Dims = HeadDims<kKey, kValue>;
  constexpr uint32_t kBase = 3 * 1024;
  static_assert(Dims::kKeyBytes % 1024 == 0 && Dims::kValueBytes % 1024 == 0);
  static_assert(Dims::kUnitBytes % 1024 == 0);

  const auto keys = copied<kKey, 2>(kStageTokens, kStageTokens, 0, kBase);
  expect(keys.rbegin()->first < kBase + Dims::kKeyBytes, "keys reach into the values", kKey);
  const uint32_t value_base = kBase + Dims::kKeyBytes, end = value_base + Dims::kValueBytes;
  const auto values = copied<kValue, 2>(kStageTokens, kStageTokens, 0, value_base);
  expect(values.rbegin()->first < end, "values leave the stage", kValue);
  check_boxes<kKey, 2>(keys, kBase);
  check_boxes<kValue, 2>(values, value_base);

  for (int lane = 0; lane < 32; ++lane) {
    for (int first_token = 0; first_token < kStageTokens; first_token += 16) {
      const uint32_t row = first_token + lane / 16 * 8 + lane % 8;
      const uint32_t first_key = kBase + swizzled_offset(kStageTokens, row, lane / 8 % 2);
      for (int step = 0; step < kKey / 16; ++step) {
        expect_row(keys, step_address(first_key, kStageTokens, step), row,
                   step * 16 + lane / 8 % 2 * 8, "ldmatrix of keys", kKey);
      }
      const uint32_t token = first_token + lane % 16;
      const uint32_t first_value = value_base + swizzled_offset(kStageTokens, token, lane / 16);
      for (int pair = 0; pair < kValue / 16; ++pair) {
        expect_row(values, step_address(first_value, kStageTokens, pair), token,
                   pair * 16 + lane / 16 * 8, "ldmatrix of values", kValue);
      }
    }
  }

  check_wgmma_keys<kKey>(keys, kBase);
  check_wgmma_values<Dims>(
      values, value_base, end, [](int n) { return n < kValue ? n : -1; }, "wgmma of values");

  for (int units = 1; units <= 4; units *= 2) {
    const int tile_rows = units * kUnitRows;
    std::map<uint32_t, int> queries;
    for (int unit = 0; unit < units; ++unit) {
      queries.merge(copied<kKey, 2>(kUnitRows, tile_rows, unit * kUnitRows, kBase));
    }
    expect(queries.size() == static_cast<size_t>(tile_rows) * kKey, "queries overlap", kKey);
    expect(queries.rbegin()->first < kBase + units * Dims::kUnitBytes, "queries leave", kKey);
    for (int lane = 0; lane < 32; ++lane) {
      for (int first_row = 0; first_row < tile_rows; first_row += kUnitRows) {
        const int row = first_row + lane % 16;
        const uint32_t first = kBase + swizzled_offset(tile_rows, row, lane / 16);
        for (int step = 0; step < kKey / 16; ++step) {
          expect_row(queries, step_address(first, tile_rows, step), row, step * 16 + lane / 16 * 8,
                     "ldmatrix of queries", kKey);
        }
        // With one-byte K, a lane loads the four of every 16 query columns that ldmatrix gives it of K.
        for (const int own_row : {first_row + lane / 4, first_row + lane / 4 + 8}) {
          const uint32_t own = kBase +
                               swizzled_offset(tile_rows, first_row + lane / 4, lane / 2 % 2) +
                               lane % 2 * 8 + (own_row - first_row) / 8 * 8 * kPanelRowBytes;
          for (int step = 0; step < kKey / 16; ++step) {
            expect_row(queries, step_address(own, tile_rows, step), own_row,
                       step * 16 + lane % 4 * 4, "loads of queries", kKey, 4);
          }
        }
      }
    }
  }
  check_bytes<kKey, kValue>();
  if constexpr (kKey == kValue && ValueConversion<kValue>::kFits) check_conversion<kKey>();
  std::printf("%d/%d\n", kKey, kValue);
}

}  // namespace

int main() {
#define PAT_PAIR(key, value) check<key, value>();
  PAT_PAIRS
}
