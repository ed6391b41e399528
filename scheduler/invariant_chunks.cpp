#include "invariant_chunks.h"

#include <algorithm>
#include <limits>

namespace pat {

namespace {

// An item with several requests has at most as many tokens as kLongestShares times a worker's share of the distinct
// tokens, or as kLongestChunks chunks if that is more. Shorter items would balance better, but would read more shared
// KV again.
constexpr int64_t kLongestShares = 2;
constexpr int64_t kLongestChunks = 2;

}  // namespace

void InvariantChunks::plan(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                           int64_t num_distinct, Packing& packing, Split& split) {
  packing.clear();
  split.clear();
  known_spans_.assign(forest.nodes().size(), {.kv_begin = -1, .kv_end = -1, .span = -1});
  const int64_t longest = kLongestShares * num_distinct / num_workers_;
  list_requests(forest);
  for (int64_t begin = 0; begin <= std::numeric_limits<int32_t>::max();) {
    const auto chunk = static_cast<int32_t>(begin);
    if (!enter_chunk(forest, seq_lens, chunk)) break;
    const int32_t chunk_tokens = ChunkGrid::chunk_tokens(chunk);
    choose_runs(chunk, std::max(longest, kLongestChunks * chunk_tokens));
    int32_t first = 0;
    for (const int32_t end : run_ends_) {
      add_item(forest, seq_lens, chunk, first, end, packing, split);
      first = end;
    }
    begin += chunk_tokens;
  }
  assign_tickets(split);
}

void InvariantChunks::list_requests(const PrefixForest& forest) {
  const std::vector<ForestNode>& nodes = forest.nodes();
  holders_.clear();
  int32_t before = -1;
  for (const int32_t request : forest.requests_in_tree_order()) {
    const int32_t anchor = forest.anchor(request);
    int32_t node = anchor;
    while (node != before) {  // the greater index goes up, because a parent's index is smaller
      int32_t& deeper = node > before ? node : before;
      deeper = nodes[deeper].parent;
    }
    holders_.push_back({.request = request, .node = node, .end = 0, .shared_end = 0});
    before = anchor;
  }
}

bool InvariantChunks::enter_chunk(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                                  int32_t begin) {
  // The deepest node that this request shares with the last kept request. A holder's `node` is the deepest node that it
  // shares with the holder before it. So the node shared with the last kept request is the uppermost `node` of all
  // holders after that request. It has the smallest index among these nodes, because they all lie on one path.
  int32_t common = std::numeric_limits<int32_t>::max();
  size_t num_kept = 0;
  for (Holder holder : holders_) {
    common = std::min(common, holder.node);
    if (!ChunkGrid::is_cut(begin, seq_lens[holder.request])) continue;
    holder.node = num_kept == 0 ? -1 : common;
    common = std::numeric_limits<int32_t>::max();
    holder.end = ChunkGrid::chunk_end(begin, seq_lens[holder.request]);
    // The previous holder's KV in this chunk may end earlier.
    const int32_t shared_end = holder.node < 0 ? 0
                                               : std::min({forest.nodes()[holder.node].kv_end,
                                                           holder.end, holders_[num_kept - 1].end});
    const int32_t shared = std::max(shared_end - begin, 0);
    holder.shared_end = begin + shared - shared % ChunkGrid::kStepTokens;
    holders_[num_kept++] = holder;
  }
  holders_.resize(num_kept);
  return num_kept > 0;
}

void InvariantChunks::choose_runs(int32_t begin, int64_t longest) {
  own_tokens_.assign(holders_.size() + 1, 0);
  for (size_t i = 0; i < holders_.size(); ++i) {
    own_tokens_[i + 1] = own_tokens_[i] + (holders_[i].end - holders_[i].shared_end);
  }
  const auto shared_tokens = [&](int32_t i) { return holders_[i].shared_end - begin; };
  const auto fits = [&, most = tiles_.requests_per_tile()](int32_t first, int32_t last) {
    const int64_t tokens = own_tokens_[last + 1] - own_tokens_[first] + shared_tokens(first);
    return last - first < most && tokens <= longest;
  };
  runs_.find(static_cast<int32_t>(holders_.size()), shared_tokens, fits, run_ends_);
}

void InvariantChunks::add_item(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                               int32_t begin, int32_t first, int32_t end, Packing& packing,
                               Split& split) {
  Split::WorkItem item{.tile = tiles_.select(end - first),
                       .request_begin = static_cast<int32_t>(split.requests.size()),
                       .num_requests = end - first,
                       .segment_begin = static_cast<int32_t>(split.segments.size()),
                       .num_segments = 0,
                       .num_tokens = 0,
                       .cost = 0};
  const auto add = [&](int32_t span, int32_t kv_begin, int32_t kv_end, int32_t i, int32_t last,
                       bool is_open, bool is_read_once) {
    split.segments.push_back({.span = span,
                              .kv_begin = kv_begin,
                              .kv_end = kv_end,
                              .first = i - first,
                              .end = last - first + 1,
                              .is_open = is_open,
                              .is_read_once = is_read_once});
    ++item.num_segments;
    item.num_tokens += kv_end - kv_begin;
  };
  for (int32_t i = first; i < end; ++i) {
    const Holder& holder = holders_[i];
    split.requests.push_back(holder.request);
    // Adds, in ascending order, the KV of this request that no earlier request of the item has: first the range
    // shared by the largest number of later requests, then ranges shared by fewer.
    int32_t next = i == first ? begin : holder.shared_end;
    reaches_.clear();
    Reach reach{.last = i, .end = holder.end, .node = std::numeric_limits<int32_t>::max()};
    for (int32_t last = i + 1; last < end; ++last) {
      reach = {.last = last,
               .end = std::min(reach.end, holders_[last].shared_end),
               .node = std::min(reach.node, holders_[last].node)};
      if (reach.end <= next) break;
      reaches_.push_back(reach);
    }
    while (!reaches_.empty()) {
      const Reach& widest = reaches_.back();
      if (widest.end > next) {
        const int32_t span =
            span_of(forest, widest.node, next, widest.end, holder.request, packing);
        add(span, next, widest.end, i, widest.last, false, false);
        next = widest.end;
      }
      reaches_.pop_back();
    }
    if (holder.end > next) {
      add(Segment::kPrivate, next, holder.end, i, i, holder.end == seq_lens[holder.request],
          next >= forest.private_begin(holder.request));
    }
  }
  const ItemCost& cost = item_costs_[item.num_requests];
  item.cost = cost.fixed + std::max<int64_t>(item.num_tokens * cost.token, cost_.split.shortest);
  split.work_items.push_back(item);
}

int32_t InvariantChunks::span_of(const PrefixForest& forest, int32_t node, int32_t kv_begin,
                                 int32_t kv_end, int32_t request, Packing& packing) {
  while (forest.nodes()[node].kv_begin >= kv_end) node = forest.nodes()[node].parent;
  KnownSpan& known = known_spans_[node];
  if (known.kv_begin != kv_begin || known.kv_end != kv_end) {
    known = {.kv_begin = kv_begin,
             .kv_end = kv_end,
             .span = packing.add_span(request, kv_begin, kv_end)};
  }
  return known.span;
}

void InvariantChunks::assign_tickets(Split& split) const {
  const auto private_begin =
      std::stable_partition(split.work_items.begin(), split.work_items.end(),
                            [](const Split::WorkItem& item) { return item.num_requests > 1; });
  const auto stream = [&](auto begin, auto end) {
    Stream made{.next = static_cast<int32_t>(begin - split.work_items.begin()),
                .end = static_cast<int32_t>(end - split.work_items.begin()),
                .progress = {.total = 0, .done = 0}};
    for (auto item = begin; item != end; ++item) made.progress.total += item->cost;
    return made;
  };
  Stream shared_work = stream(split.work_items.begin(), private_begin);
  Stream private_work = stream(private_begin, split.work_items.end());
  const int64_t total = shared_work.progress.total + private_work.progress.total;
  while (!shared_work.is_empty() || !private_work.is_empty()) {
    const int64_t left = total - shared_work.progress.done - private_work.progress.done;
    const int64_t budget = ticket_budget(left, num_workers_);
    const bool is_shared =
        private_work.is_empty() ||
        (!shared_work.is_empty() && shared_is_next(shared_work.progress, private_work.progress));
    Stream& from = is_shared ? shared_work : private_work;
    Ticket ticket{.item_begin = from.next, .item_end = from.next};
    for (int64_t budget_left = budget; !from.is_empty();) {
      const int64_t next = split.work_items[from.next].cost;
      if (next > budget_left && from.next > ticket.item_begin) break;
      budget_left -= next;
      from.progress.done += next;
      ++from.next;
    }
    ticket.item_end = from.next;
    split.tickets.push_back(ticket);
  }
}

}  // namespace pat
