// The costs by which packing and the KV split decide, and their measured or estimated values for some GPUs. Packing
// costs and split costs have different units.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "check.h"
#include "tile_table.h"

namespace pat {

// Costs are integers, in 1 / kCostUnit tokens, so that all ranks make the same plan.
inline constexpr int32_t kCostUnit = 64;
// Upper bound for every cost. With it, no sum of costs overflows int64 for any batch that fits into memory.
inline constexpr int32_t kLargestCost = 1 << 20;

// Packing costs measure throughput. The unit is the time that the whole GPU (all SMs together) needs to read one KV
// token of one KV head from device memory.
struct PackingCosts {
  // Reading a token from the L2, because another work item reads it too.
  int32_t reread_token = 21;  // 0.33
  // One more partial of one query row: writing it, and reading it to merge it.
  int32_t partial_row = 74;  // 1.16
  // One more work item: its time in one CTA, divided by the number of CTAs.
  int32_t item = 608;  // 9.5

  bool operator==(const PackingCosts&) const = default;
};

// Split costs measure the time of one CTA. The unit is the time that a CTA needs for one KV token of one KV head.
struct SplitCosts {
  // Fixed time of a work item: for its queries, its first loads and its epilogue.
  int32_t item = 608;  // 9.5
  // Finishing one query row of a work item: normalising and storing its result.
  int32_t query_row = 61;  // 0.95
  // The least time for the KV of a work item, however few tokens it has: the latency of loads.
  int32_t shortest = 48 * kCostUnit;
  // Per tile of kTileTable: one KV token. By default all tiles have the same cost, because all wait for memory.
  std::array<int32_t, kNumTiles> token = default_token();

  // Cost of one KV token in a tile. A tile of latent attention has the cost of the first tile in kTileTable with at
  // least as many rows.
  constexpr int32_t token_of(const TileConfig& body) const {
    int32_t tile = 0;
    while (tile + 1 < kNumTiles && kTileTable[tile].block_q < body.block_q) ++tile;
    return token[tile];
  }

  bool operator==(const SplitCosts&) const = default;

 private:
  static constexpr std::array<int32_t, kNumTiles> default_token() {
    std::array<int32_t, kNumTiles> costs{};
    costs.fill(kCostUnit);
    return costs;
  }
};

struct CostModel {
  PackingCosts packing = {};
  SplitCosts split = {};

  bool operator==(const CostModel&) const = default;

  // Calls visit(name, cost, least) for every cost. `name` is the cost's name in the Python class, `least` its lower
  // bound.
  template <typename Self, typename Visit>
  static void visit(Self& self, Visit&& visit) {
    visit("reread_token", self.packing.reread_token, 0);
    visit("partial_row", self.packing.partial_row, 0);
    visit("packed_item", self.packing.item, 0);
    visit("item", self.split.item, 0);
    visit("query_row", self.split.query_row, 0);
    visit("shortest", self.split.shortest, 0);
    for (int32_t tile = 0; tile < kNumTiles; ++tile) {
      visit("token_" + std::to_string(kTileTable[tile].block_q), self.split.token[tile], 1);
    }
  }

  // If a cost is out of range, throws std::invalid_argument with the cost's name.
  void check() const {
    visit(*this, [](const std::string& name, int32_t value, int32_t least) {
      PAT_CHECK(value >= least && value <= kLargestCost, "cost ", name, " must be ", least,
                " / 64 to ", kLargestCost / kCostUnit, ", got ", value, " / 64");
    });
  }
};

// Costs for one model of GPU. A device gets the first entry whose `gpu` is part of the device's name. Measured costs
// are fitted to runs of `sglang-pat calibrate`. All other costs are estimated from the GPU's bandwidths.
struct ShippedCosts {
  std::string_view gpu;
  bool is_measured;
  CostModel cost;
};
// The H200's costs are the mean of two fits to 32 plans each.
inline constexpr std::array<ShippedCosts, 5> kShippedCosts = {{
    {.gpu = "H100", .is_measured = true, .cost = {}},
    {.gpu = "H200",
     .is_measured = true,
     .cost = {.packing = {.reread_token = 38, .partial_row = 37, .item = 1531},
              .split = {.item = 1531, .query_row = 59}}},
    {.gpu = "A100", .is_measured = false, .cost = {.packing = {.reread_token = 18}}},
    {.gpu = "L40S", .is_measured = false, .cost = {.packing = {.reread_token = 11}}},
    {.gpu = "B200", .is_measured = false, .cost = {.packing = {.reread_token = 32}}},
}};

// Costs for latent attention, where the unit is a token of the only KV head. A tile of 64 rows waits for the tensor
// cores about as long as for memory, so rereading a token from the L2 costs most of what its first read costs. Packing
// then pays only because it saves tiles. For all GPUs, the costs are estimated from the work of such a tile and an
// H100's bandwidths.
inline constexpr CostModel latent_costs(int32_t reread_token) {
  return {.packing = {.reread_token = reread_token,
                      .partial_row = 115,  // 1.8
                      .item = 60 * kCostUnit},
          .split = {.item = 60 * kCostUnit, .shortest = 128 * kCostUnit}};
}
inline constexpr std::array<ShippedCosts, 2> kShippedLatentCosts = {{
    {.gpu = "H100", .is_measured = false, .cost = latent_costs(38)},
    {.gpu = "H200", .is_measured = false, .cost = latent_costs(54)},
}};

}  // namespace pat
