#include "kv_split.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "check.h"

namespace pat {

namespace {

// Fitted to the trees of benchmarks/workloads.py on an H100; costs in tokens.

// Up to this much work for each worker, tickets beyond the first cost more than they even out.
constexpr int64_t kOneTicketEach = 1300;
// A guided ticket is this part of a worker's share of what is left.
constexpr int64_t kTicketsPerShare = 2;
constexpr int64_t kSmallestTicket = 384;
// A guided ticket may exceed its budget by half before a tile is cut; and a piece is worth this many times the
// partials that cutting it off costs.
constexpr int64_t kPiecePerCut = 16;
// How much faster than private tickets the shared ones are drawn. The last tickets should be private: those are cheap
// to cut.
constexpr double kSharedLead = 2;

}  // namespace

KvSplitter::KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles)
    : config_(config), cost_(cost), tiles_(tiles) {
  PAT_CHECK(config.num_workers >= 1 && config.num_workers <= kMaxWorkers,
            "num_workers must be 1 to ", kMaxWorkers, ", got ", config.num_workers);
  PAT_CHECK(
      config.min_piece_tokens >= kCutGranularity && config.min_piece_tokens % kCutGranularity == 0,
      "min_piece_tokens must be a positive multiple of ", kCutGranularity, ", got ",
      config.min_piece_tokens);
}

void KvSplitter::list_tiles(const Packing& packing) {
  list_.clear();
  num_shared_tiles_ = 0;
  for (size_t p = 0; p < packing.packs.size(); ++p) {
    const Pack& pack = packing.packs[p];
    for (int32_t done = 0; done < pack.num_requests; done += tiles_.requests_per_tile()) {
      const int32_t num_requests = std::min(tiles_.requests_per_tile(), pack.num_requests - done);
      const int32_t tile = tiles_.select(num_requests);
      list_.push_back({.pack = static_cast<int32_t>(p),
                       .tile = tile,
                       .request_begin = pack.request_begin + done,
                       .num_requests = num_requests,
                       .num_rows = num_requests * tiles_.group_size(),
                       .num_tokens = pack.kv_end - pack.kv_begin,
                       .rate = cost_.rate(kTileTable[tile].block_q),
                       .fixed = cost_.fixed(num_requests * tiles_.group_size()),
                       .whole = 0});
      list_.back().whole = cost(list_.back(), list_.back().num_tokens);
      if (!pack.is_private) num_shared_tiles_ = list_.size();
    }
  }
}

int64_t KvSplitter::cost(const Tile& tile, int32_t num_tokens) const {
  return tile.fixed + std::max(num_tokens, cost_.shortest) * tile.rate;
}

int32_t KvSplitter::tokens_that_fit(const Tile& tile, int32_t left, int64_t room) const {
  if (cost(tile, left) <= room) return left;
  const int64_t for_tokens = std::max<int64_t>(room - tile.fixed, 0);
  const int64_t fit = std::min<int64_t>(for_tokens / tile.rate, left - config_.min_piece_tokens);
  const int32_t cut = static_cast<int32_t>(fit / kCutGranularity) * kCutGranularity;
  return cut >= config_.min_piece_tokens ? cut : 0;
}

int64_t KvSplitter::total_cost(size_t begin, size_t end) const {
  int64_t total = 0;
  for (size_t i = begin; i < end; ++i) total += list_[i].whole;
  return total;
}

Piece KvSplitter::piece_of(const Packing& packing, const Tile& tile, int32_t offset,
                           int32_t tokens) const {
  const int32_t kv_begin = packing.packs[tile.pack].kv_begin + offset;
  return {.pack = tile.pack,
          .tile = tile.tile,
          .request_begin = tile.request_begin,
          .num_requests = tile.num_requests,
          .kv_begin = kv_begin,
          .kv_end = kv_begin + tokens};
}

template <typename PieceFn>
int32_t KvSplitter::deal(int64_t budget, PieceFn&& piece) const {
  int32_t ticket = 0;
  int64_t room = budget;
  for (const Tile& tile : list_) {
    if (tile.whole <= room) {  // most tiles: this loop runs once per step of the bisection
      piece(tile, 0, tile.num_tokens, ticket);
      room -= tile.whole;
      continue;
    }
    for (int32_t offset = 0; offset < tile.num_tokens;) {
      const int32_t tokens = tokens_that_fit(tile, tile.num_tokens - offset, room);
      if (tokens == 0) {  // an empty ticket always takes something: see smallest_budget()
        ++ticket;
        room = budget;
        continue;
      }
      piece(tile, offset, tokens, ticket);
      offset += tokens;
      room -= cost(tile, tokens);
    }
  }
  return ticket + 1;
}

int64_t KvSplitter::smallest_budget(int64_t total) const {
  // A ticket must be able to take the longest piece that no cut can shorten.
  int64_t uncuttable = 0;
  for (const Tile& tile : list_) {
    const int64_t shortest_cuttable = 2 * int64_t{config_.min_piece_tokens};
    const auto tokens = static_cast<int32_t>(std::min<int64_t>(tile.num_tokens, shortest_cuttable));
    uncuttable = std::max(uncuttable, cost(tile, tokens));
  }
  const auto fits = [this](int64_t budget) {
    return deal(budget, [](const Tile&, int32_t, int32_t, int32_t) {}) <= config_.num_workers;
  };
  int64_t low = std::max((total + config_.num_workers - 1) / config_.num_workers, uncuttable);
  if (fits(low)) return low;
  int64_t high = low;
  do {
    low = high;
    high = low + std::max<int64_t>(low / 8, CostModel::kRateUnit * int64_t{kCutGranularity});
  } while (!fits(high));
  while (high - low > CostModel::kRateUnit * int64_t{kCutGranularity} / 4 &&
         high - low > low / 256) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return high;
}

void KvSplitter::split_evenly(const Packing& packing, int64_t total, Split& out) {
  deal(smallest_budget(total),
       [&](const Tile& tile, int32_t offset, int32_t tokens, int32_t ticket) {
         const int32_t index = static_cast<int32_t>(out.pieces.size());
         if (static_cast<size_t>(ticket) == out.tickets.size()) {
           out.tickets.push_back({index, index});
         }
         out.tickets.back().piece_end = index + 1;
         out.pieces.push_back(piece_of(packing, tile, offset, tokens));
       });
}

int32_t KvSplitter::first_piece(const Tile& tile, int32_t left, int64_t budget) const {
  if (cost(tile, left) <= budget + budget / 2) return left;
  const int64_t worth_a_cut = kPiecePerCut * cost_.partial_row * tile.num_rows;
  const int64_t shortest = std::max<int64_t>(config_.min_piece_tokens, worth_a_cut);
  const int64_t tokens = std::max((budget - tile.fixed) / tile.rate, shortest);
  const int64_t cut = tokens / kCutGranularity * kCutGranularity;
  return left - cut < config_.min_piece_tokens ? left : static_cast<int32_t>(cut);
}

Ticket KvSplitter::take_ticket(const Packing& packing, Stream& stream, int64_t budget) const {
  const int32_t begin = static_cast<int32_t>(stream.pieces.size());
  for (int64_t room = budget; !stream.is_empty();) {
    const Tile& tile = list_[stream.tile];
    int32_t tokens = tile.num_tokens - stream.offset;
    if (cost(tile, tokens) > room) {
      if (room < budget) break;  // not the first piece: the next ticket has more room
      tokens = first_piece(tile, tokens, budget);
    }
    stream.pieces.push_back(piece_of(packing, tile, stream.offset, tokens));
    room -= cost(tile, tokens);
    stream.done += cost(tile, tokens);
    stream.offset += tokens;
    if (stream.offset < tile.num_tokens) {
      stream.cut_requests += tile.num_requests;
    } else {
      ++stream.tile;
      stream.offset = 0;
    }
  }
  return {begin, static_cast<int32_t>(stream.pieces.size())};
}

bool KvSplitter::split_guided(const Packing& packing, int64_t total, Split& out) {
  private_pieces_.clear();
  private_tickets_.clear();
  const int64_t shared_cost = total_cost(0, num_shared_tiles_);
  Stream shared{.tile = 0,
                .end = num_shared_tiles_,
                .offset = 0,
                .total = shared_cost,
                .done = 0,
                .cut_requests = 0,
                .pieces = out.pieces};
  Stream alone{.tile = num_shared_tiles_,
               .end = list_.size(),
               .offset = 0,
               .total = total - shared_cost,
               .done = 0,
               .cut_requests = 0,
               .pieces = private_pieces_};
  const int64_t most_cut_requests = max_cut_requests(config_.num_workers, tiles_);
  while (!shared.is_empty() || !alone.is_empty()) {
    const int64_t left = total - shared.done - alone.done;
    const int64_t budget = std::max(left / (kTicketsPerShare * config_.num_workers),
                                    CostModel::kRateUnit * kSmallestTicket);
    const bool is_shared =
        alone.is_empty() ||
        (!shared.is_empty() && shared.progress() <= kSharedLead * alone.progress());
    if (!is_shared) private_tickets_.push_back(static_cast<int32_t>(out.tickets.size()));
    out.tickets.push_back(take_ticket(packing, is_shared ? shared : alone, budget));
    if (shared.cut_requests + alone.cut_requests > most_cut_requests) return false;
  }
  const int32_t num_shared_pieces = static_cast<int32_t>(out.pieces.size());
  for (const int32_t ticket : private_tickets_) {
    out.tickets[ticket].piece_begin += num_shared_pieces;
    out.tickets[ticket].piece_end += num_shared_pieces;
  }
  out.pieces.insert(out.pieces.end(), private_pieces_.begin(), private_pieces_.end());
  return true;
}

void KvSplitter::split(const Packing& packing, Split& out) {
  list_tiles(packing);
  out.pieces.clear();
  out.tickets.clear();
  const int64_t total = total_cost(0, list_.size());
  if (total == 0) return;
  const bool is_little = total <= CostModel::kRateUnit * kOneTicketEach * config_.num_workers;
  if (is_little || !split_guided(packing, total, out)) {
    out.pieces.clear();
    out.tickets.clear();
    split_evenly(packing, total, out);
  }
}

double KvSplitter::tail(const Split& split) const {
  // Ascending: the next ticket goes to the worker that is done first.
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> loads(
      {}, std::vector<int64_t>(config_.num_workers, 0));
  int64_t total = 0;
  int64_t slowest = 0;
  for (const Ticket& ticket : split.tickets) {
    int64_t load = loads.top();
    loads.pop();
    for (int32_t p = ticket.piece_begin; p < ticket.piece_end; ++p) {
      const Piece& piece = split.pieces[p];
      const int64_t tokens = std::max(piece.kv_end - piece.kv_begin, cost_.shortest);
      const int64_t cost = cost_.fixed(piece.num_requests * tiles_.group_size()) +
                           tokens * cost_.rate(kTileTable[piece.tile].block_q);
      load += cost;
      total += cost;
    }
    slowest = std::max(slowest, load);
    loads.push(load);
  }
  return total == 0 ? 1.0 : static_cast<double>(slowest) * config_.num_workers / total;
}

}  // namespace pat
