// Shared memory of pack_decode over latent attention, whose CTA has one tile of 64 query rows, and one load of a token
// for its key and its value.
//
//   queries     64 rows: those of the next item come when the last scores of this one are there
//   KV ring     2 stages of 64 tokens in three parts, each of which arrives by itself, and is handed back by itself: the
//               values that one warpgroup multiplies, those of the other, and the last panel. That one is free for other
//               use where the stage's scores are there: the weights of 64 rows and 64 tokens lie in it then, for the
//               other warpgroup
#pragma once

#include "pack_decode/work_queue.cuh"

namespace pat {

inline constexpr int kLatentGroups = 2;  // warpgroups: each has half of the output's columns
static_assert(kLatentConsumerWarps == 4 * kLatentGroups);
static_assert(kLatentTiles.largest_block_q() == kMaxTileRows &&
              kLatentTileTable[kNumLatentTiles - 1].block_kv == LatentOperand::kRows &&
              kLatentTileTable[kNumLatentTiles - 1].num_warps == kLatentConsumerWarps);
inline constexpr int kLatentStages = 2;
inline constexpr int kStageParts = kLatentGroups + 1;
inline constexpr int kPartPanels = 4;  // of a part of a stage, but of the last, which has one
inline constexpr int kLatentRecords = 2;

// All but the KV ring.
template <typename Dims>
  requires(kHasLatentWgmma<Dims>)
struct SharedState<Dims> {
  static_assert(Dims::kValue == kLatentGroups * kPartPanels * kPanelColumns &&
                Dims::kKeyPanels == kLatentGroups * kPartPanels + 1);
  alignas(kSharedAlignment) uint8_t queries[kMaxTileRows * Dims::kQueryPanels * kPanelRowBytes];
  float maxima[kMaxTileRows];
  float sums[kLatentRecords][kLatentGroups][kMaxTileRows];  // of an item
  ItemRecord records[kLatentRecords];
  StageRecord stage_records[kLatentStages];
  int32_t drawn[kDrawsAhead];  // from the producer that draws to the others
  alignas(8) uint64_t kv_full[kLatentStages][kStageParts];
  uint64_t kv_empty[kLatentStages][kStageParts];
  uint64_t queries_full;
  uint64_t queries_empty;
  uint64_t sums_full;
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
};

}  // namespace pat
