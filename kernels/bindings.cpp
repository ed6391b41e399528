// Python module sglang_pat._launch_params: builds the parameter structs that the host passes to the kernels. Addresses
// are integers that Python has already checked. The module needs neither CUDA nor torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "decode_params.h"
#include "launch_facts.h"

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

pat::PlanCapacity plan_capacity(const std::vector<int64_t>& entries) {
  if (entries.size() != pat::kNumPlanSections) {
    throw py::value_error("capacity must have " + std::to_string(pat::kNumPlanSections) +
                          " entries (PlanCapacity), got " + std::to_string(entries.size()));
  }
  return pat::PlanCapacity::from_entries(entries.data());
}

pat::PlanView plan_view(uintptr_t plan, const std::vector<int64_t>& capacity) {
  return pat::PlanView::at(pointer<const int32_t>(plan),
                           pat::PlanLayout::of(plan_capacity(capacity)));
}

// The only argument of a kernel, with the array of argument addresses that cuLaunchKernel takes.
template <typename Params>
struct Argument {
  Params params{};
  void* pointers[1] = {&params};

  Argument() = default;
  Argument(const Argument&) = delete;  // a copy's `pointers` would still point into the original
  Argument& operator=(const Argument&) = delete;

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(pointers); }
};

using GatherArgument = Argument<pat::GatherParams>;
using FillArgument = Argument<pat::FillParams>;
using DecodeArgument = Argument<pat::DecodeParams>;
using WriteArgument = Argument<pat::WriteParams>;

void set_gather(GatherArgument& self, uintptr_t plan, const std::vector<int64_t>& capacity,
                uintptr_t shared_slots, uintptr_t req_to_token, int64_t req_to_token_stride,
                uintptr_t req_pool_indices, bool rows_are_int64) {
  self.params = {.plan = plan_view(plan, capacity),
                 .req_to_token = pointer<const int32_t>(req_to_token),
                 .req_to_token_stride = req_to_token_stride,
                 .req_pool_indices = {pointer<const void>(req_pool_indices), rows_are_int64},
                 .shared_slots = pointer<int32_t>(shared_slots)};
}

// slot_map: an address, or 0 if the layers use the slots of req_to_token.
void set_fill(FillArgument& self, uintptr_t cuts, uintptr_t req_to_token,
              int64_t req_to_token_stride, int32_t table_width, uintptr_t req_pool_indices,
              bool rows_are_int64, uintptr_t seq_lens, bool lengths_are_int64, uintptr_t slot_map,
              bool map_is_int64, int32_t num_requests, int32_t window, bool chunked, uintptr_t rows,
              uintptr_t row_lens) {
  self.params = {.cuts = pointer<const int32_t>(cuts),
                 .req_to_token = pointer<const int32_t>(req_to_token),
                 .req_to_token_stride = req_to_token_stride,
                 .table_width = table_width,
                 .req_pool_indices = {pointer<const void>(req_pool_indices), rows_are_int64},
                 .seq_lens = {pointer<const void>(seq_lens), lengths_are_int64},
                 .slot_map = {pointer<const void>(slot_map), map_is_int64},
                 .num_requests = num_requests,
                 .window = window,
                 .chunked = chunked,
                 .rows = pointer<int32_t>(rows),
                 .row_lens = pointer<int32_t>(row_lens)};
}

void set_buffers(DecodeArgument& self, uintptr_t plan, const std::vector<int64_t>& capacity,
                 uintptr_t shared_slots, uintptr_t partial_out, uintptr_t partial_lse) {
  pat::DecodeParams& params = self.params;
  params.plan = plan_view(plan, capacity);
  params.max_tickets = plan_capacity(capacity).num_tickets;
  params.shared_slots = pointer<const int32_t>(shared_slots);
  params.partial_out = pointer<void>(partial_out);
  params.partial_lse = pointer<float>(partial_lse);
}

void set_step(DecodeArgument& self, uintptr_t req_to_token, int64_t req_to_token_stride,
              int32_t table_width, uintptr_t req_pool_indices, bool rows_are_int64,
              uintptr_t seq_lens, bool lengths_are_int64) {
  pat::DecodeParams& params = self.params;
  params.req_to_token = pointer<const int32_t>(req_to_token);
  params.req_to_token_stride = req_to_token_stride;
  params.table_width = table_width;
  params.req_pool_indices = {pointer<const void>(req_pool_indices), rows_are_int64};
  params.seq_lens = {pointer<const void>(seq_lens), lengths_are_int64};
}

// counters: address of a TicketCounter array. Its first entry holds partials_owner instead of counts. counter: index of
// the entry that counts this launch's tickets.
void set_launch(DecodeArgument& self, uintptr_t counters, int32_t counter, int32_t max_merges) {
  pat::DecodeParams& params = self.params;
  auto* const tickets = pointer<pat::TicketCounter>(counters);
  params.launch_tag = counter;
  params.tickets = tickets + counter;
  params.partials_owner = &tickets[0].num_draws;
  params.max_merges = max_merges;
}

// rope: address of the rope columns of the queries in latent attention, else 0.
void set_queries(DecodeArgument& self, uintptr_t q, uint32_t row_chunks, uint32_t head_chunks,
                 uintptr_t rope, uint32_t rope_row_chunks, uint32_t rope_head_chunks) {
  self.params.q = {pointer<const void>(q), row_chunks, head_chunks};
  self.params.q_rope = {pointer<const void>(rope), rope_row_chunks, rope_head_chunks};
}

void set_layer(DecodeArgument& self, int32_t num_requests, int32_t num_q_heads,
               int32_t num_kv_heads, uintptr_t k_cache, uint32_t k_slot_bytes, uintptr_t v_cache,
               uint32_t v_slot_bytes, uintptr_t out, uintptr_t out_lse, float sm_scale,
               float logit_cap, float k_scale, float v_scale, uintptr_t k_scale_on_device,
               uintptr_t v_scale_on_device, uintptr_t sinks, pat::SinkType sink_type) {
  pat::DecodeParams& params = self.params;
  params.num_requests = num_requests;
  params.num_q_heads = num_q_heads;
  params.num_kv_heads = num_kv_heads;
  params.rows = pat::QueryRows::of(num_q_heads / num_kv_heads);
  params.k_cache = pointer<const void>(k_cache);
  params.k_slot_bytes = k_slot_bytes;
  params.v_cache = pointer<const void>(v_cache);
  params.v_slot_bytes = v_slot_bytes;
  params.out = pointer<void>(out);
  params.out_lse = pointer<float>(out_lse);
  params.logit_scale = pat::LogitScale::of(sm_scale * k_scale, logit_cap);
  params.v_scale = v_scale;
  params.k_scale_on_device = pointer<const float>(k_scale_on_device);
  params.v_scale_on_device = pointer<const float>(v_scale_on_device);
  params.sinks = {pointer<const void>(sinks), sink_type};
}

// keys, values: addresses of the CUtensorMaps of keys and values, or 0 for no tensor map.
void set_maps(DecodeArgument& self, uintptr_t keys, uintptr_t values) {
  pat::DecodeParams& params = self.params;
  params.has_kv_maps = keys != 0 && values != 0;
  if (!params.has_kv_maps) return;
  // Copies bytes, because the maps lie in Python objects, which need not have TensorMap's alignment.
  std::memcpy(&params.kv_maps[0], pointer<const void>(keys), sizeof(pat::TensorMap));
  std::memcpy(&params.kv_maps[1], pointer<const void>(values), sizeof(pat::TensorMap));
}

template <int kIndex>
void set_rows(WriteArgument& self, uintptr_t source, int64_t token_stride, int64_t head_stride,
              uintptr_t cache, int64_t slot_bytes, uintptr_t scale, pat::ScaleUse scale_use) {
  self.params.rows[kIndex] = {.source = pointer<const void>(source),
                              .token_stride = token_stride,
                              .head_stride = head_stride,
                              .cache = pointer<void>(cache),
                              .slot_bytes = slot_bytes,
                              .scale = pointer<const float>(scale),
                              .scale_use = scale_use};
}

void set_slots(WriteArgument& self, uintptr_t slots, bool slots_are_int64, int32_t num_kv_heads,
               int64_t num_slots, uint32_t overflow) {
  pat::WriteParams& params = self.params;
  params.slots = {pointer<const void>(slots), slots_are_int64};
  params.num_kv_heads = num_kv_heads;
  params.num_slots = num_slots;
  params.overflow = overflow;
}

}  // namespace

PYBIND11_MODULE(_launch_params, module) {
  module.doc() = "Parameters of the CUDA kernels, laid out as the kernels read them.";
  module.attr("NUM_LAUNCH_FACTS") = sizeof(pat::LaunchFacts) / sizeof(int32_t);

  py::enum_<pat::SinkType>(module, "SinkType", "Type of attention sinks.")
      .value("FLOAT32", pat::SinkType::kFloat32)
      .value("BFLOAT16", pat::SinkType::kBfloat16)
      .value("FLOAT16", pat::SinkType::kFloat16);

  py::enum_<pat::ScaleUse>(module, "ScaleUse", "What is done with a scale of new keys or values.")
      .value("NONE", pat::ScaleUse::kNone)
      .value("MULTIPLY", pat::ScaleUse::kMultiply)
      .value("DIVIDE", pat::ScaleUse::kDivide);

  py::class_<GatherArgument>(module, "GatherArgument", "The argument of gather_slots_kernel.")
      .def(py::init<>())
      .def_property_readonly("address", &GatherArgument::address)
      .def("set", &set_gather);
  py::class_<FillArgument>(module, "FillArgument", "The argument of fill_rows_kernel.")
      .def(py::init<>())
      .def_property_readonly("address", &FillArgument::address)
      .def("set", &set_fill);
  py::class_<DecodeArgument>(module, "DecodeArgument",
                             "The argument of pack_decode_kernel and merge_partials_kernel.")
      .def(py::init<>())
      .def_property_readonly("address", &DecodeArgument::address)
      .def("set_buffers", &set_buffers)
      .def("set_step", &set_step)
      .def("set_launch", &set_launch)
      .def("set_queries", &set_queries)
      .def("set_layer", &set_layer)
      .def("set_maps", &set_maps);
  py::class_<WriteArgument>(module, "WriteArgument", "The argument of write_kv_kernel.")
      .def(py::init<>())
      .def_property_readonly("address", &WriteArgument::address)
      .def("set_keys", &set_rows<0>)
      .def("set_values", &set_rows<1>)
      .def("set_slots", &set_slots);
}
