// Stage 3: packs -> work items. Packs are cut into tiles by requests and into pieces by KV, and bundled into tickets
// that the CTAs draw, so that all finish together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cost_model.h"
#include "packing.h"
#include "tile_selection.h"

namespace pat {

struct SplitConfig {
  int32_t num_workers;  // CTAs per KV head
  // No cut makes a piece shorter than this, nor a part of a segment, as long as that leaves four pieces for each
  // worker, else than a quarter of it; a multiple of kCutGranularity, which is the least in any case.
  int32_t min_piece_tokens;
};
// Cuts within a segment lie at multiples of this from its beginning.
inline constexpr int32_t kCutGranularity = 64;
inline constexpr int32_t kMaxWorkers = 1 << 16;

// What a CTA executes in one go: some requests of a pack, and KV ranges for intervals of them. It has those requests
// that one of its ranges is for, and no others.
struct Piece {
  int32_t tile;           // index into the tile table
  int32_t request_begin;  // into Split::requests
  int32_t num_requests;
  int32_t segment_begin;  // into Split::segments; their intervals are of the piece's requests
  int32_t num_segments;
  int64_t num_tokens;
  int64_t cost;
};

// A run of pieces that one CTA executes in a row.
struct Ticket {
  int32_t piece_begin = 0;
  int32_t piece_end = 0;
  // The first piece is what another ticket has left of a tile. It is executed last: so tickets begin with the
  // beginnings of tiles, and read what these share at the same time.
  bool rest_comes_last = false;
};

struct Split {
  // In the order of the packs: a request's pieces ascend in position.
  std::vector<Piece> pieces;
  std::vector<int32_t> requests;
  std::vector<Segment> segments;
  // In the order in which they are drawn; each piece is in one of them.
  std::vector<Ticket> tickets;
  // How long it is expected to take, to be compared with other splits of the same batch. 0 of much work, and of what
  // was not split.
  int64_t time = 0;

  void clear();
};

// What a splitter is told of a batch beside its packs.
struct SplitTask {
  int32_t num_requests;
  int64_t num_unique;  // KV tokens, each counted once
  // Of another split of the batch. What cannot take less is not split: no tickets.
  int64_t time_to_beat = std::numeric_limits<int64_t>::max();
};

class KvSplitter {
 public:
  // Throws std::invalid_argument if num_workers is not 1 to kMaxWorkers, or min_piece_tokens is not a positive
  // multiple of kCutGranularity.
  KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles);

  // A little work becomes one ticket per worker: a contiguous cost-balanced split (Stream-K) with at most
  // num_workers - 1 cuts. Of a few such splits, the one is taken that is expected to end first, its merge included.
  // The budget of a ticket is the smallest, up to a few tokens, with which the packs fit; found by bisection, each
  // step linear in the tiles. Tiles that read the same KV are cut at the same places, if that costs little: they then
  // read it at the same time, and device memory once.
  //
  // More work becomes tickets that shrink with what is left (guided self-scheduling): the first are large, and the
  // last are small enough to even out what costs cannot foresee. Tickets of shared packs, whose KV mostly comes out
  // of the L2, are drawn among those of private ones, which wait for device memory: each uses what the other leaves.
  // KV that several tiles read, and that is too long for the L2, is dealt out chunk by chunk, each chunk to all of
  // these tiles: they read it together, and device memory once.
  //
  // A cut lies between two segments where that leaves a ticket nearly as full, else within one. Requests that both
  // sides are for get a partial from each. Between two requests there is another way: the second side reads what they
  // share again, if that costs less.
  void split(const Packing& packing, const SplitTask& task, Split& out);

  // No split of work items that read so many tokens takes less. To be compared with Split::time.
  int64_t least_time(const SplitTask& task, int64_t num_tokens) const {
    return time_of_chains(task, num_tokens / config_.num_workers, num_tokens);
  }

  // Cost of the slowest worker over the mean of all, if each draws its next ticket when it is done. 1 without
  // work.
  double tail(const Split& split) const;

  // How many requests all cuts of a split concern at most, counted once per cut: each adds a partial. It bounds the
  // cuts too. Where requests are in less packs than Packing::spare_requests allows for, their cuts may be more.
  static int64_t max_cut_requests(int32_t num_workers, const TileSelection& tiles) {
    return int64_t{num_workers} * tiles.requests_per_tile();
  }
  // How many segments a cut adds at most.
  static constexpr int32_t kMaxSegmentsPerCut = 8;

 private:
  struct Tile {
    int32_t request_begin;  // into Packing::requests
    int32_t num_requests;
    int32_t segment_begin;  // into Packing::segments
    int32_t segment_end;
    int32_t tile;
    bool is_shared;
    bool is_read_again;  // its first segment is a range that other tiles read as well
    bool is_chunked;     // such a range, and nothing else
    bool is_rest;        // what such a range leaves of a tile
    int64_t num_tokens;
    int64_t load;   // of a CTA, in tokens: whole stages, and what segments cost
    int64_t whole;  // cost uncut
  };
  struct ItemCost {
    int64_t fixed;
    int64_t token;
  };
  // How far the pieces of a tile have been dealt out.
  struct Position {
    int32_t segment;  // into Packing::segments
    int32_t offset;   // tokens of it that are dealt out
    int32_t first;    // requests before this one are done
    // Segments from here on that the next piece reads again, as far as they concern the requests from `first` on.
    int32_t base;
    int32_t base_offset;
    int64_t dealt;  // load, what is read again not counted
    int64_t again;  // load that the next piece reads again
  };
  struct Cut {
    Position next;
    int64_t cost;           // of the piece before the cut
    int32_t last;           // requests before this one belong to the piece
    int32_t both_requests;  // requests that the cut concerns
    bool is_end;            // there is nothing behind it
  };
  struct Part {  // of a tile
    Position begin;
    Cut cut;
  };
  struct Taken {
    int32_t tile;  // into list_
    int32_t ticket;
    int32_t part;  // into Choice::parts; -1: the whole tile
  };
  // Which parts of the tiles belong to which ticket: a split that has not been written down.
  struct Choice {
    std::vector<Taken> taken;
    std::vector<Part> parts;
    int32_t num_tickets = 0;

    void clear() {
      taken.clear();
      parts.clear();
    }
    void take(size_t tile, int32_t ticket) {
      taken.push_back({static_cast<int32_t>(tile), ticket, -1});
    }
    void take(size_t tile, int32_t ticket, const Part& part) {
      taken.push_back({static_cast<int32_t>(tile), ticket, static_cast<int32_t>(parts.size())});
      parts.push_back(part);
    }
  };
  struct Dealt {
    int64_t load;  // so far; what is read again not counted
    int64_t
        uncut;  // cost of a piece that exceeds the budget, and that no cut can shorten; 0 without
    int64_t largest;  // cost of the largest ticket
    bool fits;        // all tiles are dealt out
  };
  // Part of the list of tiles, and how far its pieces have been dealt out.
  struct Stream {
    size_t tile;
    size_t end;
    Part part;  // the next one; the cut is not found yet
    // The tiles that read the present chunk, which is a part of their first segment. None: chunk_end is 0.
    size_t readers_begin;
    size_t readers_end;
    int32_t chunk_begin;
    int32_t chunk_end;
    int64_t total;  // cost
    int64_t done;
    int64_t cuts;
    int64_t cut_requests;  // requests that the cuts concern, once per cut

    bool is_empty() const { return tile == end; }
    double progress() const { return static_cast<double>(done) / static_cast<double>(total); }
  };

  // parted: as part_long_ranges() leaves them.
  void list_tiles(const Packing& packing, bool parted);
  // Makes a tile of its own of each long range that other tiles read as well.
  void part_long_ranges(const Packing& packing);
  bool is_same_range(const Packing& packing, const Tile& a, const Tile& b) const;
  // Marks tiles that begin with a range of so many tokens which other tiles read as well.
  void mark_common_ranges(const Packing& packing, int32_t least_tokens);
  // What a CTA takes of so many tokens of a segment, in tokens.
  int64_t load_of(int64_t num_tokens) const;
  int64_t price_of_segment() const;
  int64_t total_cost(size_t begin, size_t end) const;
  int64_t cost(int32_t num_requests, int64_t load) const {
    const ItemCost& item = item_costs_[num_requests];
    return item.fixed + std::max<int64_t>(load * item.token, cost_.split.shortest);
  }

  Position begin_of(const Tile& tile) const;
  // Cuts are written in place: they are made a few hundred times for a plan.
  void take_rest(const Tile& tile, const Position& at, Cut& cut) const;
  // The best cut with which the piece from `at` on costs `room` at most, of a ticket that may cost `budget`. False if
  // there is none. If the piece is the ticket's first, the cut may then be behind that, and there is always one.
  bool find_cut(const Packing& packing, const Tile& tile, const Position& at, int64_t room,
                int64_t budget, Cut& cut) const;
  // most_again: so many tokens the piece behind the cut may read again, rather than that the cut makes partials.
  void cut_at(const Packing& packing, const Tile& tile, const Position& at, int32_t segment,
              int32_t offset, int64_t taken, int64_t most_again, Cut& cut) const;
  void add_piece(const Packing& packing, const Tile& tile, const Position& at, const Cut& cut,
                 Split& out);

  void add_whole(const Packing& packing, const Tile& tile, Split& out);
  void add_pieces(const Packing& packing, const Choice& choice, Split& out);

  // Fills choice_.
  void choose_evenly(const Packing& packing, int64_t total);
  // Deals the tiles out to tickets that cost `budget` at most, as far as there are workers and no piece is too long.
  // aligned: a tile with a long range that others read as well begins a ticket, unless it fits into one as a whole.
  Dealt deal(const Packing& packing, int64_t budget, bool aligned, Choice& choice) const;

  // Of a CTA, in tokens.
  int64_t chain(int64_t load, int64_t num_segments, int64_t num_requests) const;
  // What a split takes without its merge; total: of all chains. In hundredths of tokens, as all times are.
  int64_t time_of_chains(const SplitTask& task, int64_t slowest, int64_t total) const;
  // Of this many partials, of which no row has many.
  int64_t time_of_merge(int64_t partials) const;
  // The chain of the request that has the longest one: no split that merges nothing has a shorter one.
  int64_t longest_request(const Packing& packing);
  // Whether each split of the tiles takes as long as the task's time to beat, or longer.
  bool takes_too_long(const Packing& packing, const SplitTask& task);
  struct Expected {
    int64_t time;
    int64_t slowest;  // chain
    int64_t total;
    bool has_partials;
  };
  Expected expect(const SplitTask& task, const Split& split);
  // Of some splits, the one that is expected to end first. They differ in how short pieces may be, and in whether cuts
  // between requests read again whatever that costs, so that nothing is merged.
  void split_evenly(const Packing& packing, const SplitTask& task, int64_t total, Split& out);
  // Larger ones first: CTAs begin one after the other.
  void order_tickets(Split& split);

  // Each tile is a ticket. False, with no particular choice, if workers would end too far apart.
  bool choose_whole_tiles();
  // The private packs are in alone_. False, with no particular choice, if workers would end too far apart, or that
  // takes more cuts than an even split might: a few tiles of many requests with very long KV. So the partials of a
  // batch have a bound.
  bool choose_guided(const Packing& packing, int64_t total);
  // Returns the ticket's cost.
  int64_t take_ticket(const Packing& packing, Stream& stream, int64_t budget, int32_t ticket,
                      Choice& choice);
  // Of a tile whose KV is dealt out in chunks. Returns the ticket's cost.
  int64_t take_chunk(const Packing& packing, Stream& stream, int64_t budget, int64_t cuts_left,
                     int32_t ticket, Choice& choice);
  // What a cut of a tile should leave on both sides at least, in tokens.
  int64_t shortest_piece(int32_t num_requests) const;
  double tail_of(std::span<const int64_t> ticket_costs) const;

  SplitConfig config_;
  CostModel cost_;
  TileSelection tiles_;
  bool is_little_ = false;            // there are few pieces of the usual length for each worker
  bool counts_stages_ = true;         // in loads
  std::vector<ItemCost> item_costs_;  // by the number of requests
  std::vector<Tile> list_;            // of the shared packs, then of the private ones
  size_t num_shared_tiles_ = 0;
  // Tiles that part_long_ranges() has divided, and their requests.
  int64_t parted_tiles_ = 0;
  int64_t parted_requests_ = 0;
  int64_t least_piece_ = 0;  // no cut makes a shorter one
  bool may_merge_ = true;    // false: cuts between requests read again whatever that costs
  Choice choice_;
  Choice alone_;  // guided: of the private packs
  Choice trial_;
  Split trial_split_;
  std::vector<int32_t> num_partials_;  // per request
  std::vector<int64_t> chains_;
  std::vector<int32_t> order_;  // of tickets
  std::vector<Ticket> ordered_;
  std::vector<int64_t> ticket_costs_;
  std::vector<int32_t> place_;  // per request of a tile: its place in the piece
};

}  // namespace pat
