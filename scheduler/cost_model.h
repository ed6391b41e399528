// The cost models of packing and of the KV split, and their measured or estimated values for GPUs. Each model has its
// own unit.
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
// Upper bound for every cost. It keeps the sums over any batch that fits into memory within int64.
inline constexpr int32_t kLargestCost = 1 << 20;

// Packing costs measure throughput. The unit is the time in which the GPU, with all SMs reading, reads one KV token of
// one KV head from device memory.
struct PackingCosts {
  // Reading a token that another work item reads too, so that it comes from the L2.
  int32_t reread_token = 21;  // 0.33
  // Writing and reading one more partial of one query row.
  int32_t partial_row = 74;  // 1.16
  // One more work item, spread over all CTAs.
  int32_t item = 608;  // 9.5

  bool operator==(const PackingCosts&) const = default;
};

// Split costs measure the time of one CTA. The unit is the time that a CTA needs for one KV token of one KV head.
struct SplitCosts {
  // Starting one more work item: its queries, its first loads, its epilogue.
  int32_t item = 608;  // 9.5
  // Finishing one query row of a work item: normalising and storing it.
  int32_t query_row = 61;  // 0.95
  // The least time of a work item: the latency of its loads.
  int32_t shortest = 48 * kCostUnit;
  // One KV token, for each tile of kTileTable. By default the tiles cost the same, because all wait for memory.
  std::array<int32_t, kNumTiles> token = default_token();

  // A tile of latent attention costs as much as the first tile of kTileTable with as many rows.
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

  // Throws std::invalid_argument, which names the cost, if a cost is out of range.
  void check() const {
    visit(*this, [](const std::string& name, int32_t value, int32_t least) {
      PAT_CHECK(value >= least && value <= kLargestCost, "cost ", name, " must be ", least,
                " / 64 to ", kLargestCost / kCostUnit, ", got ", value, " / 64");
    });
  }
};

// Costs for GPUs. The first entry whose name is part of the device's name applies. Measured costs are fitted to runs of
// `sglang-pat calibrate`. All others are estimated from the GPU's bandwidths.
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
// cores about as long as for memory, so reading a token again costs nearly as much as reading it first. Packing then
// pays only because it saves tiles. The costs are estimated from the work of such a tile and an H100's bandwidths, for
// all GPUs.
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
