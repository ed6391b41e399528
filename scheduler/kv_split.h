// Stage 3: packs -> work items. Packs are cut into tiles by requests and into pieces by KV, and dealt out to the
// workers so that all finish together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost_model.h"
#include "packing.h"
#include "tile_selection.h"

namespace pat {

struct SplitConfig {
  int32_t num_workers;  // CTAs per KV head
  int32_t
      min_piece_tokens;  // no cut makes a piece shorter than this; a multiple of kCutGranularity
};
inline constexpr int32_t kCutGranularity =
    64;  // cuts lie at multiples of this from the pack's beginning

// Some requests of one pack against one range of its KV: what one worker executes in one go.
struct Piece {
  int32_t pack;           // index into Packing::packs
  int32_t tile;           // index into the tile table
  int32_t request_begin;  // into Packing::requests
  int32_t num_requests;
  int32_t kv_begin;
  int32_t kv_end;
};

struct Split {
  std::vector<Piece> pieces;  // in the order of the packs: a request's pieces ascend in position
  std::vector<int32_t>
      worker_begin;  // [num_workers + 1]: worker w executes a contiguous run of pieces
};

class KvSplitter {
 public:
  // Throws std::invalid_argument if num_workers < 1 or min_piece_tokens is not a positive multiple of
  // kCutGranularity.
  KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles);

  // Contiguous cost-balanced split (Stream-K): at most num_workers - 1 cuts. The budget of a worker is the
  // smallest, up to a few tokens, with which the packs fit; found by bisection, each step linear in the tiles.
  void split(const Packing& packing, Split& out);

  // Of the last split(): how many tiles each body has, in the order of the tile table; and the cost of the
  // slowest worker over the mean of all workers, 1 without work.
  void summarize_tiles(std::span<int32_t> tiles_by_body) const;
  double tail(const Split& split) const;

 private:
  struct Tile {
    int32_t pack;
    int32_t tile;
    int32_t request_begin;
    int32_t num_requests;
    int32_t num_tokens;
    int64_t rate;   // cost per token, 1 / kRateUnit
    int64_t fixed;  // cost per piece, 1 / kRateUnit
  };

  void list_tiles(const Packing& packing);
  // Of a piece of `num_tokens` of a tile, in 1 / kRateUnit.
  int64_t cost(const Tile& tile, int32_t num_tokens) const;
  // Tokens of a tile that still go to a worker with `room` left: all `left`, a cut, or 0 for none.
  int32_t tokens_that_fit(const Tile& tile, int32_t left, int64_t room) const;
  // Walks the tiles and calls piece(tile, offset, tokens, worker). Returns the number of workers used.
  template <typename PieceFn>
  int32_t deal(int64_t budget, PieceFn&& piece) const;
  int64_t smallest_budget() const;

  SplitConfig config_;
  CostModel cost_;
  TileSelection tiles_;
  std::vector<Tile> list_;
};

}  // namespace pat
