// Shared memory of pack_decode for latent attention on wgmma. A CTA computes one tile of 64 query rows at a time. The
// CTA loads each token once, because the token's value is a part of its key.
//
//   queries     64 rows. The next item's queries are loaded after the current item's last scores have been computed.
//   KV ring     2 stages of 64 tokens. A stage has three parts with their own barriers: the values that the first
//               warpgroup multiplies, the values that the second multiplies, and the last panel. After the scores of
//               the stage have been computed, the last panel is free. The warpgroup that has computed the scores then
//               writes its weights (64 rows by 64 tokens) there for the other warpgroup.
#pragma once

#include "pack_decode/work_queue.cuh"

namespace pat {

inline constexpr int kLatentGroups = 2;  // consumer warpgroups; each has half of the output columns
static_assert(kLatentConsumerWarps == 4 * kLatentGroups);
static_assert(kLatentTileTable.largest_block_q() == kMaxTileRows &&
              kLatentTileTable[kNumLatentTiles - 1].block_kv == LatentOperand::kRows &&
              kLatentTileTable[kNumLatentTiles - 1].num_warps == kLatentConsumerWarps);
inline constexpr int kLatentStages = 2;
inline constexpr int kStageParts = kLatentGroups + 1;
inline constexpr int kPartPanels = 4;  // panels per part of a stage; the last part has one panel
inline constexpr int kLatentRecords = 2;

// The shared memory of a CTA, except the KV ring.
template <typename Dims>
  requires(kHasLatentWgmma<Dims>)
struct SharedState<Dims> {
  static_assert(Dims::kValue == kLatentGroups * kPartPanels * kPanelColumns &&
                Dims::kKeyPanels == kLatentGroups * kPartPanels + 1);
  alignas(kSharedAlignment) uint8_t queries[kMaxTileRows * Dims::kQueryPanels * kPanelRowBytes];
  float maxima[kMaxTileRows];
  float sums[kLatentRecords][kLatentGroups][kMaxTileRows];  // softmax sums of item i: [i % 2]
  ItemRecord records[kLatentRecords];
  StageRecord stage_records[kLatentStages];
  int32_t drawn[kDrawsAhead];  // draws that the K producer passes to the other producers
  alignas(8) uint64_t kv_full[kLatentStages][kStageParts];
  uint64_t kv_empty[kLatentStages][kStageParts];
  uint64_t queries_full;
  uint64_t queries_empty;
  uint64_t sums_full;
  uint64_t drawn_full[kDrawsAhead];
  uint64_t drawn_empty[kDrawsAhead];
};

}  // namespace pat
