#include "plan_checks.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "chunk_grid.h"
#include "runner.h"

namespace pat::testing {

namespace {

struct Range {
  int32_t begin;
  int32_t end;
};

// True if two requests hold the same nodes in this range of positions.
bool share(const Path& a, const Path& b, Range range) {
  for (size_t i = 0; i < a.size() && a[i].kv_begin < range.end; ++i) {
    if (a[i].kv_end > range.begin && (i >= b.size() || !(a[i] == b[i]))) return false;
  }
  return !a.empty() && a.back().kv_end >= range.end;
}

// Records which work items read the KV of each node, and the private KV of each request.
class Readers {
 public:
  explicit Readers(const Batch& batch) : batch_(batch) {}

  // Records that a work item reads a range of positions of this request.
  void add(int32_t request, Range range, bool is_read_once) {
    int32_t end = 0;  // end of the path so far
    for (const Node& node : batch_.paths[request]) {
      add({true, node.id}, range, {node.kv_begin, node.kv_end}, is_read_once);
      end = node.kv_end;
    }
    add({false, request}, range, {end, INT32_MAX}, is_read_once);
  }

  // Checks that no other work item reads KV that the plan marks as read once.
  void check_read_once() {
    for (auto& [owner, reads] : reads_) {
      std::ranges::sort(reads, {}, [](const Read& read) { return read.range.begin; });
      int32_t end = 0, end_of_once = 0;  // ends of the earlier ranges
      for (const auto& [range, is_read_once] : reads) {
        CHECK(range.begin >= (is_read_once ? end : end_of_once));
        end = std::max(end, range.end);
        if (is_read_once) end_of_once = std::max(end_of_once, range.end);
      }
    }
  }

 private:
  using Owner = std::pair<bool, int64_t>;  // (true, a node's id) or (false, a request)
  struct Read {
    Range range;
    bool is_read_once;
  };

  void add(Owner owner, Range range, Range part, bool is_read_once) {
    const Range inner{std::max(range.begin, part.begin), std::min(range.end, part.end)};
    if (inner.begin < inner.end) reads_[owner].push_back({inner, is_read_once});
  }

  const Batch& batch_;
  std::map<Owner, std::vector<Read>> reads_;
};

// Checks the counts of tokens: all tokens of each request, and distinct tokens.
void check_tokens(const KvTokens& tokens, const Batch& batch) {
  std::map<int64_t, int32_t> nodes;
  int64_t alone = 0;
  for (size_t request = 0; request < batch.paths.size(); ++request) {
    const Path& path = batch.paths[request];
    for (const Node& node : path) nodes[node.id] = node.kv_end - node.kv_begin;
    alone += batch.seq_lens[request] - (path.empty() ? 0 : path.back().kv_end);
  }
  int64_t distinct = alone;
  for (const auto& [id, count] : nodes) distinct += count;
  CHECK_EQ(tokens.query_centric,
           std::accumulate(batch.seq_lens.begin(), batch.seq_lens.end(), int64_t{0}));
  CHECK_EQ(tokens.lower_bound, distinct);
  CHECK(tokens.lower_bound <= tokens.planned && tokens.planned <= tokens.query_centric);
}

}  // namespace

void check_plan(const PackScheduler& scheduler, const SchedulerConfig& config, const Batch& batch,
                std::span<const int32_t> grown) {
  const std::span<const int32_t> seq_lens = grown.empty() ? batch.seq_lens : grown;
  const std::vector<int32_t> buffer = plan_bytes(scheduler);
  const PlanHeader& h = scheduler.last_plan().header();
  const PlanView plan = PlanView::at(buffer.data(), PlanLayout::of(PlanCapacity::of(h)));
  CHECK_EQ(plan.header->magic, kPlanMagic);
  CHECK_EQ(static_cast<size_t>(h.num_requests), batch.seq_lens.size());

  CHECK_EQ(plan.ticket_begin[0].work_item, 0);
  CHECK_EQ(plan.ticket_begin[h.num_tickets].work_item, h.num_work_items);
  CHECK_EQ(plan.ticket_begin[h.num_tickets].kv_segment, h.num_kv_segments);
  for (int32_t t = 0; t < h.num_tickets; ++t) {
    const TicketBegin& begin = plan.ticket_begin[t];
    CHECK(begin.work_item < plan.ticket_begin[t + 1].work_item);
    CHECK_EQ(begin.kv_segment, plan.work_items[begin.work_item].segment_begin);
  }

  // Checks the slot buffer: spans follow one another without a gap.
  int32_t num_slots = 0;
  for (int32_t s = 0; s < h.num_gather_spans; ++s) {
    CHECK_EQ(plan.gather_spans[s].slot_begin, num_slots);
    CHECK(plan.gather_spans[s].num_tokens > 0);
    num_slots += plan.gather_spans[s].num_tokens;
  }
  CHECK_EQ(num_slots, h.num_shared_slots);

  // Positions that a request reads in one work item. The request's segments there ascend or descend.
  struct Read {
    std::vector<Range> ranges;
    int32_t partial_slot;
  };
  std::vector<std::vector<Read>> reads(batch.seq_lens.size());
  Readers readers(batch);
  std::vector<char> taken(h.num_item_requests, 0);
  int64_t planned = 0;
  int32_t next_segment = 0, largest_tile = 0;
  for (int32_t i = 0; i < h.num_work_items; ++i) {
    const WorkItem& item = plan.work_items[i];
    const int32_t rows = item.num_requests * config.group_size;
    const TileTable& table = tiles_of(config.latent);
    CHECK(rows > 0 && item.tile < table.num_tiles && rows <= table[item.tile].block_q);
    CHECK(table[item.tile].block_q <= config.max_block_q);
    CHECK(item.tile == 0 || rows > table[item.tile - 1].block_q);
    largest_tile = std::max(largest_tile, item.tile);
    std::vector<Read> item_reads(item.num_requests);
    for (int32_t r = 0; r < item.num_requests; ++r) {
      const int32_t index = item.request_begin + r;
      CHECK(index >= 0 && index < h.num_item_requests && !taken[index]);
      taken[index] = 1;
      const ItemRequest& entry = plan.item_requests[index];
      CHECK(entry.request >= 0 && entry.request < h.num_requests);
      item_reads[r].partial_slot = entry.partial_slot;
    }
    CHECK_EQ(item.segment_begin, next_segment);
    CHECK(item.num_segments >= 1);
    next_segment += item.num_segments;
    for (int32_t s = item.segment_begin; s < next_segment; ++s) {
      const KvSegment& segment = plan.kv_segments[s];
      const int32_t first = segment.first_request(), end = segment.end_request();
      CHECK(first >= 0 && first < end && end <= item.num_requests);
      Range range{segment.kv_begin, segment.kv_end};
      const GatherSpan* span = nullptr;
      if (segment.kv_request == kSharedKv) {
        span = std::upper_bound(
                   plan.gather_spans, plan.gather_spans + h.num_gather_spans, segment.kv_begin,
                   [](int32_t slot, const GatherSpan& s) { return slot < s.slot_begin; }) -
               1;
        CHECK(segment.kv_end <= span->slot_begin + span->num_tokens);
        range.begin += span->kv_begin - span->slot_begin;
        range.end += span->kv_begin - span->slot_begin;
      } else {
        CHECK_EQ(end, first + 1);
        CHECK_EQ(segment.kv_request, plan.item_requests[item.request_begin + first].request);
        if (range.end == kOpenEnd) range.end = seq_lens[segment.kv_request];
      }
      CHECK(range.begin >= 0 && range.begin < range.end);
      planned += range.end - range.begin;
      readers.add(span != nullptr ? span->request : segment.kv_request, range,
                  segment.is_read_once());
      for (int32_t r = first; r < end; ++r) {
        const int32_t request = plan.item_requests[item.request_begin + r].request;
        if (span != nullptr && request != span->request) {
          CHECK(share(batch.paths[request], batch.paths[span->request], range));
        }
        item_reads[r].ranges.push_back(range);
      }
    }
    for (int32_t r = 0; r < item.num_requests; ++r) {
      std::vector<Range>& ranges = item_reads[r].ranges;
      CHECK(!ranges.empty());
      if (ranges.front().begin > ranges.back().begin) std::reverse(ranges.begin(), ranges.end());
      for (size_t i = 1; i < ranges.size(); ++i) CHECK_EQ(ranges[i - 1].end, ranges[i].begin);
      reads[plan.item_requests[item.request_begin + r].request].push_back(item_reads[r]);
    }
  }
  CHECK_EQ(next_segment, h.num_kv_segments);
  CHECK(std::count(taken.begin(), taken.end(), 1) == h.num_item_requests);
  CHECK_EQ(h.largest_tile, largest_tile);
  readers.check_read_once();
  if (grown.empty()) {
    CHECK_EQ(planned, scheduler.last_plan().kv_tokens().planned);
    check_tokens(scheduler.last_plan().kv_tokens(), batch);
  }

  // Checks the merges. A request has one unless exactly one work item reads its KV. The request's partials follow one
  // another, in the order of positions.
  int32_t next_partial = 0, next_merge = 0;
  for (size_t request = 0; request < reads.size(); ++request) {
    std::vector<Read>& all = reads[request];
    std::sort(all.begin(), all.end(),
              [](const Read& a, const Read& b) { return a.ranges[0].begin < b.ranges[0].begin; });
    int32_t position = 0;
    for (const Read& read : all) {
      CHECK_EQ(read.ranges.front().begin, position);
      if (config.batch_invariant) {  // work items are chunks of the grid
        CHECK_EQ(read.ranges.back().end, ChunkGrid::chunk_end(position, seq_lens[request]));
        for (const Range& range : read.ranges)
          CHECK_EQ((range.begin - position) % ChunkGrid::kStepTokens, 0);
      }
      position = read.ranges.back().end;
      CHECK_EQ(read.partial_slot, all.size() == 1 ? kDirectStore : next_partial++);
    }
    CHECK_EQ(position, seq_lens[request]);
    if (all.size() == 1) continue;
    CHECK(next_merge < h.num_merges);
    const MergeEntry& merge = plan.merges[next_merge++];
    CHECK_EQ(static_cast<size_t>(merge.request), request);
    CHECK_EQ(merge.partial_begin + merge.num_partials, next_partial);
    CHECK_EQ(static_cast<size_t>(merge.num_partials), all.size());
  }
  CHECK_EQ(next_merge, h.num_merges);
  CHECK_EQ(next_partial, h.num_partials);
}

void check_bounds(const PackScheduler& scheduler, const SchedulerConfig& config,
                  std::span<const int32_t> seq_lens) {
  const PlanHeader& header = scheduler.last_plan().header();
  if (header.num_requests == 0) return;
  const PlanBounds bounds =
      config.batch_invariant
          ? invariant_plan_bounds(header.num_requests, std::max(std::ranges::max(seq_lens), 1))
          : plan_bounds(header.num_requests, config.num_workers,
                        {tiles_of(config.latent), config.group_size, config.max_block_q});
  CHECK(bounds.capacity.holds(header));
  CHECK(header.num_partials <= bounds.num_partials);
}

}  // namespace pat::testing
