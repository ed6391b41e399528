#include "kv_split.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>

#include "check.h"

namespace pat {

namespace {

// Fitted to the trees of benchmarks/workloads.py on an H100; costs in tokens.

// Up to this much work for each worker, tickets beyond the first cost more than they even out.
constexpr int64_t kOneTicketEach = 1300;
// Where nothing is shared, all tickets wait for device memory alone, and end together up to more work.
constexpr int64_t kOneTicketEachUnshared = 5000;
// A guided ticket is this part of a worker's share of what is left.
constexpr int64_t kTicketsPerShare = 2;
constexpr int64_t kSmallestTicket = 384;
// A guided ticket may exceed its budget by half before a tile is cut; and a piece is worth this many times the
// partials that cutting it off costs.
constexpr int64_t kPiecePerCut = 32;
// What partials cost where a cut makes them, over what they cost in packing: nothing overlaps with their merge.
constexpr double kPriceOfMerging = 1.5;
// With whole tiles, workers may end this far apart: cuts even that out, and cost their partials.
constexpr double kWorstUncutTail = 1.05;
constexpr int64_t kMostUncutTiles = 8;  // for each worker; of more, guided tickets need no cuts
// How much faster than private tickets the shared ones are drawn. The last tickets should be private: those are cheap
// to cut.
constexpr double kSharedLead = 2;
// Guided tickets even out what costs do not foresee: CTAs with equal work end up to 12% apart. If they are further
// apart by their costs, each worker had better get an even share.
constexpr double kWorstGuidedTail = 1.12;
// Workers that have less to do than so many of the usual pieces get shorter ones, so that more of them have one, and
// end sooner: a half or a quarter of the usual.
constexpr int64_t kPiecesEach = 4;
constexpr std::array<int64_t, 2> kShorterPieces = {2, 4};
// A warp of the merge takes so many partials of a row at once; more cost more.
constexpr int64_t kPartialsAtOnce = 12;
// A cut may leave this part of a ticket empty to lie between two segments.
constexpr int64_t kEmptyPart = 8;
// Tiles that read the same KV at different places read it from device memory each: up to five times the bytes, where
// 33 workers have 8 tiles of 32,768 tokens. It may cost this part of a ticket to cut them at the same places, where so
// many tokens are read together.
constexpr int64_t kAlignedPart = 4;
constexpr int32_t kAlignedRange = 512;
// What a ticket reads again, for the sake of partials, keeps its worker busy: no more than this part of the ticket
// may be that, or so many tokens.
constexpr int64_t kAgainPart = 3;
constexpr int64_t kLittleAgain = 160;
// KV that several tiles read is dealt out in chunks from this length on, in tokens: what eight KV heads have of it is
// then more than stays in the L2 while others are read.
constexpr int32_t kLongRange = 6144;
// A CTA takes whole stages of a segment's KV, and as long as for so many more tokens to begin with it. Where there is
// much to do, and nothing is shared or a long range, that makes no difference.
constexpr int64_t kStageTokens = 32;
constexpr int64_t kSegment = 4;

// The time of an even split. Fitted to 2,664 plans of 106 batches on an H100, each of up to 62 us, in tokens of 7.2
// ns: the times of the plans of one batch differ by 2.9% from it, in the root mean square. A chain is what a CTA does
// one after the other: its stages, and so much for each segment and each query row.
constexpr int64_t kSegmentInChain = 13;
constexpr int64_t kRowInChain = 2;
// The slowest chain, where others keep the memory busy, and where it is all that is left to wait for.
constexpr int64_t kSlowestPercent = 100;
constexpr int64_t kAlonePercent = 226;
// The mean of all workers' chains, and of the KV that device memory is read for.
constexpr int64_t kMeanPercent = 97;
constexpr int64_t kUniquePercent = 433;
// Merging anything at all, each partial row of a worker, and the same of rows of many partials.
constexpr int64_t kMerging = 321;
constexpr int64_t kPartialRowPercent = 675;
constexpr int64_t kMergingMany = 137;
constexpr int64_t kRowOfMany = 51;
// Shorter pieces are tried where what CTAs could even out is this part of the time.
constexpr int64_t kUnevenPart = 12;

// A chunk is no longer than this: tiles that begin it apart still meet in the L2.
constexpr int64_t kLongestChunk = 4096;
// Tickets whose costs differ by less than this part of the largest are drawn in the order of their tiles.
constexpr int64_t kOrderPart = 8;

}  // namespace

void Split::clear() {
  pieces.clear();
  requests.clear();
  segments.clear();
  tickets.clear();
  time = 0;
}

int64_t KvSplitter::load_of(int64_t num_tokens) const {
  if (!counts_stages_ || num_tokens <= 0) return num_tokens;
  return (num_tokens + kStageTokens - 1) / kStageTokens * kStageTokens + kSegment;
}

int64_t KvSplitter::price_of_segment() const { return counts_stages_ ? kSegment : 0; }

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
  parted_tiles_ = parted_requests_ = 0;
  for (const Pack& pack : packing.packs) {
    int64_t num_tokens = 0;
    int64_t load = 0;
    for (const Segment& segment : packing.segments_of(pack)) {
      num_tokens += segment.num_tokens();
      load += load_of(segment.num_tokens());
    }
    const bool is_shared = !packing.segments[pack.segment_begin].is_private();
    for (int32_t done = 0; done < pack.num_requests; done += tiles_.requests_per_tile()) {
      const int32_t num_requests = std::min(tiles_.requests_per_tile(), pack.num_requests - done);
      list_.push_back({.request_begin = pack.request_begin + done,
                       .num_requests = num_requests,
                       .segment_begin = pack.segment_begin,
                       .segment_end = pack.segment_begin + pack.num_segments,
                       .tile = tiles_.select(num_requests),
                       .is_shared = is_shared,
                       .is_read_again = false,
                       .is_chunked = false,
                       .is_rest = false,
                       .num_tokens = num_tokens,
                       .load = load,
                       .whole = cost(num_requests, load)});
    }
  }
  mark_common_ranges(packing, parted ? kLongRange : kAlignedRange);
  if (parted) part_long_ranges(packing);
  // Stable: a request's packs stay in their order.
  const auto is_shared = [](const Tile& tile) { return tile.is_shared; };
  const auto privates = std::is_partitioned(list_.begin(), list_.end(), is_shared)
                            ? std::partition_point(list_.begin(), list_.end(), is_shared)
                            : std::stable_partition(list_.begin(), list_.end(), is_shared);
  num_shared_tiles_ = static_cast<size_t>(privates - list_.begin());
  least_piece_ = config_.min_piece_tokens;
}

// --- long ranges that several tiles read ---

bool KvSplitter::is_same_range(const Packing& packing, const Tile& a, const Tile& b) const {
  const Segment& x = packing.segments[a.segment_begin];
  const Segment& y = packing.segments[b.segment_begin];
  return !x.is_private() && x.span == y.span && x.kv_begin == y.kv_begin && x.kv_end == y.kv_end;
}

void KvSplitter::mark_common_ranges(const Packing& packing, int32_t least_tokens) {
  const auto is_long = [&](const Tile& tile) {
    const Segment& range = packing.segments[tile.segment_begin];
    return range.num_tokens() >= least_tokens && range.first == 0 && range.end >= tile.num_requests;
  };
  for (size_t i = 1; i < list_.size(); ++i) {
    if (!is_same_range(packing, list_[i - 1], list_[i])) continue;
    list_[i - 1].is_read_again = is_long(list_[i - 1]);
    list_[i].is_read_again = is_long(list_[i]);
  }
}

void KvSplitter::part_long_ranges(const Packing& packing) {
  const size_t num_tiles = list_.size();
  for (size_t i = 0; i < num_tiles; ++i) {
    if (!list_[i].is_read_again) continue;
    list_[i].is_chunked = true;
    if (list_[i].segment_end == list_[i].segment_begin + 1) continue;
    Tile rest = list_[i];
    Tile& range = list_[i];
    range.segment_end = range.segment_begin + 1;
    range.num_tokens = packing.segments[range.segment_begin].num_tokens();
    range.load = load_of(range.num_tokens);
    range.whole = cost(range.num_requests, range.load);
    ++rest.segment_begin;
    rest.num_tokens -= range.num_tokens;
    rest.load -= range.load;
    rest.whole = cost(rest.num_requests, rest.load);
    rest.is_shared = rest.is_read_again = rest.is_chunked = false;
    rest.is_rest = true;
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

void KvSplitter::take_rest(const Tile& tile, const Position& at, Cut& cut) const {
  cut.next.segment = tile.segment_end;
  cut.next.offset = 0;
  cut.next.dealt = tile.load;
  cut.cost = cost(tile.num_requests - at.first, tile.load - at.dealt + at.again);
  cut.last = tile.num_requests;
  cut.both_requests = 0;
  cut.is_end = true;
}

void KvSplitter::cut_at(const Packing& packing, const Tile& tile, const Position& at,
                        int32_t segment, int32_t offset, int64_t taken, int64_t most_again,
                        Cut& cut) const {
  const std::vector<Segment>& segments = packing.segments;
  const int32_t first = std::max(segments[segment].first, at.first);
  const int32_t both_requests = tile.num_requests - first;
  cut.next.segment = cut.next.base = segment;
  cut.next.offset = cut.next.base_offset = offset;
  cut.next.first = first;
  cut.next.dealt = at.dealt + taken - at.again;
  cut.next.again = 0;
  cut.last = tile.num_requests;
  cut.both_requests = both_requests;
  cut.is_end = false;
  if (offset == 0 && segments[segment - 1].first < first && first > at.first) {
    // Between two requests: the next piece may read what they share again.
    int64_t again = 0;
    int32_t num_segments = 0;
    for (int32_t s = at.base; s < segment && num_segments <= kMaxSegmentsPerCut; ++s) {
      if (segments[s].end <= first) continue;
      again += load_of(segments[s].num_tokens() - (s == at.base ? at.base_offset : 0));
      ++num_segments;
    }
    const int64_t partials = int64_t{2} * both_requests * tiles_.group_size();
    if (num_segments <= kMaxSegmentsPerCut && again <= most_again &&
        (!may_merge_ ||
         static_cast<double>(again * cost_.packing.reread_token) <=
             kPriceOfMerging * static_cast<double>(partials * cost_.packing.partial_row))) {
      cut.next.base = at.base;
      cut.next.base_offset = at.base_offset;
      cut.next.again = again;
      cut.last = first;
    }
  }
  cut.cost = cost(cut.last - at.first, taken + (offset > 0 ? price_of_segment() : 0));
}

bool KvSplitter::find_cut(const Packing& packing, const Tile& tile, const Position& at,
                          int64_t room, int64_t budget, Cut& cut) const {
  const bool forced = room == budget;
  const int64_t most_again = may_merge_ ? std::max(budget / kCostUnit / kAgainPart, kLittleAgain)
                                        : std::numeric_limits<int64_t>::max();
  const int64_t shortest = least_piece_;
  const int32_t num_requests = tile.num_requests - at.first;
  const int64_t for_tokens = room - item_costs_[num_requests].fixed;
  const int64_t fit = for_tokens < 0 ? -1 : for_tokens / item_costs_[num_requests].token;
  const int64_t left = tile.load - at.dealt + at.again;
  int64_t taken = at.again;
  int32_t border = -1;  // the last segment before which a cut fits
  int64_t border_taken = 0;
  for (int32_t s = at.segment; s < tile.segment_end; ++s) {
    const int32_t begin = s == at.segment ? at.offset : 0;
    const int64_t length = packing.segments[s].num_tokens() - begin;
    const int64_t load = load_of(length);
    if (taken - at.again >= shortest && left - taken >= shortest) {
      if (taken <= fit) {
        border = s;
        border_taken = taken;
      } else {  // only if forced: nothing that fits was found before
        cut_at(packing, tile, at, s, 0, taken, most_again, cut);
        return true;
      }
    }
    if (taken + load > fit) {
      if (border >= 0 &&
          fit - border_taken <= std::max<int64_t>(kCutGranularity, fit / kEmptyPart)) {
        cut_at(packing, tile, at, border, 0, border_taken, most_again, cut);
        return true;
      }
      const int64_t most = (length - shortest) / kCutGranularity * kCutGranularity;
      int64_t inside = std::min(std::max<int64_t>(fit - taken - price_of_segment(), 0) /
                                    kCutGranularity * kCutGranularity,
                                most);
      if (inside < shortest && forced && border < 0 && most >= shortest) inside = shortest;
      if (inside >= shortest) {
        cut_at(packing, tile, at, s, begin + static_cast<int32_t>(inside), taken + inside,
               most_again, cut);
        return true;
      }
      if (border >= 0) {
        cut_at(packing, tile, at, border, 0, border_taken, most_again, cut);
        return true;
      }
      if (!forced) return false;
    }
    taken += load;
  }
  take_rest(tile, at, cut);
  return true;
}

void KvSplitter::add_piece(const Packing& packing, const Tile& tile, const Position& at,
                           const Cut& cut, Split& out) {
  const auto segment_begin = static_cast<int32_t>(out.segments.size());
  const auto request_begin = static_cast<int32_t>(out.requests.size());
  int64_t num_tokens = 0;
  int64_t load = 0;
  const auto add = [&](int32_t s, int32_t from, int32_t to) {
    Segment segment = packing.segments[s];
    segment.is_open &= to == segment.num_tokens();
    // Else another piece reads it for the other requests.
    segment.is_read_once &= at.first <= segment.first && segment.end <= cut.last;
    segment.kv_end = segment.kv_begin + to;
    segment.kv_begin += from;
    segment.first = std::max(segment.first, at.first);
    segment.end = std::min(segment.end, cut.last);
    num_tokens += to - from;
    load += load_of(to - from);
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
                        .cost = cost(num_requests, load)});
}

// Each request of a pack is in one of its segments.
void KvSplitter::add_whole(const Packing& packing, const Tile& tile, Split& out) {
  out.pieces.push_back({.tile = tile.tile,
                        .request_begin = static_cast<int32_t>(out.requests.size()),
                        .num_requests = tile.num_requests,
                        .segment_begin = static_cast<int32_t>(out.segments.size()),
                        .num_segments = tile.segment_end - tile.segment_begin,
                        .num_tokens = tile.num_tokens,
                        .cost = tile.whole});
  const auto requests = packing.requests.begin() + tile.request_begin;
  out.requests.insert(out.requests.end(), requests, requests + tile.num_requests);
  for (int32_t s = tile.segment_begin; s < tile.segment_end; ++s) {
    Segment& segment = out.segments.emplace_back(packing.segments[s]);
    segment.end = std::min(segment.end, tile.num_requests);  // the pack may be several tiles
  }
}

void KvSplitter::add_pieces(const Packing& packing, const Choice& choice, Split& out) {
  for (const Taken& taken : choice.taken) {
    const auto index = static_cast<int32_t>(out.pieces.size());
    Ticket& ticket = out.tickets[taken.ticket];
    const bool is_first = ticket.piece_end == 0;
    if (is_first) ticket.piece_begin = index;
    ticket.piece_end = index + 1;
    const Tile& tile = list_[taken.tile];
    if (taken.part < 0) {
      add_whole(packing, tile, out);
    } else {
      const Part& part = choice.parts[taken.part];
      ticket.rest_comes_last |= is_first && part.begin.dealt > 0;
      add_piece(packing, tile, part.begin, part.cut, out);
    }
  }
}

// --- little work ---

KvSplitter::Dealt KvSplitter::deal(const Packing& packing, int64_t budget, bool aligned,
                                   Choice& choice) const {
  choice.clear();
  Dealt dealt{.load = 0, .uncut = 0, .largest = 0, .fits = false};
  int32_t ticket = 0;
  int64_t room = budget;
  for (size_t i = 0; i < list_.size(); ++i) {
    const Tile& tile = list_[i];
    if (aligned && tile.is_read_again && room < budget && tile.whole > room) {
      dealt.largest = std::max(dealt.largest, budget - room);
      if (++ticket == config_.num_workers) return dealt;
      room = budget;
    }
    if (tile.whole <= room) {  // most tiles: this loop runs once per step of the search
      choice.take(i, ticket);
      room -= tile.whole;
      dealt.load += tile.load;
      continue;
    }
    Part part;
    part.begin = begin_of(tile);
    for (;;) {
      const Position& at = part.begin;
      Cut& cut = part.cut;
      take_rest(tile, at, cut);
      const bool fits = cut.cost <= room || find_cut(packing, tile, at, room, budget, cut);
      if (fits) {
        choice.take(i, ticket, part);
        room -= cut.cost;
        if (room < 0) {
          dealt.uncut = cut.cost;
          return dealt;
        }
        dealt.load += cut.next.dealt - at.dealt;
        if (cut.is_end) break;
        part.begin = cut.next;  // and on with the next ticket: one cut for each at most
      }
      dealt.largest = std::max(dealt.largest, budget - room);
      if (++ticket == config_.num_workers) return dealt;
      room = budget;
    }
  }
  dealt.largest = std::max(dealt.largest, budget - room);
  dealt.fits = true;
  choice.num_tickets = ticket + 1;
  return dealt;
}

void KvSplitter::choose_evenly(const Packing& packing, int64_t total) {
  const int64_t workers = config_.num_workers;
  int64_t load = 0;
  int64_t low = (total + workers - 1) / workers;
  for (const Tile& tile : list_) {
    load += tile.load;
    const bool is_cut = tile.num_tokens >= 2 * least_piece_;
    low = std::max(low, is_cut ? cost(tile.num_requests, least_piece_) : tile.whole);
  }
  bool aligned = false;
  // So close to the smallest budget: what is aligned, and then comes out of the L2, seldom keeps others waiting.
  const auto step = [&](int64_t budget) {
    return std::max(kCostUnit * int64_t{kCutGranularity} / 4, budget / (aligned ? 32 : 64));
  };
  int64_t budget = low;
  Dealt dealt = deal(packing, budget, false, choice_);
  while (!dealt.fits) {
    low = budget;
    // What no cut can shorten; or as much more for each ticket as takes what was not dealt out.
    const int64_t missing = (load - dealt.load) * (total / load) / workers;
    budget = std::max(low + step(low), dealt.uncut > 0 ? dealt.uncut : low + missing);
    dealt = deal(packing, budget, false, choice_);
  }
  if (std::ranges::any_of(list_, &Tile::is_read_again)) {
    const int64_t most = dealt.largest + dealt.largest / kAlignedPart;
    const Dealt found = deal(packing, most, true, trial_);
    aligned = found.fits;
    if (aligned) {
      std::swap(choice_, trial_);
      dealt = found;
    }
  }
  int64_t largest = dealt.largest;
  while (largest - low > step(low)) {
    budget = low + (largest - low) / 2;
    const Dealt found = deal(packing, budget, aligned, trial_);
    if (found.fits) {
      std::swap(choice_, trial_);
      largest = found.largest;
    } else {
      low = budget;
    }
  }
}

int64_t KvSplitter::chain(int64_t load, int64_t num_segments, int64_t num_requests) const {
  return load + (kSegmentInChain - price_of_segment()) * num_segments +
         kRowInChain * num_requests * tiles_.group_size();
}

int64_t KvSplitter::time_of_chains(const SplitTask& task, int64_t slowest, int64_t total) const {
  const int64_t shared = kMeanPercent * total + kUniquePercent * task.num_unique;
  return std::max(kAlonePercent * slowest,
                  kSlowestPercent * slowest + shared / config_.num_workers);
}

int64_t KvSplitter::time_of_merge(int64_t partials) const {
  return 100 * kMerging + kPartialRowPercent * partials * tiles_.group_size() / config_.num_workers;
}

int64_t KvSplitter::longest_request(const Packing& packing) {
  int64_t longest = 0;
  for (const Tile& tile : list_) {
    chains_.assign(tile.num_requests + 1, 0);
    for (int32_t s = tile.segment_begin; s < tile.segment_end; ++s) {
      const Segment& segment = packing.segments[s];
      const int64_t own = chain(load_of(segment.num_tokens()), 1, 0);
      chains_[segment.first] += own;
      chains_[std::min(segment.end, tile.num_requests)] -= own;
    }
    int64_t own = 0;
    for (const int64_t change : chains_) longest = std::max(longest, own += change);
  }
  return longest;
}

bool KvSplitter::takes_too_long(const Packing& packing, const SplitTask& task) {
  if (task.time_to_beat == std::numeric_limits<int64_t>::max()) return false;
  int64_t total = 0;
  for (const Tile& tile : list_) {
    total += chain(tile.load, tile.segment_end - tile.segment_begin, tile.num_requests);
  }
  // No split has a smaller sum of chains, and the slowest is at least their mean. Either it merges nothing, or at least
  // two partials.
  const int64_t mean = total / config_.num_workers;
  if (time_of_chains(task, mean, total) >= task.time_to_beat) return true;
  if (time_of_chains(task, mean, total) + time_of_merge(2) < task.time_to_beat) return false;
  return time_of_chains(task, std::max(mean, longest_request(packing)), total) >= task.time_to_beat;
}

KvSplitter::Expected KvSplitter::expect(const SplitTask& task, const Split& split) {
  Expected expected{.time = 0, .slowest = 0, .total = 0, .has_partials = false};
  for (const Ticket& ticket : split.tickets) {
    int64_t own = 0;
    for (int32_t p = ticket.piece_begin; p < ticket.piece_end; ++p) {
      const Piece& piece = split.pieces[p];
      int64_t load = 0;
      for (int32_t s = piece.segment_begin; s < piece.segment_begin + piece.num_segments; ++s) {
        load += load_of(split.segments[s].num_tokens());
      }
      own += chain(load, piece.num_segments, piece.num_requests);
    }
    expected.slowest = std::max(expected.slowest, own);
    expected.total += own;
  }
  expected.time = time_of_chains(task, expected.slowest, expected.total);
  num_partials_.assign(task.num_requests, 0);
  for (const int32_t request : split.requests) ++num_partials_[request];
  int64_t partials = 0;
  int64_t of_many = 0;
  for (const int32_t own : num_partials_) {
    if (own > 1) partials += own;
    of_many += own > kPartialsAtOnce;
  }
  const int64_t group = tiles_.group_size();
  expected.has_partials = partials > 0;
  if (partials > 0) expected.time += time_of_merge(partials);
  if (of_many > 0) {
    expected.time += 100 * (kMergingMany + kRowOfMany * of_many * group / config_.num_workers);
  }
  return expected;
}

void KvSplitter::split_evenly(const Packing& packing, const SplitTask& task, int64_t total,
                              Split& out) {
  out.clear();
  out.time = std::numeric_limits<int64_t>::max();
  const int64_t workers = config_.num_workers;
  const bool may_read_again =
      static_cast<int32_t>(packing.requests.size()) <= task.num_requests && num_shared_tiles_ > 0;
  int64_t longest = 0;
  const auto try_split = [&](bool may_merge) {
    may_merge_ = may_merge;
    choose_evenly(packing, total);
    may_merge_ = true;
    trial_split_.clear();
    trial_split_.tickets.assign(choice_.num_tickets, {});
    add_pieces(packing, choice_, trial_split_);
    const Expected expected = expect(task, trial_split_);
    trial_split_.time = expected.time;
    if (trial_split_.time < out.time) std::swap(out, trial_split_);
    return expected;
  };
  for (const int64_t part : kShorterPieces) {
    if (is_little_) {
      const int64_t least = config_.min_piece_tokens / part / kCutGranularity * kCutGranularity;
      least_piece_ = std::max<int64_t>(least, kCutGranularity);
    }
    const Expected expected = try_split(true);
    if (expected.has_partials && may_read_again) {
      if (longest == 0) longest = longest_request(packing);
      if (time_of_chains(task, longest, expected.total) < out.time) try_split(false);
    }
    // Shorter pieces can even out what CTAs do.
    const int64_t even = time_of_chains(task, expected.total / workers, expected.total);
    const int64_t uneven = time_of_chains(task, expected.slowest, expected.total) - even;
    if (!is_little_ || uneven < expected.time / kUnevenPart) break;
  }
}

void KvSplitter::order_tickets(Split& split) {
  ticket_costs_.clear();
  for (const Ticket& ticket : split.tickets) {
    int64_t& cost = ticket_costs_.emplace_back(0);
    for (int32_t p = ticket.piece_begin; p < ticket.piece_end; ++p) cost += split.pieces[p].cost;
  }
  const int64_t largest = std::ranges::max(ticket_costs_);
  order_.resize(ticket_costs_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::stable_sort(order_, std::greater<>{}, [&](int32_t ticket) {
    return kOrderPart * ticket_costs_[ticket] / largest;
  });
  ordered_.clear();
  for (const int32_t ticket : order_) ordered_.push_back(split.tickets[ticket]);
  std::swap(split.tickets, ordered_);
}

// --- much work ---

int64_t KvSplitter::shortest_piece(int32_t num_requests) const {
  const int64_t rows = int64_t{num_requests} * tiles_.group_size();
  const int64_t partials = rows * cost_.packing.partial_row / kCostUnit;
  return std::max<int64_t>(least_piece_, kPiecePerCut * partials);
}

int64_t KvSplitter::take_chunk(const Packing& packing, Stream& stream, int64_t budget,
                               int64_t cuts_left, int32_t ticket, Choice& choice) {
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
  Part part;
  part.begin = begin_of(tile);
  part.begin.offset = part.begin.base_offset = stream.chunk_begin;
  part.begin.dealt = stream.chunk_begin;
  const bool is_end = stream.chunk_end == length;
  if (is_end) {
    take_rest(tile, part.begin, part.cut);
  } else {
    cut_at(packing, tile, part.begin, tile.segment_begin, stream.chunk_end,
           stream.chunk_end - stream.chunk_begin, 0, part.cut);
  }
  choice.take(stream.tile, ticket, part);
  stream.done += part.cut.cost;
  stream.cuts += !is_end;
  stream.cut_requests += part.cut.both_requests;
  if (++stream.tile == stream.readers_end) {
    if (is_end) {
      stream.chunk_end = 0;
      if (!stream.is_empty()) stream.part.begin = begin_of(list_[stream.tile]);
    } else {
      stream.tile = stream.readers_begin;
    }
  }
  return part.cut.cost;
}

int64_t KvSplitter::take_ticket(const Packing& packing, Stream& stream, int64_t budget,
                                int32_t ticket, Choice& choice) {
  int64_t room = budget;
  while (!stream.is_empty()) {
    const Tile& tile = list_[stream.tile];
    if (tile.is_chunked) break;  // not the first piece
    const Position& at = stream.part.begin;
    Cut& cut = stream.part.cut;
    take_rest(tile, at, cut);
    if (cut.cost > room) {
      if (room < budget) break;  // not the first piece: the next ticket has more room
      if (cut.cost > budget + budget / 2) {
        const int32_t num_requests = tile.num_requests - at.first;
        const int64_t shortest = shortest_piece(num_requests);
        const int64_t most = std::max(budget, cost(num_requests, shortest));
        find_cut(packing, tile, at, most, most, cut);
      }
    }
    // What is left of a tile need not be for all of its requests.
    if (cut.is_end && at.dealt == 0 && !tile.is_rest) {
      choice.take(stream.tile, ticket);
    } else {
      choice.take(stream.tile, ticket, stream.part);
    }
    room -= cut.cost;
    stream.cuts += !cut.is_end;
    stream.cut_requests += cut.both_requests;
    if (!cut.is_end) {
      stream.part.begin = cut.next;
      break;
    }
    if (++stream.tile < stream.end) stream.part.begin = begin_of(list_[stream.tile]);
  }
  stream.done += budget - room;
  return budget - room;
}

bool KvSplitter::choose_whole_tiles() {
  const auto most = static_cast<size_t>(kMostUncutTiles * config_.num_workers);
  if (num_shared_tiles_ < list_.size() || list_.size() > most) return false;
  choice_.clear();
  ticket_costs_.clear();
  for (size_t i = 0; i < list_.size(); ++i) {
    choice_.take(i, static_cast<int32_t>(i));
    ticket_costs_.push_back(list_[i].whole);
  }
  choice_.num_tickets = static_cast<int32_t>(list_.size());
  return tail_of(ticket_costs_) <= kWorstUncutTail;
}

bool KvSplitter::choose_guided(const Packing& packing, int64_t total) {
  choice_.clear();
  alone_.clear();
  ticket_costs_.clear();
  const auto stream_of = [&](size_t begin, size_t end) {
    Stream stream{.tile = begin,
                  .end = end,
                  .part = {},
                  .readers_begin = 0,
                  .readers_end = 0,
                  .chunk_begin = 0,
                  .chunk_end = 0,
                  .total = total_cost(begin, end),
                  .done = 0,
                  .cuts = 0,
                  .cut_requests = 0};
    if (begin < end) stream.part.begin = begin_of(list_[begin]);
    return stream;
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
    const auto ticket = static_cast<int32_t>(ticket_costs_.size());
    // A quarter is left to what comes behind the chunks.
    const int64_t cuts_left =
        std::max<int64_t>(std::min(most_cuts - shared.cuts - alone.cuts,
                                   (most_cut_requests - shared.cut_requests - alone.cut_requests) /
                                       tiles_.requests_per_tile()),
                          0) *
        3 / 4;
    ticket_costs_.push_back(!is_shared ? take_ticket(packing, alone, budget, ticket, alone_)
                            : list_[shared.tile].is_chunked
                                ? take_chunk(packing, shared, budget, cuts_left, ticket, choice_)
                                : take_ticket(packing, shared, budget, ticket, choice_));
    if (shared.cuts + alone.cuts > most_cuts ||
        shared.cut_requests + alone.cut_requests > most_cut_requests) {
      return false;
    }
  }
  choice_.num_tickets = static_cast<int32_t>(ticket_costs_.size());
  return tail_of(ticket_costs_) <= kWorstGuidedTail;
}

void KvSplitter::split(const Packing& packing, const SplitTask& task, Split& out) {
  int64_t num_tokens = 0;
  bool any_shared = false;
  for (const Pack& pack : packing.packs) {
    int64_t of_pack = 0;
    for (const Segment& segment : packing.segments_of(pack)) of_pack += segment.num_tokens();
    num_tokens += of_pack * tiles_.num_tiles(pack.num_requests);
    any_shared |= !packing.segments[pack.segment_begin].is_private();
  }
  is_little_ = num_tokens < kPiecesEach * config_.num_workers * config_.min_piece_tokens;
  const bool has_long_range = std::ranges::any_of(
      packing.spans, [](const GatherSpan& span) { return span.num_tokens >= kLongRange; });
  counts_stages_ = is_little_ || (any_shared && !has_long_range);
  list_tiles(packing, false);
  out.clear();
  const int64_t total = total_cost(0, list_.size());
  if (total == 0 || takes_too_long(packing, task)) return;
  const int64_t one_each = num_shared_tiles_ > 0 ? kOneTicketEach : kOneTicketEachUnshared;
  bool is_much = total > kCostUnit * one_each * config_.num_workers;
  alone_.clear();
  if (is_much) {
    if (has_long_range) list_tiles(packing, true);
    is_much = (!has_long_range && choose_whole_tiles()) ||
              choose_guided(packing, total_cost(0, list_.size()));
    if (!is_much && has_long_range) list_tiles(packing, false);
  }
  if (is_much) {
    out.tickets.assign(choice_.num_tickets, {});
    add_pieces(packing, choice_, out);
    add_pieces(packing, alone_, out);
  } else {
    split_evenly(packing, task, total, out);
    if (is_little_ && !out.tickets.empty()) order_tickets(out);
  }
}

double KvSplitter::tail(const Split& split) const {
  std::vector<int64_t> costs;
  for (const Ticket& ticket : split.tickets) {
    int64_t& cost = costs.emplace_back(0);
    for (int32_t p = ticket.piece_begin; p < ticket.piece_end; ++p) cost += split.pieces[p].cost;
  }
  return tail_of(costs);
}

double KvSplitter::tail_of(std::span<const int64_t> ticket_costs) const {
  // Ascending: the next ticket goes to the worker that is done first.
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> loads(
      {}, std::vector<int64_t>(config_.num_workers, 0));
  int64_t total = 0;
  int64_t slowest = 0;
  for (const int64_t cost : ticket_costs) {
    const int64_t load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    total += cost;
    slowest = std::max(slowest, load);
  }
  if (total == 0) return 1;
  return static_cast<double>(slowest) * config_.num_workers / static_cast<double>(total);
}

}  // namespace pat
