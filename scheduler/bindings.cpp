// Python module sglang_pat._scheduler. NumPy arrays in and out, dtypes exact (no silent casts). The GIL is
// kept: planning takes tens of microseconds, and getting the GIL back may take longer than that.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pack_scheduler.h"
#include "plan_format.h"
#include "tile_table.h"

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

pat::PathsView paths_view(const Array<int32_t>& path_begin, const Array<int64_t>& node_id,
                          const Array<int32_t>& kv_begin, const Array<int32_t>& kv_end) {
  return {.path_begin = view(path_begin, "path_begin"),
          .node_id = view(node_id, "node_id"),
          .kv_begin = view(kv_begin, "kv_begin"),
          .kv_end = view(kv_end, "kv_end")};
}

void plan(pat::PackScheduler& self, const Array<int32_t>& path_begin, const Array<int64_t>& node_id,
          const Array<int32_t>& kv_begin, const Array<int32_t>& kv_end,
          const Array<int32_t>& seq_lens) {
  self.plan(paths_view(path_begin, node_id, kv_begin, kv_end), view(seq_lens, "seq_lens"));
}

// Paths as sglang/radix.py reads them: each a sequence of (id, parent's id, kv_begin, kv_end, tokens, children).
class PathsFromTuples {
 public:
  explicit PathsFromTuples(const py::sequence& paths) {
    path_begin_.push_back(0);
    for (const py::handle path : paths) {
      const auto nodes = py::reinterpret_steal<py::object>(
          PySequence_Fast(path.ptr(), "a path must be a sequence of nodes"));
      if (!nodes) throw py::error_already_set();
      const Py_ssize_t num_nodes = PySequence_Fast_GET_SIZE(nodes.ptr());
      PyObject* const* items = PySequence_Fast_ITEMS(nodes.ptr());
      bool goes_on = false;
      for (Py_ssize_t i = 0; i < num_nodes; ++i) {
        if (!PyTuple_Check(items[i]) || PyTuple_GET_SIZE(items[i]) != 6) {
          throw py::type_error("a node must be a tuple of 6 integers, got " +
                               std::string(py::repr(items[i])));
        }
        node_id_.push_back(integer(items[i], 0));
        kv_begin_.push_back(position(items[i], 2));
        kv_end_.push_back(position(items[i], 3));
        goes_on = integer(items[i], 5) > 0;
      }
      path_begin_.push_back(static_cast<int32_t>(node_id_.size()));
      goes_on_.push_back(goes_on);
    }
  }

  pat::PathsView paths() const {
    return {
        .path_begin = path_begin_, .node_id = node_id_, .kv_begin = kv_begin_, .kv_end = kv_end_};
  }
  std::span<const char> goes_on() const { return goes_on_; }

 private:
  static int64_t integer(PyObject* node, Py_ssize_t field) {
    const int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(node, field));
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  static int32_t position(PyObject* node, Py_ssize_t field) {
    const int64_t value = integer(node, field);
    if (!std::in_range<int32_t>(value)) {
      throw py::value_error("positions must fit into int32, got " + std::to_string(value));
    }
    return static_cast<int32_t>(value);
  }

  std::vector<int32_t> path_begin_;
  std::vector<int64_t> node_id_;
  std::vector<int32_t> kv_begin_;
  std::vector<int32_t> kv_end_;
  std::vector<char> goes_on_;  // not bool, of which a vector is no array
};

py::list forest_paths(const pat::PrefixForest& self) {
  py::list paths;
  for (int32_t request = 0; request < self.num_requests(); ++request) {
    py::list path;
    for (const auto& node : self.path(request)) {
      path.append(py::make_tuple(node.id, node.kv_begin, node.kv_end));
    }
    paths.append(path);
  }
  return paths;
}

// int32 lengths of `num_rows` rows: those of the first `num_requests`, as far as they are known, and 0.
template <typename T>
Array<int32_t> row_lengths(const py::array_t<T>& lengths, int64_t num_requests, int64_t num_rows) {
  if (lengths.ndim() != 1) {
    throw py::value_error("lengths must have 1 dimension, got " + std::to_string(lengths.ndim()));
  }
  const auto known = lengths.template unchecked<1>();
  const int64_t num_known = std::clamp<int64_t>(num_requests, 0, std::min(known.size(), num_rows));
  Array<int32_t> result(num_rows);
  int32_t* out = result.mutable_data();
  for (int64_t row = 0; row < num_known; ++row) {
    if (!std::in_range<int32_t>(known(row))) {
      throw py::value_error("lengths must fit into int32, got " + std::to_string(known(row)));
    }
    out[row] = static_cast<int32_t>(known(row));
  }
  std::fill(out + num_known, out + num_rows, 0);
  return result;
}

// By identity, not equality.
bool same_objects(const py::list& a, const py::list& b) {
  return a.size() == b.size() &&
         std::equal(PySequence_Fast_ITEMS(a.ptr()), PySequence_Fast_ITEMS(a.ptr()) + a.size(),
                    PySequence_Fast_ITEMS(b.ptr()));
}

// Where the requests of a batch stand in the one before, by identity and not equality.
struct BatchChange {
  // Per request of the batch: its place in the one before if its path is still right, else -1.
  std::vector<int32_t> kept;
  int32_t num_joined = 0;
  int32_t num_left = 0;
  int32_t num_moved = 0;  // of those that stayed: their ids are in `moved`

  // Batches lose members anywhere and gain them at the end, so what is next in one is nearly always next in the
  // other.
  BatchChange(const py::list& before, const py::list& now, const py::set& moved) {
    std::unordered_set<const void*> moved_requests;
    for (const py::handle id : moved) moved_requests.insert(PyLong_AsVoidPtr(id.ptr()));
    if (PyErr_Occurred()) throw py::error_already_set();
    const std::span old(PySequence_Fast_ITEMS(before.ptr()), before.size());
    std::vector<size_t> passed;  // over: they have left, or come later in `now`
    size_t next = 0;
    kept.reserve(now.size());
    for (const py::handle request : now) {
      size_t found = next;
      while (found < old.size() && old[found] != request.ptr()) ++found;
      if (found < old.size()) {
        for (; next < found; ++next) passed.push_back(next);
        ++next;
      } else {
        const auto earlier = std::find_if(passed.begin(), passed.end(),
                                          [&](size_t p) { return old[p] == request.ptr(); });
        if (earlier != passed.end()) {
          found = *earlier;
          passed.erase(earlier);
        }
      }
      const bool joins = found == old.size();
      const bool moves = !joins && moved_requests.contains(request.ptr());
      num_joined += joins;
      num_moved += moves;
      kept.push_back(joins || moves ? -1 : static_cast<int32_t>(found));
    }
    num_left = static_cast<int32_t>(before.size()) + num_joined - static_cast<int32_t>(now.size());
  }
};

// Goes from one batch to the next. Requests are objects; the paths of those that joined or moved are read, a list
// at a time. What was read may show that the tree has split nodes of kept paths: these are read again, and because
// that may show more splits, the third time all are. None if the batches are alike; else how many requests joined,
// left, moved, and were read again.
py::object update_forest(pat::PrefixForest& self, const py::list& before, const py::list& now,
                         const py::set& moved, const py::function& read) {
  BatchChange change(before, now, moved);
  std::vector<int32_t> to_read;
  for (size_t i = 0; i < change.kept.size(); ++i) {
    if (change.kept[i] < 0) to_read.push_back(static_cast<int32_t>(i));
  }
  const bool is_current = before.size() == static_cast<size_t>(self.num_requests());
  if (to_read.empty() && is_current && same_objects(before, now)) return py::none();
  size_t num_split = 0;
  for (int attempt = 0;; ++attempt) {
    py::list requests;
    for (const int32_t i : to_read) requests.append(now[i]);
    py::sequence answer = requests;
    if (!requests.empty()) answer = read(requests);
    const PathsFromTuples paths(answer);
    std::vector<int32_t> outdated;
    self.update(change.kept, paths.paths(), paths.goes_on(), outdated);
    if (outdated.empty()) break;
    std::iota(change.kept.begin(), change.kept.end(), 0);
    to_read = attempt == 0 ? outdated : change.kept;
    for (const int32_t i : to_read) change.kept[i] = -1;
    num_split += to_read.size();
  }
  return py::make_tuple(change.num_joined, change.num_left, change.num_moved, num_split);
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

py::tuple kv_tokens_tuple(const pat::KvTokens& tokens) {
  return py::make_tuple(tokens.query_centric, tokens.planned, tokens.lower_bound);
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

  m.def("row_lengths", &row_lengths<int64_t>, py::arg("lengths").noconvert(),
        py::arg("num_requests"), py::arg("num_rows"));
  m.def("row_lengths", &row_lengths<int32_t>, py::arg("lengths").noconvert(),
        py::arg("num_requests"), py::arg("num_rows"));
  m.def("same_objects", &same_objects, py::arg("a"), py::arg("b"));

  py::class_<pat::PrefixForest>(m, "PrefixForest")
      .def(py::init<>())
      .def("update", &update_forest, py::arg("before"), py::arg("now"), py::arg("moved"),
           py::arg("read"))
      .def("paths", &forest_paths)
      .def_property_readonly("num_kept", &pat::PrefixForest::num_kept)
      .def("__len__", &pat::PrefixForest::num_requests);

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
          "plan",
          [](pat::PackScheduler& self, pat::PrefixForest& forest, const Array<int32_t>& seq_lens) {
            self.plan(forest, view(seq_lens, "seq_lens"));
          },
          py::arg("forest"), py::arg("seq_lens").noconvert())
      .def(
          "check_lengths",
          [](const pat::PackScheduler& self, const Array<int32_t>& seq_lens) {
            const pat::LengthCheck check = self.check_lengths(view(seq_lens, "seq_lens"));
            return py::make_tuple(check.served, check.total, check.longest);
          },
          py::arg("seq_lens").noconvert())
      .def(
          "steps_left",
          [](const pat::PackScheduler& self, const Array<int32_t>& seq_lens, int32_t longest) {
            return self.steps_left(view(seq_lens, "seq_lens"), longest);
          },
          py::arg("seq_lens").noconvert(), py::arg("longest"))
      .def("required_capacity",
           [](const pat::PackScheduler& self) { return self.last_plan().required_capacity(); })
      .def(
          "write",
          [](const pat::PackScheduler& self, const pat::PlanCapacity& capacity,
             int64_t num_partials, int64_t num_shared_slots, Array<int32_t> out) -> py::object {
            view(out, "out");
            const pat::DecodePlan& plan = self.last_plan();
            const std::span buffer(out.mutable_data(), static_cast<size_t>(out.size()));
            if (!plan.write(capacity, num_partials, num_shared_slots, buffer)) return py::none();
            return kv_tokens_tuple(plan.kv_tokens());
          },
          py::arg("capacity"), py::arg("num_partials"), py::arg("num_shared_slots"),
          py::arg("out").noconvert())
      .def_property_readonly(
          "num_partials",
          [](const pat::PackScheduler& self) { return self.last_plan().header().num_partials; })
      .def_property_readonly(
          "num_shared_slots",
          [](const pat::PackScheduler& self) { return self.last_plan().header().num_shared_slots; })
      .def_property_readonly("kv_tokens",
                             [](const pat::PackScheduler& self) {
                               return kv_tokens_tuple(self.last_plan().kv_tokens());
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
