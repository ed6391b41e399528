// Stage 3: packs -> work items. Packs are cut into tiles by requests and into pieces by KV, and bundled into tickets
// that the CTAs draw, so that all finish together.
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
  // No cut makes a piece shorter than this; a multiple of kCutGranularity.
  int32_t min_piece_tokens;
};
// Cuts lie at multiples of this from the pack's beginning.
inline constexpr int32_t kCutGranularity = 64;
inline constexpr int32_t kMaxWorkers = 1 << 16;

// Some requests of one pack against one range of its KV: what a CTA executes in one go.
struct Piece {
  int32_t pack;           // index into Packing::packs
  int32_t tile;           // index into the tile table
  int32_t request_begin;  // into Packing::requests
  int32_t num_requests;
  int32_t kv_begin;
  int32_t kv_end;
};

// A run of pieces that one CTA executes in a row.
struct Ticket {
  int32_t piece_begin;
  int32_t piece_end;
};

struct Split {
  // In the order of the packs: a request's pieces ascend in position.
  std::vector<Piece> pieces;
  // In the order in which they are drawn; each piece is in one of them.
  std::vector<Ticket> tickets;
};

class KvSplitter {
 public:
  // Throws std::invalid_argument if num_workers is not 1 to kMaxWorkers, or min_piece_tokens is not a positive
  // multiple of kCutGranularity.
  KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles);

  // A little work becomes one ticket per worker: a contiguous cost-balanced split (Stream-K) with at most
  // num_workers - 1 cuts. The budget of a ticket is the smallest, up to a few tokens, with which the packs fit; found
  // by bisection, each step linear in the tiles.
  //
  // More work becomes tickets that shrink with what is left (guided self-scheduling): the first are large, and the
  // last are small enough to even out what costs cannot foresee. Tickets of shared packs, whose KV mostly comes out
  // of the L2, are drawn among those of private ones, which wait for device memory: each uses what the other leaves.
  void split(const Packing& packing, Split& out);

  // Cost of the slowest worker over the mean of all, if each draws its next ticket when it is done. 1 without
  // work.
  double tail(const Split& split) const;

  // How many requests all cuts of a split concern at most, counted once per cut: each adds a partial. It bounds the
  // cuts too.
  static int64_t max_cut_requests(int32_t num_workers, const TileSelection& tiles) {
    return int64_t{num_workers} * tiles.requests_per_tile();
  }

 private:
  struct Tile {
    int32_t pack;
    int32_t tile;
    int32_t request_begin;
    int32_t num_requests;
    int32_t num_rows;
    int32_t num_tokens;
    int64_t rate;   // cost per token, 1 / kRateUnit
    int64_t fixed;  // cost per piece, 1 / kRateUnit
    int64_t whole;  // cost uncut, 1 / kRateUnit
  };
  // Part of the list of tiles, and how far its pieces have been dealt out.
  struct Stream {
    size_t tile;
    size_t end;
    int32_t offset;  // tokens of `tile` that are dealt out
    int64_t total;   // cost
    int64_t done;
    int64_t cut_requests;  // requests of the tiles that were cut, once per cut
    std::vector<Piece>& pieces;

    bool is_empty() const { return tile == end; }
    double progress() const { return static_cast<double>(done) / static_cast<double>(total); }
  };

  void list_tiles(const Packing& packing);
  int64_t total_cost(size_t begin, size_t end) const;
  Piece piece_of(const Packing& packing, const Tile& tile, int32_t offset, int32_t tokens) const;
  // Of a piece of `num_tokens` of a tile, in 1 / kRateUnit.
  int64_t cost(const Tile& tile, int32_t num_tokens) const;

  void split_evenly(const Packing& packing, int64_t total, Split& out);
  // Tokens of a tile that still go to a ticket with `room` left: all `left`, a cut, or 0 for none.
  int32_t tokens_that_fit(const Tile& tile, int32_t left, int64_t room) const;
  // Walks the tiles and calls piece(tile, offset, tokens, ticket), tickets ascending. Returns their number.
  template <typename PieceFn>
  int32_t deal(int64_t budget, PieceFn&& piece) const;
  int64_t smallest_budget(int64_t total) const;

  // False, with `out` in no particular state, if that takes more cuts than an even split might: a few tiles of many
  // requests with very long KV. So the partials of a batch have a bound.
  bool split_guided(const Packing& packing, int64_t total, Split& out);
  Ticket take_ticket(const Packing& packing, Stream& stream, int64_t budget) const;
  // Tokens of a tile, `left` in all, that are the first piece of a ticket.
  int32_t first_piece(const Tile& tile, int32_t left, int64_t budget) const;

  SplitConfig config_;
  CostModel cost_;
  TileSelection tiles_;
  std::vector<Tile> list_;  // of the shared packs, then of the private ones
  size_t num_shared_tiles_ = 0;
  std::vector<Piece> private_pieces_;
  std::vector<int32_t> private_tickets_;  // indices into Split::tickets
};

}  // namespace pat
