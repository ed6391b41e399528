// Python module sglang_pat._scheduler. It takes and returns NumPy arrays of exact dtypes, without silent casts.
// Planning keeps the GIL: it takes tens of microseconds, and getting the GIL back may take longer.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "forest_update.h"
#include "pack_scheduler.h"
#include "plan_format.h"
#include "tile_table.h"
#include "window_cut.h"

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
  if (reinterpret_cast<uintptr_t>(array.data()) % alignof(T) != 0) {
    throw py::value_error(std::string(name) + " must be aligned to " + std::to_string(alignof(T)) +
                          " bytes");
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

// Reads paths by calling a Python function with a list of requests. The function returns a sequence of paths. A path is
// a sequence of tuples (id, parent's id, kv_begin, kv_end, tokens, children), as sglang/tree/radix_paths.py makes them.
class PythonPathReader : public pat::PathReader {
 public:
  // now: the list of the new batch's requests.
  PythonPathReader(const py::list& now, const py::function& read) : now_(now), read_(read) {}

  pat::TreePaths read(std::span<const int32_t> requests) override {
    py::list asked;
    for (const int32_t i : requests) asked.append(now_[i]);  // throws if now_ has become shorter
    const py::sequence answer = read_(asked);
    path_begin_.assign(1, 0);
    node_id_.clear();
    kv_begin_.clear();
    kv_end_.clear();
    branches_.clear();
    for (const py::object path : answer) add_path(path);  // a lazy sequence makes each path here
    return {.paths = {.path_begin = path_begin_,
                      .node_id = node_id_,
                      .kv_begin = kv_begin_,
                      .kv_end = kv_end_},
            .branches = branches_};
  }

 private:
  void add_path(py::handle path) {
    const auto nodes = py::reinterpret_steal<py::object>(
        PySequence_Fast(path.ptr(), "a path must be a sequence of nodes"));
    if (!nodes) throw py::error_already_set();
    const Py_ssize_t num_nodes = PySequence_Fast_GET_SIZE(nodes.ptr());
    // No Python code runs between here and the end of the loop, so the items stay valid.
    PyObject* const* items = PySequence_Fast_ITEMS(nodes.ptr());
    for (Py_ssize_t i = 0; i < num_nodes; ++i) {
      if (!PyTuple_Check(items[i]) || PyTuple_GET_SIZE(items[i]) != 6) refuse(items[i]);
      const int64_t on_path = i + 1 < num_nodes ? 1 : 0;
      node_id_.push_back(integer(items[i], 0));
      kv_begin_.push_back(position(items[i], 2));
      kv_end_.push_back(position(items[i], 3));
      branches_.push_back(integer(items[i], 5) > on_path);
    }
    path_begin_.push_back(static_cast<int32_t>(node_id_.size()));
  }

  [[noreturn]] static void refuse(PyObject* node) {
    const auto held =
        py::reinterpret_borrow<py::object>(node);  // repr() may run code that releases the node
    throw py::type_error("a node must be a tuple of 6 integers, got " +
                         std::string(py::repr(held)));
  }

  static int64_t integer(PyObject* node, Py_ssize_t field) {
    PyObject* value = PyTuple_GET_ITEM(node, field);
    // Refuses objects of other types, whose conversion might run Python code.
    if (!PyLong_Check(value) || PyBool_Check(value)) refuse(node);
    const int64_t number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
    return number;
  }

  static int32_t position(PyObject* node, Py_ssize_t field) {
    const int64_t value = integer(node, field);
    if (!std::in_range<int32_t>(value)) {
      throw py::value_error("positions must fit into int32, got " + std::to_string(value));
    }
    return static_cast<int32_t>(value);
  }

  const py::list& now_;
  const py::function& read_;
  std::vector<int32_t> path_begin_;
  std::vector<int64_t> node_id_;
  std::vector<int32_t> kv_begin_;
  std::vector<int32_t> kv_end_;
  std::vector<char> branches_;  // char, because std::vector<bool> is not an array
};

template <typename T>
Array<T> array_of(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

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

// Returns the lengths of `num_rows` rows as int32. The first `num_requests` rows have the values of `lengths`. Rows
// after them, and rows beyond the end of `lengths`, have 0.
template <typename T>
Array<int32_t> row_lengths(const py::array_t<T>& lengths, int64_t num_requests, int64_t num_rows) {
  if (lengths.ndim() != 1) {
    throw py::value_error("lengths must have 1 dimension, got " + std::to_string(lengths.ndim()));
  }
  if (num_requests < 0 || num_rows < 0) {
    throw py::value_error("num_requests and num_rows must not be negative, got " +
                          std::to_string(num_requests) + " and " + std::to_string(num_rows));
  }
  const auto known = lengths.template unchecked<1>();
  const int64_t num_known = std::min({num_requests, static_cast<int64_t>(known.size()), num_rows});
  Array<int32_t> result(num_rows);
  int32_t* out = result.mutable_data();
  for (int64_t row = 0; row < num_known; ++row) {
    T length;  // memcpy, because SGLang's arrays may be unaligned
    std::memcpy(&length, known.data(row), sizeof(T));
    if (!std::in_range<int32_t>(length)) {
      throw py::value_error("lengths must fit into int32, got " + std::to_string(length));
    }
    out[row] = static_cast<int32_t>(length);
  }
  std::fill(out + num_known, out + num_rows, 0);
  return result;
}

// Returns by how many tokens all requests together have grown since their lengths were `least`. Returns None if a
// request has grown by more than its entry in `room`, has shrunk, or is missing. `lengths` may end with padding.
template <typename T>
std::optional<int64_t> growth_of(const py::array_t<T>& lengths, const Array<int32_t>& least,
                                 const Array<int32_t>& room) {
  if (least.size() != room.size()) {
    throw py::value_error("least and room must have the same size, got " +
                          std::to_string(least.size()) + " and " + std::to_string(room.size()));
  }
  if (lengths.size() < least.size()) return std::nullopt;
  const auto now = lengths.template unchecked<1>();
  const auto before = least.template unchecked<1>();
  const auto most = room.template unchecked<1>();
  int64_t sum = 0;
  for (int64_t i = 0; i < before.size(); ++i) {
    T length;  // memcpy, because SGLang's arrays may be unaligned
    std::memcpy(&length, now.data(i), sizeof(T));
    const int64_t growth = int64_t{length} - before(i);
    if (growth < 0 || growth > most(i)) return std::nullopt;
    sum += growth;
  }
  return sum;
}

std::span<const pat::Request> identities(const py::list& requests) {
  PyObject** items = PySequence_Fast_ITEMS(requests.ptr());
  return {reinterpret_cast<const pat::Request*>(items), requests.size()};
}

// True if both lists hold the same objects, compared by identity.
bool same_objects(const py::list& a, const py::list& b) {
  return std::ranges::equal(identities(a), identities(b));
}

py::object update_forest(pat::PrefixForest& self, const py::list& before, const py::list& now,
                         const py::set& moved, const py::function& read) {
  std::unordered_set<pat::Request> moved_requests;
  for (const py::handle id : moved) moved_requests.insert(PyLong_AsVoidPtr(id.ptr()));
  if (PyErr_Occurred()) throw py::error_already_set();
  PythonPathReader reader(now, read);
  const std::optional<pat::UpdateCounts> counts =
      pat::update_forest(self, identities(before), identities(now), moved_requests, reader);
  if (!counts) return py::none();
  return py::make_tuple(counts->joined, counts->left, counts->moved, counts->read_again);
}

// Converts the value of the keyword argument `name` to Number. If that fails, throws a TypeError with `name`.
template <typename Number>
Number number_of(const std::string& name, py::handle value) {
  try {
    return py::cast<Number>(value);
  } catch (const py::cast_error&) {
    throw py::type_error(name + " must be a number, got " + py::cast<std::string>(py::repr(value)));
  }
}

pat::PlanCapacity capacity_from_kwargs(const py::kwargs& entries) {
  pat::PlanCapacity capacity;
  for (const auto& [key, value] : entries) {
    const auto name = py::cast<std::string>(key);
    int32_t* entry = nullptr;
    std::string allowed;
#define PAT_PLAN_ENTRY(section, Entry, count, extra) \
  if (name == #count) entry = &capacity.count;       \
  allowed += std::string(allowed.empty() ? "" : ", ") + #count;
    PAT_PLAN_SECTIONS(PAT_PLAN_ENTRY)
#undef PAT_PLAN_ENTRY
    if (entry == nullptr) throw py::type_error("a capacity has " + allowed + ", got " + name);
    const auto number = number_of<int64_t>(name, value);
    if (number < 0 || !std::in_range<int32_t>(number)) {
      throw py::value_error(name + " must be 0 to 2147483647, got " + std::to_string(number));
    }
    *entry = static_cast<int32_t>(number);
  }
  return capacity;
}

py::dict capacity_dict(const pat::PlanCapacity& capacity) {
  py::dict result;
#define PAT_PLAN_ENTRY(section, Entry, count, extra) result[#count] = capacity.count;
  PAT_PLAN_SECTIONS(PAT_PLAN_ENTRY)
#undef PAT_PLAN_ENTRY
  return result;
}

// Reads costs, which are in tokens, and rounds them to 1 / kCostUnit.
pat::CostModel cost_model_from_kwargs(const py::kwargs& costs) {
  pat::CostModel model;
  for (const auto& [key, value] : costs) {
    const auto name = py::cast<std::string>(key);
    bool is_known = false;
    std::string allowed;
    pat::CostModel::visit(model, [&](const std::string& cost, int32_t& entry, int32_t least) {
      allowed += (allowed.empty() ? "" : ", ") + cost;
      if (cost != name) return;
      is_known = true;
      const double scaled = std::round(number_of<double>(name, value) * pat::kCostUnit);
      if (!(scaled >= least && scaled <= pat::kLargestCost)) {  // negated, to refuse NaN too
        throw py::value_error("cost " + name + " must be " + std::to_string(least) + " / 64 to " +
                              std::to_string(pat::kLargestCost / pat::kCostUnit) + ", got " +
                              py::cast<std::string>(py::repr(value)));
      }
      entry = static_cast<int32_t>(scaled);
    });
    if (!is_known) throw py::type_error("a cost model has " + allowed + ", got " + name);
  }
  return model;
}

py::dict cost_dict(const pat::CostModel& model) {
  py::dict result;
  pat::CostModel::visit(model, [&](const std::string& name, int32_t value, int32_t) {
    result[name.c_str()] = static_cast<double>(value) / pat::kCostUnit;
  });
  return result;
}

py::dict layout_dict(const pat::PlanLayout& layout) {
  py::dict result;
  result["header"] = layout.header;
#define PAT_PLAN_OFFSET(section, Entry, count, extra) result[#section] = layout.section;
  PAT_PLAN_SECTIONS(PAT_PLAN_OFFSET)
#undef PAT_PLAN_OFFSET
  result["size"] = layout.size;
  return result;
}

// Returns for each section its name, the header field that counts its entries, how many entries it has beyond that
// count, and how many int32 values an entry has.
py::tuple plan_sections() {
  py::list sections;
#define PAT_PLAN_SECTION(section, Entry, count, extra) \
  sections.append(py::make_tuple(#section, #count, extra, sizeof(*pat::PlanView{}.section) / 4));
  PAT_PLAN_SECTIONS(PAT_PLAN_SECTION)
#undef PAT_PLAN_SECTION
  return py::tuple(sections);
}

py::tuple shipped_tuple(std::span<const pat::ShippedCosts> shipped) {
  py::list all;
  for (const pat::ShippedCosts& costs : shipped) {
    all.append(py::make_tuple(std::string(costs.gpu), costs.is_measured, costs.cost));
  }
  return py::tuple(all);
}

py::tuple tile_tuple(const pat::TileTable& table) {
  py::list tiles;
  for (const pat::TileConfig& tile : table) {
    tiles.append(py::make_tuple(tile.block_q, tile.block_kv, tile.num_warps));
  }
  return py::tuple(tiles);
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
  m.attr("READ_ONCE") = pat::KvSegment::kReadOnce;
  m.attr("DIRECT_STORE") = pat::kDirectStore;
  m.attr("MAX_PACKS_PER_REQUEST") = pat::kMaxPacksPerRequest;
  m.attr("MAX_GROUP_SIZE") = pat::kTileTable.max_group_size;
  m.attr("MAX_LATENT_GROUP_SIZE") = pat::kLatentTileTable.max_group_size;
  const py::tuple tiles = tile_tuple(pat::kTileTable);
  const py::tuple latent_tiles = tile_tuple(pat::kLatentTileTable);
  m.attr("TILE_TABLE") = tiles;
  m.attr("LATENT_TILE_TABLE") = latent_tiles;

  m.attr("PLAN_SECTIONS") = plan_sections();

  py::class_<pat::PlanCapacity>(m, "PlanCapacity")
      .def(py::init(&capacity_from_kwargs))
      .def("entries", &capacity_dict)
      .def("layout",
           [](const pat::PlanCapacity& self) { return layout_dict(pat::PlanLayout::of(self)); });

  m.def(
      "invariant_plan_bounds",
      [](int32_t max_requests, int32_t max_seq_len) {
        const pat::PlanBounds bounds = pat::invariant_plan_bounds(max_requests, max_seq_len);
        return py::make_tuple(bounds.capacity, bounds.num_partials);
      },
      py::arg("max_requests"), py::arg("max_seq_len"));
  m.def("num_chunks", &pat::ChunkGrid::num_chunks, py::arg("length"));

  m.def(
      "plan_bounds",
      [](int32_t max_requests, int32_t num_workers, int32_t group_size, int32_t max_block_q,
         bool latent) {
        const pat::PlanBounds bounds = pat::plan_bounds(
            max_requests, num_workers, {pat::tiles_of(latent), group_size, max_block_q});
        return py::make_tuple(bounds.capacity, bounds.num_partials);
      },
      py::arg("max_requests"), py::arg("num_workers"), py::arg("group_size"),
      py::arg("max_block_q"), py::kw_only(), py::arg("latent") = false);

  py::class_<pat::CostModel>(m, "CostModel")
      .def(py::init(&cost_model_from_kwargs))
      .def("values", &cost_dict)
      .def("__eq__",
           [](const pat::CostModel& self, const pat::CostModel& other) { return self == other; });
  m.attr("SHIPPED_COSTS") = shipped_tuple(pat::kShippedCosts);
  m.attr("SHIPPED_LATENT_COSTS") = shipped_tuple(pat::kShippedLatentCosts);

  m.def("row_lengths", &row_lengths<int64_t>, py::arg("lengths").noconvert(),
        py::arg("num_requests"), py::arg("num_rows"));
  m.def("row_lengths", &row_lengths<int32_t>, py::arg("lengths").noconvert(),
        py::arg("num_requests"), py::arg("num_rows"));
  m.def("growth_of", &growth_of<int64_t>, py::arg("lengths").noconvert(), py::arg("least"),
        py::arg("room"));
  m.def("growth_of", &growth_of<int32_t>, py::arg("lengths").noconvert(), py::arg("least"),
        py::arg("room"));
  m.def("same_objects", &same_objects, py::arg("a"), py::arg("b"));

  py::class_<pat::PrefixForest>(m, "PrefixForest")
      .def(py::init<>())
      .def("update", &update_forest, py::arg("before"), py::arg("now"), py::arg("moved"),
           py::arg("read"))
      .def("paths", &forest_paths)
      .def_property_readonly("num_kept", &pat::PrefixForest::num_kept)
      .def("__len__", &pat::PrefixForest::num_requests);

  py::class_<pat::PackScheduler>(m, "PackScheduler")
      .def(
          py::init([](int32_t group_size, int32_t num_workers, int32_t max_block_q,
                      const std::string& policy, int32_t min_item_tokens, int32_t growth_tokens,
                      const pat::CostModel& cost, bool batch_invariant, bool one_tile, bool by_time,
                      bool latent, int32_t window, int32_t slack, int32_t ahead, bool chunked) {
            return pat::PackScheduler({.group_size = group_size,
                                       .num_workers = num_workers,
                                       .max_block_q = max_block_q,
                                       .policy = pat::policy_from_name(policy),
                                       .min_item_tokens = min_item_tokens,
                                       .growth_tokens = growth_tokens,
                                       .cost = cost,
                                       .batch_invariant = batch_invariant,
                                       .one_tile = one_tile,
                                       .by_time = by_time,
                                       .latent = latent,
                                       .window = {window, slack, ahead, chunked}});
          }),
          py::kw_only(), py::arg("group_size"), py::arg("num_workers"), py::arg("max_block_q"),
          py::arg("policy"), py::arg("min_item_tokens"), py::arg("growth_tokens"),
          py::arg("cost") = pat::CostModel{}, py::arg("batch_invariant") = false,
          py::arg("one_tile") = false, py::arg("by_time") = true, py::arg("latent") = false,
          py::arg("window") = 0, py::arg("slack") = 0, py::arg("ahead") = 0,
          py::arg("chunked") = false)
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
           [](const pat::PackScheduler& self) {
             return pat::PlanCapacity::of(self.last_plan().header());
           })
      .def(
          "write",
          [](const pat::PackScheduler& self, const pat::PlanCapacity& capacity,
             int64_t num_partials, int64_t num_shared_slots, int64_t num_cuts,
             Array<int32_t> out) -> py::object {
            view(out, "out");
            const pat::DecodePlan& plan = self.last_plan();
            const std::span<const int32_t> cuts = self.last_cuts();
            if (std::cmp_greater(cuts.size(), num_cuts)) return py::none();
            const std::span buffer(out.mutable_data(), static_cast<size_t>(out.size()));
            const int64_t plan_size = pat::PlanLayout::of(capacity).size;
            if (std::cmp_greater(plan_size + num_cuts, buffer.size())) {
              throw std::length_error("plan buffer too small: plan and cuts need " +
                                      std::to_string(plan_size + num_cuts) +
                                      " int32, the buffer has " + std::to_string(buffer.size()));
            }
            if (!plan.write(capacity, num_partials, num_shared_slots, buffer)) return py::none();
            std::ranges::copy(cuts, buffer.begin() + plan_size);
            return kv_tokens_tuple(plan.kv_tokens());
          },
          py::arg("capacity"), py::arg("num_partials"), py::arg("num_shared_slots"),
          py::arg("num_cuts"), py::arg("out").noconvert())
      .def_property_readonly("num_cuts",
                             [](const pat::PackScheduler& self) { return self.last_cuts().size(); })
      .def_property_readonly(
          "num_partials",
          [](const pat::PackScheduler& self) { return self.last_plan().header().num_partials; })
      .def_property_readonly(
          "num_shared_slots",
          [](const pat::PackScheduler& self) { return self.last_plan().header().num_shared_slots; })
      .def_property_readonly("tile_table",
                             [tiles, latent_tiles](const pat::PackScheduler& self) {
                               return &self.tile_table() == &pat::kTileTable ? tiles : latent_tiles;
                             })
      .def_property_readonly("kv_tokens",
                             [](const pat::PackScheduler& self) {
                               return kv_tokens_tuple(self.last_plan().kv_tokens());
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
