// Checks on the host that the producers of pack_decode and its consumers mean the same bytes of shared memory, for each
// pair of head_dims given as PAT_PAIRS. The producer's side is the arithmetic of copy_stage and copy_queries; the
// consumers' is ldmatrix as mma_body.cuh addresses it, and the operands of wgmma as PTX defines their canonical layouts.
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

// Address -> element (row * 1024 + column), as the copies of a warp leave it.
template <int kColumns>
std::map<uint32_t, int> copied(int rows, int tile_rows, int first_row, uint32_t base) {
  using Copy = RowCopy<kColumns>;
  std::map<uint32_t, int> memory;
  std::vector<int> times(rows * Copy::kChunks);
  for (int lane = 0; lane < 32; ++lane) {
    const Copy copy{lane};
    for (int i = 0; i < Copy::copies(rows); ++i) {
      const int row = copy.row(i), chunk = copy.chunk(i);
      expect(row < rows && chunk < Copy::kChunks, "a copy is outside of the rows", kColumns);
      ++times[row * Copy::kChunks + chunk];
      const uint32_t target = base + swizzled_offset(tile_rows, first_row + row, chunk);
      // As copy_stage has it: the offset of the same copy in the first period.
      const int first = i % Copy::kPeriod;
      const uint32_t shortened =
          base + swizzled_offset(tile_rows, first_row + copy.row(first), copy.chunk(first)) +
          i / Copy::kPeriod * Copy::kPeriodRows * kPanelRowBytes;
      expect(target == shortened, "the swizzle does not repeat", kColumns);
      if constexpr (Copy::kWholeRows) {
        expect(chunk == copy.chunk(0), "a lane changes its chunk", kColumns);
      }
      for (int byte = 0; byte < kChunkBytes; byte += 2) {
        const int element = (first_row + row) * 1024 + chunk * 8 + byte / 2;
        expect(memory.emplace(target + byte, element).second, "two copies overlap", kColumns);
      }
    }
  }
  for (const int count : times) expect(count == 1, "a chunk is not copied once", kColumns);
  return memory;
}

// The copies of one-byte elements: each 16 columns of each row once, and both chunks of the converted ones in their places.
template <int kColumns>
void check_byte_rows() {
  using Copy = ByteRowCopy<kColumns>;
  std::vector<int> times(kStageTokens * Copy::kCopies);
  for (int lane = 0; lane < 32; ++lane) {
    const Copy copy{lane};
    for (int i = 0; i < Copy::kCopies; ++i) {
      const int row = copy.row(i), group = copy.column_group(i);
      expect(row < kStageTokens && group < Copy::kCopies, "bytes are outside of the rows",
             kColumns);
      ++times[row * Copy::kCopies + group];
      if constexpr (Copy::kWholeRows) {
        expect(group == copy.column_group(0), "a lane changes its columns", kColumns);
      }
      for (const uint32_t half : {0, 1}) {
        expect((copy.stage_offset(i) ^ half * kChunkBytes) ==
                   swizzled_offset(kStageTokens, row, 2 * group + half),
               "converted bytes are in the wrong place", kColumns);
      }
    }
  }
  for (const int count : times) expect(count == 1, "bytes are not copied once", kColumns);
  if constexpr (Copy::kWholeRows) {
    for (int lane = 0; lane < 32; lane += 8) {  // that store at the same time
      unsigned banks = 0;
      for (int i = 0; i < 8; ++i) banks |= 1u << Copy{lane + i}.stage_offset(0) / kChunkBytes % 8;
      expect(banks == 0xff, "stores of converted bytes meet in a bank", kColumns);
    }
  }
}

// What lies at an address, or -1.
int at(const std::map<uint32_t, int>& memory, uint32_t address) {
  const auto found = memory.find(address);
  return found == memory.end() ? -1 : found->second;
}

// One lane's 16 bytes for ldmatrix.
void expect_row(const std::map<uint32_t, int>& memory, uint32_t address, int row, int column,
                const char* what, int columns) {
  for (int i = 0; i < 8; ++i) {
    expect(at(memory, address + 2 * i) == row * 1024 + column + i, what, columns);
  }
}

// The 128-byte swizzle of wgmma: bits 4 to 6 of an address are XORed with bits 7 to 9.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

template <int kKey, int kValue>
void check() {
  using Dims = HeadDims<kKey, kValue>;
  constexpr uint32_t kBase = 3 * 1024;
  static_assert(Dims::kKeyBytes % 1024 == 0 && Dims::kStageBytes % 1024 == 0);
  static_assert(Dims::kUnitBytes % 1024 == 0);

  const auto keys = copied<kKey>(kStageTokens, kStageTokens, 0, kBase);
  expect(keys.rbegin()->first < kBase + Dims::kKeyBytes, "keys reach into the values", kKey);
  const uint32_t value_base = kBase + Dims::kKeyBytes;
  const auto values = copied<kValue>(kStageTokens, kStageTokens, 0, value_base);
  expect(values.rbegin()->first < kBase + Dims::kStageBytes, "values leave the stage", kValue);

  check_byte_rows<kKey>();
  check_byte_rows<kValue>();

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

  for (int step = 0; step < kKey / 16; ++step) {  // K-major: n is the token
    for (int n = 0; n < kStageTokens; ++n) {
      for (int k = 0; k < 16; ++k) {
        const uint32_t address = KeyOperand::address(kBase, step) +
                                 n / 8 * KeyOperand::kGroupBytes + n % 8 * kPanelRowBytes + k * 2;
        expect(at(keys, swizzled(address)) == n * 1024 + step * 16 + k, "wgmma of keys", kKey);
      }
    }
  }
  for (int step = 0; step < kStageTokens / 16; ++step) {  // MN-major: n is the column
    for (int n = 0; n < Dims::kValuePanels * kPanelColumns; ++n) {
      for (int k = 0; k < 16; ++k) {
        const uint32_t address = ValueOperand::address(value_base, step) +
                                 n / kPanelColumns * ValueOperand::kPanelBytes +
                                 k / 8 * ValueOperand::kGroupBytes + k % 8 * kPanelRowBytes +
                                 n % kPanelColumns * 2;
        // Columns that fill the last panel: inside of the stage, and nobody's.
        const int element = n < kValue ? (step * 16 + k) * 1024 + n : -1;
        expect(at(values, swizzled(address)) == element, "wgmma of values", kValue);
        expect(address < kBase + Dims::kStageBytes, "wgmma reads beyond the stage", kValue);
      }
    }
  }

  for (int units = 1; units <= 4; units *= 2) {
    const int tile_rows = units * kUnitRows;
    std::map<uint32_t, int> queries;
    for (int unit = 0; unit < units; ++unit) {
      queries.merge(copied<kKey>(kUnitRows, tile_rows, unit * kUnitRows, kBase));
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
      }
    }
  }
  std::printf("%d/%d\n", kKey, kValue);
}

}  // namespace

int main() {
#define PAT_PAIR(key, value) check<key, value>();
  PAT_PAIRS
}
