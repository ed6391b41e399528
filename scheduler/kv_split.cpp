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
// Guided tickets even out what costs do not foresee: CTAs with equal work end up to 12% apart. If they are further apart
// by their costs, each worker had better get an even share.
constexpr double kWorstGuidedTail = 1.12;
// A cut may leave this part of a ticket empty to lie between two segments.
constexpr int64_t kEmptyPart = 8;
// KV that several tiles read is dealt out in chunks from this length on, in tokens: what eight KV heads have of it is
// then more than stays in the L2 while others are read.
constexpr int64_t kLongRange = 6144;
// A chunk is no longer than this: tiles that begin it apart still meet in the L2.
constexpr int64_t kLongestChunk = 4096;

}  // namespace

void Split::clear() {
  pieces.clear();
  requests.clear();
  segments.clear();
  tickets.clear();
}

KvSplitter::KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles)
    : config_(config), cost_(cost), tiles_(tiles) {
  PAT_CHECK(config.num_workers >= 1 && config.num_workers <= kMaxWorkers,
            "num_workers must be 1 to ", kMaxWorkers, ", got ", config.num_workers);
  PAT_CHECK(
      config.min_piece_tokens >= kCutGranularity && config.min_piece_tokens % kCutGranularity == 0,
      "min_piece_tokens must be a positive multiple of ", kCutGranularity, ", got ",
      config.min_piece_tokens);
  item_costs_.push_back({.fixed = 0, .token = 0});
  for (int32_t requests = 1; requests <= tiles.requests_per_tile(); ++requests) {
    const int64_t rows = int64_t{requests} * tiles.group_size();
    item_costs_.push_back({.fixed = cost.split.item + cost.split.query_row * rows,
                           .token = cost.split.token[tiles.select(requests)]});
  }
}

// --- tiles ---

void KvSplitter::list_tiles(const Packing& packing, bool parted) {
  list_.clear();
  num_shared_tiles_ = 0;
  for (const Pack& pack : packing.packs) {
    int64_t num_tokens = 0;
    for (const Segment& segment : packing.segments_of(pack)) num_tokens += segment.num_tokens();
    const bool is_shared = !packing.segments[pack.segment_begin].is_private();
    for (int32_t done = 0; done < pack.num_requests; done += tiles_.requests_per_tile()) {
      const int32_t num_requests = std::min(tiles_.requests_per_tile(), pack.num_requests - done);
      list_.push_back({.request_begin = pack.request_begin + done,
                       .num_requests = num_requests,
                       .segment_begin = pack.segment_begin,
                       .segment_end = pack.segment_begin + pack.num_segments,
                       .tile = tiles_.select(num_requests),
                       .is_shared = is_shared,
                       .is_chunked = false,
                       .num_tokens = num_tokens,
                       .whole = cost(num_requests, num_tokens)});
    }
  }
  if (parted) part_long_ranges(packing);
  // Stable: a request's packs stay in their order.
  const auto is_shared = [](const Tile& tile) { return tile.is_shared; };
  const auto privates = std::is_partitioned(list_.begin(), list_.end(), is_shared)
                            ? std::partition_point(list_.begin(), list_.end(), is_shared)
                            : std::stable_partition(list_.begin(), list_.end(), is_shared);
  num_shared_tiles_ = static_cast<size_t>(privates - list_.begin());
}

// --- long ranges that several tiles read ---

bool KvSplitter::is_same_range(const Packing& packing, const Tile& a, const Tile& b) const {
  const Segment& x = packing.segments[a.segment_begin];
  const Segment& y = packing.segments[b.segment_begin];
  return !x.is_private() && x.span == y.span && x.kv_begin == y.kv_begin && x.kv_end == y.kv_end;
}

void KvSplitter::part_long_ranges(const Packing& packing) {
  const auto is_long = [&](const Tile& tile) {
    const Segment& range = packing.segments[tile.segment_begin];
    return range.num_tokens() >= kLongRange && range.first == 0 && range.end >= tile.num_requests;
  };
  const size_t num_tiles = list_.size();
  parted_tiles_ = parted_requests_ = 0;
  for (size_t i = 0; i < num_tiles; ++i) {
    const bool is_read_again =
        (i > 0 && is_same_range(packing, list_[i - 1], list_[i])) ||
        (i + 1 < num_tiles && is_same_range(packing, list_[i], list_[i + 1]));
    if (!is_read_again || !is_long(list_[i])) continue;
    list_[i].is_chunked = true;
    if (list_[i].segment_end == list_[i].segment_begin + 1) continue;
    Tile rest = list_[i];
    Tile& range = list_[i];
    range.segment_end = range.segment_begin + 1;
    range.num_tokens = packing.segments[range.segment_begin].num_tokens();
    range.whole = cost(range.num_requests, range.num_tokens);
    ++rest.segment_begin;
    rest.num_tokens -= range.num_tokens;
    rest.whole = cost(rest.num_requests, rest.num_tokens);
    rest.is_shared = rest.is_chunked = false;
    ++parted_tiles_;
    parted_requests_ += rest.num_requests;
    list_.push_back(rest);
  }
}

int64_t KvSplitter::total_cost(size_t begin, size_t end) const {
  int64_t total = 0;
  for (size_t i = begin; i < end; ++i) total += list_[i].whole;
  return total;
}

// --- cuts ---

KvSplitter::Position KvSplitter::begin_of(const Tile& tile) const {
  return {.segment = tile.segment_begin,
          .offset = 0,
          .first = 0,
          .base = tile.segment_begin,
          .base_offset = 0,
          .dealt = 0,
          .again = 0};
}

KvSplitter::Cut KvSplitter::rest(const Tile& tile, const Position& at) const {
  Position end = at;
  end.segment = tile.segment_end;
  end.offset = 0;
  end.dealt = tile.num_tokens;
  return {.next = end,
          .cost = cost(tile.num_requests - at.first, tile.num_tokens - at.dealt + at.again),
          .last = tile.num_requests,
          .both_requests = 0,
          .is_end = true};
}

KvSplitter::Cut KvSplitter::cut_at(const Packing& packing, const Tile& tile, const Position& at,
                                   int32_t segment, int32_t offset, int64_t taken) const {
  const std::vector<Segment>& segments = packing.segments;
  const int32_t first = std::max(segments[segment].first, at.first);
  const int32_t both_requests = tile.num_requests - first;
  Cut cut{.next = {.segment = segment,
                   .offset = offset,
                   .first = first,
                   .base = segment,
                   .base_offset = offset,
                   .dealt = at.dealt + taken - at.again,
                   .again = 0},
          .cost = 0,
          .last = tile.num_requests,
          .both_requests = both_requests,
          .is_end = false};
  if (offset == 0 && segments[segment - 1].first < first && first > at.first) {
    // Between two requests: the next piece may read what they share again.
    int64_t again = 0;
    int32_t num_segments = 0;
    for (int32_t s = at.base; s < segment && num_segments <= kMaxSegmentsPerCut; ++s) {
      if (segments[s].end <= first) continue;
      again += segments[s].num_tokens() - (s == at.base ? at.base_offset : 0);
      ++num_segments;
    }
    const int64_t partials = int64_t{2} * both_requests * tiles_.group_size();
    if (num_segments <= kMaxSegmentsPerCut &&
        again * cost_.packing.reread_token <= partials * cost_.packing.partial_row) {
      cut.next.base = at.base;
      cut.next.base_offset = at.base_offset;
      cut.next.again = again;
      cut.last = first;
    }
  }
  cut.cost = cost(cut.last - at.first, taken);
  return cut;
}

bool KvSplitter::find_cut(const Packing& packing, const Tile& tile, const Position& at,
                          int64_t room, bool forced, Cut& cut) const {
  const int64_t shortest = config_.min_piece_tokens;
  const int32_t num_requests = tile.num_requests - at.first;
  const int64_t for_tokens = room - item_costs_[num_requests].fixed;
  const int64_t fit = for_tokens < 0 ? -1 : for_tokens / item_costs_[num_requests].token;
  const int64_t left = tile.num_tokens - at.dealt + at.again;
  int64_t taken = at.again;
  int32_t border = -1;  // the last segment before which a cut fits
  int64_t border_taken = 0;
  for (int32_t s = at.segment; s < tile.segment_end; ++s) {
    const int32_t begin = s == at.segment ? at.offset : 0;
    const int64_t length = packing.segments[s].num_tokens() - begin;
    if (taken - at.again >= shortest && left - taken >= shortest) {
      if (taken <= fit) {
        border = s;
        border_taken = taken;
      } else {  // only if forced: nothing that fits was found before
        cut = cut_at(packing, tile, at, s, 0, taken);
        return true;
      }
    }
    if (taken + length > fit) {
      if (border >= 0 &&
          fit - border_taken <= std::max<int64_t>(kCutGranularity, fit / kEmptyPart)) {
        cut = cut_at(packing, tile, at, border, 0, border_taken);
        return true;
      }
      const int64_t most = (length - shortest) / kCutGranularity * kCutGranularity;
      int64_t inside =
          std::min(std::max<int64_t>(fit - taken, 0) / kCutGranularity * kCutGranularity, most);
      if (inside < shortest && forced && border < 0 && most >= shortest) inside = shortest;
      if (inside >= shortest) {
        cut = cut_at(packing, tile, at, s, begin + static_cast<int32_t>(inside), taken + inside);
        return true;
      }
      if (border >= 0) {
        cut = cut_at(packing, tile, at, border, 0, border_taken);
        return true;
      }
      if (!forced) return false;
    }
    taken += length;
  }
  cut = rest(tile, at);
  return true;
}

void KvSplitter::add_piece(const Packing& packing, const Tile& tile, const Position& at,
                           const Cut& cut, Split& out) {
  const auto segment_begin = static_cast<int32_t>(out.segments.size());
  const auto request_begin = static_cast<int32_t>(out.requests.size());
  int64_t num_tokens = 0;
  const auto add = [&](int32_t s, int32_t from, int32_t to) {
    Segment segment = packing.segments[s];
    segment.is_open &= to == segment.num_tokens();
    segment.kv_end = segment.kv_begin + to;
    segment.kv_begin += from;
    segment.first = std::max(segment.first, at.first);
    segment.end = std::min(segment.end, cut.last);
    num_tokens += to - from;
    out.segments.push_back(segment);
  };
  for (int32_t s = at.base; s < at.segment; ++s) {
    if (packing.segments[s].end <= at.first) continue;
    add(s, s == at.base ? at.base_offset : 0, packing.segments[s].num_tokens());
  }
  for (int32_t s = at.segment; s < cut.next.segment; ++s) {
    add(s, s == at.segment ? at.offset : 0, packing.segments[s].num_tokens());
  }
  if (cut.next.offset > 0) {
    const int32_t s = cut.next.segment;
    add(s, s == at.segment ? at.offset : 0, cut.next.offset);
  }

  // Requests that no segment is for are left out.
  const int32_t num_places = cut.last - at.first;
  place_.assign(num_places + 1, 0);
  for (size_t s = segment_begin; s < out.segments.size(); ++s) {
    const Segment& segment = out.segments[s];
    ++place_[segment.first - at.first];
    --place_[segment.end - at.first];
  }
  int32_t num_requests = 0;
  int32_t depth = 0;
  for (int32_t i = 0; i <= num_places; ++i) {
    depth += place_[i];
    place_[i] = num_requests;
    if (depth == 0) continue;
    out.requests.push_back(packing.requests[tile.request_begin + at.first + i]);
    ++num_requests;
  }
  for (size_t s = segment_begin; s < out.segments.size(); ++s) {
    Segment& segment = out.segments[s];
    segment.first = place_[segment.first - at.first];
    segment.end = place_[segment.end - at.first];
  }
  out.pieces.push_back({.tile = tiles_.select(num_requests),
                        .request_begin = request_begin,
                        .num_requests = num_requests,
                        .segment_begin = segment_begin,
                        .num_segments = static_cast<int32_t>(out.segments.size()) - segment_begin,
                        .num_tokens = num_tokens,
                        .cost = cost(num_requests, num_tokens)});
}

// --- little work ---

template <typename PieceFn>
KvSplitter::Dealt KvSplitter::deal(const Packing& packing, int64_t budget, PieceFn&& piece) const {
  Dealt dealt{.tokens = 0, .uncut = 0, .fits = false};
  int32_t ticket = 0;
  int64_t room = budget;
  for (const Tile& tile : list_) {
    if (tile.whole <= room) {  // most tiles: this loop runs once per step of the bisection
      piece(tile, ticket);
      room -= tile.whole;
      dealt.tokens += tile.num_tokens;
      continue;
    }
    for (Position at = begin_of(tile);;) {
      Cut cut = rest(tile, at);
      const bool fits = cut.cost <= room || find_cut(packing, tile, at, room, room == budget, cut);
      if (fits) {
        piece(tile, at, cut, ticket);
        room -= cut.cost;
        if (room < 0) {
          dealt.uncut = cut.cost;
          return dealt;
        }
        dealt.tokens += cut.next.dealt - at.dealt;
        if (cut.is_end) break;
        at = cut.next;  // and on with the next ticket: one cut for each at most
      }
      if (++ticket == config_.num_workers) return dealt;
      room = budget;
    }
  }
  dealt.fits = true;
  return dealt;
}

int64_t KvSplitter::smallest_budget(const Packing& packing, int64_t total) const {
  struct Count {
    void operator()(const Tile&, int32_t) const {}
    void operator()(const Tile&, const Position&, const Cut&, int32_t) const {}
  };
  int64_t num_tokens = 0;
  for (const Tile& tile : list_) num_tokens += tile.num_tokens;
  const auto deal_out = [&](int64_t budget) { return deal(packing, budget, Count{}); };
  int64_t low = (total + config_.num_workers - 1) / config_.num_workers;
  Dealt dealt = deal_out(low);
  if (dealt.fits) return low;
  constexpr int64_t kStep = kCostUnit * int64_t{kCutGranularity} / 4;
  int64_t high = low;
  do {
    low = high;
    // What no cut can shorten; or with so much more, what was not dealt out would have been, too.
    const double missing = static_cast<double>(num_tokens) / static_cast<double>(dealt.tokens);
    const int64_t needed =
        dealt.uncut > 0 ? dealt.uncut : static_cast<int64_t>(static_cast<double>(low) * missing);
    high = std::max(low + std::max(kStep, low / 64), needed);
    dealt = deal_out(high);
  } while (!dealt.fits);
  while (high - low > kStep && high - low > low / 64) {
    const int64_t middle = low + (high - low) / 2;
    (deal_out(middle).fits ? high : low) = middle;
  }
  return high;
}

void KvSplitter::split_evenly(const Packing& packing, int64_t total, Split& out) {
  struct Add {
    void operator()(const Tile& tile, const Position& at, const Cut& cut, int32_t ticket) {
      const auto index = static_cast<int32_t>(out.pieces.size());
      if (static_cast<size_t>(ticket) == out.tickets.size()) out.tickets.push_back({index, index});
      out.tickets.back().piece_end = index + 1;
      self.add_piece(packing, tile, at, cut, out);
    }
    void operator()(const Tile& tile, int32_t ticket) {
      const Position begin = self.begin_of(tile);
      (*this)(tile, begin, self.rest(tile, begin), ticket);
    }
    KvSplitter& self;
    const Packing& packing;
    Split& out;
  };
  deal(packing, smallest_budget(packing, total), Add{*this, packing, out});
}

// --- much work ---

int64_t KvSplitter::shortest_piece(int32_t num_requests) const {
  const int64_t rows = int64_t{num_requests} * tiles_.group_size();
  const int64_t partials = rows * cost_.packing.partial_row / kCostUnit;
  return std::max<int64_t>(config_.min_piece_tokens, kPiecePerCut * partials);
}

Ticket KvSplitter::take_chunk(const Packing& packing, Stream& stream, int64_t budget,
                              int64_t cuts_left, Split& out) {
  const Tile& tile = list_[stream.tile];
  const auto length = static_cast<int32_t>(tile.num_tokens);
  if (stream.chunk_end == 0) {
    stream.readers_begin = stream.readers_end = stream.tile;
    while (stream.readers_end < stream.end &&
           is_same_range(packing, tile, list_[stream.readers_end])) {
      ++stream.readers_end;
    }
  }
  if (stream.tile == stream.readers_begin) {
    stream.chunk_begin = stream.chunk_end;
    const int64_t left = length - stream.chunk_begin;
    const auto readers = static_cast<int64_t>(stream.readers_end - stream.readers_begin);
    const ItemCost& item = item_costs_[tile.num_requests];
    int64_t chunk = std::min((budget - item.fixed) / item.token, kLongestChunk);
    chunk = std::max({chunk, shortest_piece(tile.num_requests), left / (cuts_left / readers + 1)});
    const int64_t chunks = std::max<int64_t>(left / chunk, 1);  // equal ones, if none shrinks
    chunk = chunks == 1 ? left : left / chunks / kCutGranularity * kCutGranularity;
    stream.chunk_end = stream.chunk_begin + static_cast<int32_t>(chunk);
  }
  Position at = begin_of(tile);
  at.offset = at.base_offset = stream.chunk_begin;
  at.dealt = stream.chunk_begin;
  const bool is_end = stream.chunk_end == length;
  const Cut cut = is_end ? rest(tile, at)
                         : cut_at(packing, tile, at, tile.segment_begin, stream.chunk_end,
                                  stream.chunk_end - stream.chunk_begin);
  const auto begin = static_cast<int32_t>(out.pieces.size());
  add_piece(packing, tile, at, cut, out);
  stream.done += cut.cost;
  stream.cuts += !is_end;
  stream.cut_requests += cut.both_requests;
  if (++stream.tile == stream.readers_end) {
    if (is_end) {
      stream.chunk_end = 0;
      if (!stream.is_empty()) stream.position = begin_of(list_[stream.tile]);
    } else {
      stream.tile = stream.readers_begin;
    }
  }
  return {begin, begin + 1};
}

Ticket KvSplitter::take_ticket(const Packing& packing, Stream& stream, int64_t budget, Split& out) {
  const auto begin = static_cast<int32_t>(out.pieces.size());
  for (int64_t room = budget; !stream.is_empty();) {
    const Tile& tile = list_[stream.tile];
    if (tile.is_chunked) break;  // not the first piece
    const Position& at = stream.position;
    Cut cut = rest(tile, at);
    if (cut.cost > room) {
      if (room < budget) break;  // not the first piece: the next ticket has more room
      if (cut.cost > budget + budget / 2) {
        const int32_t num_requests = tile.num_requests - at.first;
        const int64_t shortest = shortest_piece(num_requests);
        find_cut(packing, tile, at, std::max(budget, cost(num_requests, shortest)), true, cut);
      }
    }
    add_piece(packing, tile, at, cut, out);
    room -= cut.cost;
    stream.done += cut.cost;
    stream.cuts += !cut.is_end;
    stream.cut_requests += cut.both_requests;
    if (cut.is_end) {
      if (++stream.tile < stream.end) stream.position = begin_of(list_[stream.tile]);
    } else {
      stream.position = cut.next;
      break;
    }
  }
  return {begin, static_cast<int32_t>(out.pieces.size())};
}

bool KvSplitter::split_guided(const Packing& packing, int64_t total, Split& out) {
  private_.clear();
  private_tickets_.clear();
  const auto stream_of = [&](size_t begin, size_t end) {
    return Stream{.tile = begin,
                  .end = end,
                  .position = begin < end ? begin_of(list_[begin]) : Position{},
                  .readers_begin = 0,
                  .readers_end = 0,
                  .chunk_begin = 0,
                  .chunk_end = 0,
                  .total = total_cost(begin, end),
                  .done = 0,
                  .cuts = 0,
                  .cut_requests = 0};
  };
  Stream shared = stream_of(0, num_shared_tiles_);
  Stream alone = stream_of(num_shared_tiles_, list_.size());
  // What part_long_ranges() has cut off counts too.
  alone.cuts = parted_tiles_;
  alone.cut_requests = parted_requests_;
  const int64_t most_cuts = max_cut_requests(config_.num_workers, tiles_);
  const int64_t most_cut_requests = most_cuts + packing.spare_requests;
  while (!shared.is_empty() || !alone.is_empty()) {
    const int64_t left = std::max<int64_t>(total - shared.done - alone.done, 0);
    const int64_t budget =
        std::max(left / (kTicketsPerShare * config_.num_workers), kCostUnit * kSmallestTicket);
    const bool is_shared =
        alone.is_empty() ||
        (!shared.is_empty() && shared.progress() <= kSharedLead * alone.progress());
    if (!is_shared) private_tickets_.push_back(static_cast<int32_t>(out.tickets.size()));
    // A quarter is left to what comes behind the chunks.
    const int64_t cuts_left =
        std::max<int64_t>(std::min(most_cuts - shared.cuts - alone.cuts,
                                   (most_cut_requests - shared.cut_requests - alone.cut_requests) /
                                       tiles_.requests_per_tile()),
                          0) *
        3 / 4;
    out.tickets.push_back(!is_shared ? take_ticket(packing, alone, budget, private_)
                          : list_[shared.tile].is_chunked
                              ? take_chunk(packing, shared, budget, cuts_left, out)
                              : take_ticket(packing, shared, budget, out));
    if (shared.cuts + alone.cuts > most_cuts ||
        shared.cut_requests + alone.cut_requests > most_cut_requests) {
      return false;
    }
  }
  const auto num_pieces = static_cast<int32_t>(out.pieces.size());
  const auto num_requests = static_cast<int32_t>(out.requests.size());
  const auto num_segments = static_cast<int32_t>(out.segments.size());
  for (const int32_t ticket : private_tickets_) {
    out.tickets[ticket].piece_begin += num_pieces;
    out.tickets[ticket].piece_end += num_pieces;
  }
  for (Piece& piece : private_.pieces) {
    piece.request_begin += num_requests;
    piece.segment_begin += num_segments;
    out.pieces.push_back(piece);
  }
  out.requests.insert(out.requests.end(), private_.requests.begin(), private_.requests.end());
  out.segments.insert(out.segments.end(), private_.segments.begin(), private_.segments.end());
  return true;
}

void KvSplitter::split(const Packing& packing, Split& out) {
  list_tiles(packing, false);
  out.clear();
  const int64_t total = total_cost(0, list_.size());
  if (total == 0) return;
  if (total > kCostUnit * kOneTicketEach * config_.num_workers) {
    list_tiles(packing, true);
    if (split_guided(packing, total_cost(0, list_.size()), out) && tail(out) <= kWorstGuidedTail) {
      return;
    }
    out.clear();
    list_tiles(packing, false);
  }
  split_evenly(packing, total, out);
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
      load += split.pieces[p].cost;
      total += split.pieces[p].cost;
    }
    slowest = std::max(slowest, load);
    loads.push(load);
  }
  return total == 0 ? 1.0 : static_cast<double>(slowest) * config_.num_workers / total;
}

}  // namespace pat
