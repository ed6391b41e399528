#include "invariant_chunks.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace pat {

namespace {

// As in kv_split.cpp: a ticket is this part of a worker's share of what is left, and no smaller than so many tokens.
constexpr int64_t kTicketsPerShare = 2;
constexpr int64_t kSmallestTicket = 384;
// How much faster than private tickets the shared ones are drawn.
constexpr double kSharedLead = 2;

}  // namespace

void InvariantChunks::plan(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                           Packing& packing, Split& split) {
  form_packs(forest, seq_lens, packing);
  split.pieces.clear();
  split.tickets.clear();
  cut_packs(packing, split.pieces);
  deal_tickets(split);
}

void InvariantChunks::form_packs(const PrefixForest& forest, std::span<const int32_t> seq_lens,
                                 Packing& packing) {
  packing.packs.clear();
  packing.requests.clear();
  const auto add = [&packing](int32_t kv_begin, int32_t kv_end, bool is_private,
                              std::span<const int32_t> requests) {
    if (kv_begin == kv_end) return;
    if (packing.requests.size() + requests.size() > std::numeric_limits<int32_t>::max()) {
      throw std::length_error("the requests of all packs do not fit into int32");
    }
    packing.packs.push_back({.kv_begin = kv_begin,
                             .kv_end = kv_end,
                             .is_private = is_private,
                             .num_requests = static_cast<int32_t>(requests.size()),
                             .request_begin = static_cast<int32_t>(packing.requests.size())});
    packing.requests.insert(packing.requests.end(), requests.begin(), requests.end());
  };
  for (const ForestNode& node : forest.nodes()) {
    add(ChunkGrid::boundary_before(node.kv_begin), ChunkGrid::boundary_before(node.kv_end), false,
        forest.holders(node));
  }
  for (const int32_t& request : forest.requests_in_tree_order()) {
    add(ChunkGrid::boundary_before(forest.private_begin(request)), seq_lens[request], true,
        {&request, 1});
  }
}

void InvariantChunks::cut_packs(const Packing& packing, std::vector<Piece>& pieces) {
  num_shared_pieces_ = 0;
  for (size_t p = 0; p < packing.packs.size(); ++p) {
    const Pack& pack = packing.packs[p];
    for (int32_t begin = pack.kv_begin; begin < pack.kv_end;) {
      const auto end = static_cast<int32_t>(
          std::min<int64_t>(int64_t{begin} + ChunkGrid::chunk_tokens(begin), pack.kv_end));
      for (int32_t done = 0; done < pack.num_requests; done += tiles_.requests_per_tile()) {
        const int32_t num_requests = std::min(tiles_.requests_per_tile(), pack.num_requests - done);
        pieces.push_back({.pack = static_cast<int32_t>(p),
                          .tile = tiles_.select(num_requests),
                          .request_begin = pack.request_begin + done,
                          .num_requests = num_requests,
                          .kv_begin = begin,
                          .kv_end = end});
      }
      begin = end;
    }
    if (!pack.is_private) num_shared_pieces_ = static_cast<int32_t>(pieces.size());
  }
}

int64_t InvariantChunks::cost(const Piece& piece) const {
  return cost_.fixed(piece.num_requests * tiles_.group_size()) +
         std::max(piece.kv_end - piece.kv_begin, cost_.shortest) *
             cost_.rate(kTileTable[piece.tile].block_q);
}

InvariantChunks::Stream InvariantChunks::stream(const Split& split, int32_t begin,
                                                int32_t end) const {
  Stream made{.next = begin, .end = end, .total = 0, .done = 0};
  for (int32_t p = begin; p < end; ++p) made.total += cost(split.pieces[p]);
  return made;
}

void InvariantChunks::deal_tickets(Split& split) const {
  Stream shared = stream(split, 0, num_shared_pieces_);
  Stream alone = stream(split, num_shared_pieces_, static_cast<int32_t>(split.pieces.size()));
  const int64_t total = shared.total + alone.total;
  while (!shared.is_empty() || !alone.is_empty()) {
    const int64_t left = total - shared.done - alone.done;
    const int64_t budget =
        std::max(left / (kTicketsPerShare * num_workers_), CostModel::kRateUnit * kSmallestTicket);
    const bool is_shared =
        alone.is_empty() ||
        (!shared.is_empty() && shared.progress() <= kSharedLead * alone.progress());
    Stream& from = is_shared ? shared : alone;
    Ticket ticket{from.next, from.next};
    for (int64_t room = budget; !from.is_empty();) {
      const int64_t next = cost(split.pieces[from.next]);
      if (next > room && from.next > ticket.piece_begin) break;
      room -= next;
      from.done += next;
      ++from.next;
    }
    ticket.piece_end = from.next;
    split.tickets.push_back(ticket);
  }
}

}  // namespace pat
