// Stages 2 and 3 of a batch-invariant plan: forest -> packs and work items.
//
// Which KV ranges a request's partials cover, and so each bit of its result, depends on the request's length alone: its
// KV is cut at the boundaries of the ChunkGrid and nowhere else. Each chunk is one partial, whoever else is in the work
// item that computes it. Requests share the chunks that lie within their common prefix as a whole. The remainder of the
// prefix, up to the first boundary in it, is read by each of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "chunk_grid.h"
#include "cost_model.h"
#include "kv_split.h"
#include "packing.h"
#include "prefix_forest.h"
#include "tile_selection.h"

namespace pat {

class InvariantChunks {
 public:
  InvariantChunks(int32_t num_workers, const CostModel& cost, const TileSelection& tiles)
      : num_workers_(num_workers), cost_(cost), tiles_(tiles) {}

  // Throws std::length_error if the requests of all packs are more than int32 can count.
  void plan(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& packing,
            Split& split);

  // How long a request may become under a plan that was made when it had this length.
  static int64_t longest(int32_t seq_len) { return ChunkGrid::boundary_after(seq_len); }

 private:
  // A run of pieces, and how far it has been dealt out as tickets.
  struct Stream {
    int32_t next;
    int32_t end;
    int64_t total;  // cost
    int64_t done;

    bool is_empty() const { return next == end; }
    double progress() const { return static_cast<double>(done) / static_cast<double>(total); }
  };

  void form_packs(const PrefixForest& forest, std::span<const int32_t> seq_lens, Packing& packing);
  // Every pack's tiles by its chunks, chunk after chunk: the tiles of a chunk are read together.
  void cut_packs(const Packing& packing, std::vector<Piece>& pieces);
  // Tickets that shrink with what is left. Those of shared pieces are drawn among the private ones, as KvSplitter has it.
  void deal_tickets(Split& split) const;
  Stream stream(const Split& split, int32_t begin, int32_t end) const;
  // In 1 / kRateUnit.
  int64_t cost(const Piece& piece) const;

  int32_t num_workers_;
  CostModel cost_;
  TileSelection tiles_;
  int32_t num_shared_pieces_ = 0;
};

}  // namespace pat
