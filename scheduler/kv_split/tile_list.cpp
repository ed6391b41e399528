#include "kv_split/tile_list.h"

#include <algorithm>

namespace pat {

namespace {

// Tiles that read the same range may be cut at the same positions if the range has at least this many tokens. With cuts
// at different positions, each CTA reads the range from device memory. For 8 tiles of 32,768 tokens and 33 workers,
// that is 5 times as many bytes.
constexpr int32_t kAlignedRange = 512;

}  // namespace

void TileList::make(const Packing& packing, const SplitContext& context, bool parted) {
  tiles_.clear();
  num_shared_ = 0;
  num_parted_ = parted_requests_ = 0;
  const int32_t most = context.tiles.requests_per_tile();
  for (const Pack& pack : packing.packs) {
    int64_t num_tokens = 0;
    int64_t kv_load = 0;
    for (const Segment& segment : packing.segments_of(pack)) {
      num_tokens += segment.num_tokens();
      kv_load += context.kv_load_of(segment.num_tokens());
    }
    const bool is_shared = !packing.segments[pack.segment_begin].is_private();
    for (int32_t done = 0; done < pack.num_requests; done += most) {
      const int32_t num_requests = std::min(most, pack.num_requests - done);
      tiles_.push_back({.request_begin = pack.request_begin + done,
                        .num_requests = num_requests,
                        .segment_begin = pack.segment_begin,
                        .segment_end = pack.segment_begin + pack.num_segments,
                        .tile = context.tiles.select(num_requests),
                        .is_shared = is_shared,
                        .is_chunked = false,
                        .is_rest = false,
                        .widest_reader = 0,
                        .num_tokens = num_tokens,
                        .kv_load = kv_load,
                        .uncut_cost = context.cost(num_requests, kv_load)});
    }
  }
  mark_common_ranges(packing, parted ? kLongRange : kAlignedRange);
  if (parted) part_long_ranges(packing, context);
  // Moves shared tiles to the front. The sort is stable, so that the packs of a request keep their order.
  const auto is_shared = [](const Tile& tile) { return tile.is_shared; };
  const auto privates = std::is_partitioned(tiles_.begin(), tiles_.end(), is_shared)
                            ? std::partition_point(tiles_.begin(), tiles_.end(), is_shared)
                            : std::stable_partition(tiles_.begin(), tiles_.end(), is_shared);
  num_shared_ = static_cast<size_t>(privates - tiles_.begin());
}

int64_t TileList::total_cost(size_t begin, size_t end) const {
  int64_t total = 0;
  for (size_t i = begin; i < end; ++i) total += tiles_[i].uncut_cost;
  return total;
}

bool TileList::is_same_range(const Packing& packing, const Tile& a, const Tile& b) {
  const Segment& x = packing.segments[a.segment_begin];
  const Segment& y = packing.segments[b.segment_begin];
  return !x.is_private() && x.span == y.span && x.kv_begin == y.kv_begin && x.kv_end == y.kv_end;
}

void TileList::mark_common_ranges(const Packing& packing, int32_t least_tokens) {
  const auto is_long = [&](const Tile& tile) {
    const Segment& range = packing.segments[tile.segment_begin];
    return range.num_tokens() >= least_tokens && range.first == 0 && range.end >= tile.num_requests;
  };
  for (auto begin = tiles_.begin(); begin != tiles_.end();) {
    const auto end = std::find_if_not(begin, tiles_.end(), [&](const Tile& tile) {
      return &tile == &*begin || is_same_range(packing, *begin, tile);
    });
    const auto widest = std::max_element(
        begin, end, [](const Tile& a, const Tile& b) { return a.num_requests < b.num_requests; });
    const int32_t most_requests = widest->num_requests;
    for (auto tile = begin; tile != end && end - begin > 1; ++tile) {
      if (is_long(*tile)) tile->widest_reader = most_requests;
    }
    begin = end;
  }
}

void TileList::part_long_ranges(const Packing& packing, const SplitContext& context) {
  const size_t num_tiles = tiles_.size();
  for (size_t i = 0; i < num_tiles; ++i) {
    if (!tiles_[i].is_read_again()) continue;
    tiles_[i].is_chunked = true;
    if (tiles_[i].segment_end == tiles_[i].segment_begin + 1) continue;
    Tile rest = tiles_[i];
    Tile& range = tiles_[i];
    range.segment_end = range.segment_begin + 1;
    range.num_tokens = packing.segments[range.segment_begin].num_tokens();
    range.kv_load = context.kv_load_of(range.num_tokens);
    range.uncut_cost = context.cost(range.num_requests, range.kv_load);
    ++rest.segment_begin;
    rest.num_tokens -= range.num_tokens;
    rest.kv_load -= range.kv_load;
    rest.uncut_cost = context.cost(rest.num_requests, rest.kv_load);
    rest.is_shared = rest.is_chunked = false;
    rest.widest_reader = 0;
    rest.is_rest = true;
    ++num_parted_;
    parted_requests_ += rest.num_requests;
    tiles_.push_back(rest);
  }
}

}  // namespace pat
