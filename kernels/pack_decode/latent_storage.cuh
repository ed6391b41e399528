// Shared memory of pack_decode over latent attention. A CTA has one tile of 64 query rows, and loads a token once, for
// its key and its value.
//
//   queries     64 rows. Those of the next item are loaded once the last scores of the present item are computed
//   KV ring     2 stages of 64 tokens. A stage has three parts: the values that the first warpgroup multiplies, the
//               values that the second multiplies, and the last panel. Each part arrives and is handed back by itself.
//               Once the stage's scores are computed, the last panel is free: the warpgroup that computed them writes
//               its weights (64 rows by 64 tokens) there for the other warpgroup
#pragma once

#include "pack_decode/work_queue.cuh"

namespace pat {

inline constexpr int kLatentGroups = 2;  // warpgroups, each with half of the output's columns
static_assert(kLatentConsumerWarps == 4 * kLatentGroups);
static_assert(kLatentTiles.largest_block_q() == kMaxTileRows &&
              kLatentTileTable[kNumLatentTiles - 1].block_kv == LatentOperand::kRows &&
              kLatentTileTable[kNumLatentTiles - 1].num_warps == kLatentConsumerWarps);
inline constexpr int kLatentStages = 2;
inline constexpr int kStageParts = kLatentGroups + 1;
inline constexpr int kPartPanels = 4;  // panels of each part of a stage; the last part has one
inline constexpr int kLatentRecords = 2;

// The shared memory without the KV ring.
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
  int32_t drawn[kDrawsAhead];  // tickets drawn by the K producer, for the other producers
  alignas(8) uint64_t kv_full[kLatentStages][kStageParts];
  uint64_t kv_empty[kLatentStages][kStageParts];
  uint64_t queries_full;
  uint64_t queries_empty;
  uint64_t sums_full;
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
};

}  // namespace pat
