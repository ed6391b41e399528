#include "kv_split.h"

#include <algorithm>

#include "check.h"

namespace pat {

KvSplitter::KvSplitter(const SplitConfig& config, const CostModel& cost, const TileSelection& tiles)
    : config_(config), cost_(cost), tiles_(tiles) {
  PAT_CHECK(config.num_workers >= 1, "num_workers must be at least 1, got ", config.num_workers);
  PAT_CHECK(
      config.min_piece_tokens >= kCutGranularity && config.min_piece_tokens % kCutGranularity == 0,
      "min_piece_tokens must be a positive multiple of ", kCutGranularity, ", got ",
      config.min_piece_tokens);
}

void KvSplitter::list_tiles(const Packing& packing) {
  list_.clear();
  for (size_t p = 0; p < packing.packs.size(); ++p) {
    const Pack& pack = packing.packs[p];
    for (int32_t done = 0; done < pack.num_requests; done += tiles_.requests_per_tile()) {
      const int32_t num_requests = std::min(tiles_.requests_per_tile(), pack.num_requests - done);
      const int32_t tile = tiles_.select(num_requests);
      list_.push_back({.pack = static_cast<int32_t>(p),
                       .tile = tile,
                       .request_begin = pack.request_begin + done,
                       .num_requests = num_requests,
                       .num_tokens = pack.kv_end - pack.kv_begin,
                       .rate = cost_.rate(kTileTable[tile].block_q),
                       .fixed = cost_.fixed(num_requests * tiles_.group_size())});
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

template <typename PieceFn>
int32_t KvSplitter::deal(int64_t budget, PieceFn&& piece) const {
  int32_t worker = 0;
  int64_t room = budget;
  for (const Tile& tile : list_) {
    for (int32_t offset = 0; offset < tile.num_tokens;) {
      const int32_t tokens = tokens_that_fit(tile, tile.num_tokens - offset, room);
      if (tokens == 0) {  // an empty worker always takes something: see smallest_budget()
        ++worker;
        room = budget;
        continue;
      }
      piece(tile, offset, tokens, worker);
      offset += tokens;
      room -= cost(tile, tokens);
    }
  }
  return worker + 1;
}

int64_t KvSplitter::smallest_budget() const {
  int64_t total = 0;
  int64_t uncuttable =
      0;  // a worker must be able to take the longest piece that no cut can shorten
  for (const Tile& tile : list_) {
    total += cost(tile, tile.num_tokens);
    uncuttable =
        std::max(uncuttable, cost(tile, std::min(tile.num_tokens, 2 * config_.min_piece_tokens)));
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

void KvSplitter::split(const Packing& packing, Split& out) {
  list_tiles(packing);
  out.pieces.clear();
  out.worker_begin.assign(config_.num_workers + 1, 0);
  if (list_.empty()) return;
  int32_t last_worker = 0;
  const auto emit = [&](const Tile& tile, int32_t offset, int32_t tokens, int32_t worker) {
    while (last_worker < worker)
      out.worker_begin[++last_worker] = static_cast<int32_t>(out.pieces.size());
    const int32_t kv_begin = packing.packs[tile.pack].kv_begin + offset;
    out.pieces.push_back({.pack = tile.pack,
                          .tile = tile.tile,
                          .request_begin = tile.request_begin,
                          .num_requests = tile.num_requests,
                          .kv_begin = kv_begin,
                          .kv_end = kv_begin + tokens});
  };
  deal(smallest_budget(), emit);
  while (last_worker < config_.num_workers) {
    out.worker_begin[++last_worker] = static_cast<int32_t>(out.pieces.size());
  }
}

void KvSplitter::summarize_tiles(std::span<int32_t> tiles_by_body) const {
  for (const Tile& tile : list_) ++tiles_by_body[tile.tile];
}

double KvSplitter::tail(const Split& split) const {
  int64_t total = 0;
  int64_t slowest = 0;
  for (int32_t worker = 0; worker < config_.num_workers; ++worker) {
    int64_t load = 0;
    for (int32_t p = split.worker_begin[worker]; p < split.worker_begin[worker + 1]; ++p) {
      const Piece& piece = split.pieces[p];
      const int64_t tokens = std::max(piece.kv_end - piece.kv_begin, cost_.shortest);
      load += cost_.fixed(piece.num_requests * tiles_.group_size()) +
              tokens * cost_.rate(kTileTable[piece.tile].block_q);
    }
    total += load;
    slowest = std::max(slowest, load);
  }
  return total == 0 ? 1.0 : static_cast<double>(slowest) * config_.num_workers / total;
}

}  // namespace pat
