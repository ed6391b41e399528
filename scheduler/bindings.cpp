// Python module sglang_pat._scheduler. NumPy arrays in and out, dtypes exact (no silent casts), GIL released.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <span>
#include <string>

#include "pack_scheduler.h"
#include "pat/plan_format.h"
#include "pat/tile_table.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const Array<T>& array, const char* name) {
  if (array.ndim() != 1) {
    throw py::value_error(std::string(name) + " must have 1 dimension, got " +
                          std::to_string(array.ndim()));
  }
  return {array.data(), static_cast<size_t>(array.size())};
}

void plan(pat::PackScheduler& self, const Array<int32_t>& path_begin, const Array<int64_t>& node_id,
          const Array<int32_t>& kv_begin, const Array<int32_t>& kv_end,
          const Array<int32_t>& seq_lens) {
  const pat::PathsView paths{.path_begin = view(path_begin, "path_begin"),
                             .node_id = view(node_id, "node_id"),
                             .kv_begin = view(kv_begin, "kv_begin"),
                             .kv_end = view(kv_end, "kv_end")};
  const auto lens = view(seq_lens, "seq_lens");
  py::gil_scoped_release release;
  self.plan(paths, lens);
}

py::dict layout_dict(const pat::PlanLayout& layout) {
  py::dict result;
  result["header"] = layout.header;
  result["ticket_begin"] = layout.ticket_begin;
  result["work_items"] = layout.work_items;
  result["item_requests"] = layout.item_requests;
  result["gather_spans"] = layout.gather_spans;
  result["merges"] = layout.merges;
  result["size"] = layout.size;
  return result;
}

}  // namespace

PYBIND11_MODULE(_scheduler, m) {
  m.doc() = "C++ pack scheduler: radix-tree paths in, decode plan out.";

  m.attr("PLAN_MAGIC") = pat::kPlanMagic;
  m.attr("PLAN_VERSION") = pat::kPlanVersion;
  m.attr("OPEN_END") = pat::kOpenEnd;
  m.attr("SHARED_KV") = pat::kSharedKv;
  m.attr("DIRECT_STORE") = pat::kDirectStore;
  m.attr("MAX_GROUP_SIZE") = pat::kMaxGroupSize;
  py::list tiles;
  for (const pat::TileConfig& tile : pat::kTileTable) {
    tiles.append(py::make_tuple(tile.block_q, tile.block_kv, tile.num_warps));
  }
  m.attr("TILE_TABLE") = py::tuple(tiles);

  py::class_<pat::PlanCapacity>(m, "PlanCapacity")
      .def(py::init([](int32_t tickets, int32_t work_items, int32_t item_requests,
                       int32_t gather_spans, int32_t merges) {
             return pat::PlanCapacity{.num_tickets = tickets,
                                      .num_work_items = work_items,
                                      .num_item_requests = item_requests,
                                      .num_gather_spans = gather_spans,
                                      .num_merges = merges};
           }),
           py::kw_only(), py::arg("num_tickets") = 0, py::arg("num_work_items") = 0,
           py::arg("num_item_requests") = 0, py::arg("num_gather_spans") = 0,
           py::arg("num_merges") = 0)
      .def_readonly("num_tickets", &pat::PlanCapacity::num_tickets)
      .def_readonly("num_work_items", &pat::PlanCapacity::num_work_items)
      .def_readonly("num_item_requests", &pat::PlanCapacity::num_item_requests)
      .def_readonly("num_gather_spans", &pat::PlanCapacity::num_gather_spans)
      .def_readonly("num_merges", &pat::PlanCapacity::num_merges)
      .def("layout",
           [](const pat::PlanCapacity& self) { return layout_dict(pat::PlanLayout::of(self)); });

  py::class_<pat::CostModel>(m, "CostModel")
      .def(py::init([](int32_t partial_row, int32_t piece, int32_t query_row, int32_t shortest,
                       int32_t rows_at_ridge) {
             return pat::CostModel{.partial_row = partial_row,
                                   .piece = piece,
                                   .query_row = query_row,
                                   .shortest = shortest,
                                   .rows_at_ridge = rows_at_ridge};
           }),
           py::kw_only(), py::arg("partial_row") = pat::CostModel{}.partial_row,
           py::arg("piece") = pat::CostModel{}.piece,
           py::arg("query_row") = pat::CostModel{}.query_row,
           py::arg("shortest") = pat::CostModel{}.shortest,
           py::arg("rows_at_ridge") = pat::CostModel{}.rows_at_ridge);

  py::class_<pat::PackScheduler>(m, "PackScheduler")
      .def(py::init([](int32_t group_size, int32_t num_workers, int32_t max_block_q,
                       const std::string& policy, int32_t min_piece_tokens, int32_t growth_tokens,
                       const pat::CostModel& cost) {
             return pat::PackScheduler({.group_size = group_size,
                                        .num_workers = num_workers,
                                        .max_block_q = max_block_q,
                                        .policy = pat::policy_from_name(policy),
                                        .min_piece_tokens = min_piece_tokens,
                                        .growth_tokens = growth_tokens,
                                        .cost = cost});
           }),
           py::kw_only(), py::arg("group_size"), py::arg("num_workers"), py::arg("max_block_q"),
           py::arg("policy"), py::arg("min_piece_tokens"), py::arg("growth_tokens"),
           py::arg("cost") = pat::CostModel{})
      .def("plan", &plan, py::arg("path_begin").noconvert(), py::arg("node_id").noconvert(),
           py::arg("kv_begin").noconvert(), py::arg("kv_end").noconvert(),
           py::arg("seq_lens").noconvert())
      .def(
          "check_lengths",
          [](const pat::PackScheduler& self, const Array<int32_t>& seq_lens) {
            const pat::LengthCheck check = self.check_lengths(view(seq_lens, "seq_lens"));
            return py::make_tuple(check.served, check.total, check.longest);
          },
          py::arg("seq_lens").noconvert())
      .def("required_capacity",
           [](const pat::PackScheduler& self) { return self.last_plan().required_capacity(); })
      .def(
          "write",
          [](const pat::PackScheduler& self, const pat::PlanCapacity& capacity,
             Array<int32_t> out) {
            view(out, "out");
            self.last_plan().write(capacity, {out.mutable_data(), static_cast<size_t>(out.size())});
          },
          py::arg("capacity"), py::arg("out").noconvert())
      .def_property_readonly(
          "num_partials",
          [](const pat::PackScheduler& self) { return self.last_plan().header().num_partials; })
      .def_property_readonly(
          "num_shared_slots",
          [](const pat::PackScheduler& self) { return self.last_plan().header().num_shared_slots; })
      .def_property_readonly("kv_tokens",
                             [](const pat::PackScheduler& self) {
                               const pat::KvTokens& tokens = self.last_plan().kv_tokens();
                               return py::make_tuple(tokens.query_centric, tokens.planned,
                                                     tokens.lower_bound);
                             })
      .def_property_readonly("summary",
                             [](const pat::PackScheduler& self) {
                               const pat::PlanSummary summary = self.summarize();
                               py::dict result;
                               result["packs"] = summary.packs;
                               result["tiles"] = summary.tiles;
                               result["work_items"] = summary.work_items;
                               result["partials"] = summary.partials;
                               result["partials_before_split"] = summary.partials_before_split;
                               result["tail"] = summary.tail;
                               result["requests_per_pack"] = summary.requests_per_pack;
                               result["tiles_by_body"] = summary.tiles_by_body;
                               return result;
                             })
      .def_property_readonly("stage_times_ns", [](const pat::PackScheduler& self) {
        py::dict times;
        times["forest"] = self.stage_times().forest;
        times["packing"] = self.stage_times().packing;
        times["split"] = self.stage_times().split;
        times["assembly"] = self.stage_times().assembly;
        return times;
      });
}
