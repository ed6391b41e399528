// The kernels as torch operators: the only file that knows torch. Checks every tensor, then launches on torch's
// current stream. Nothing is launched when a check fails.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "contract/tile_table.h"
#include "launch.h"

#if !defined(PAT_NAMESPACE) || !defined(PAT_SCALAR_TYPE) || !defined(PAT_HEAD_DIM) || \
    !defined(PAT_V_HEAD_DIM)
#error "PAT_NAMESPACE, PAT_SCALAR_TYPE (Half or BFloat16), PAT_HEAD_DIM, PAT_V_HEAD_DIM are missing"
#endif

namespace pat {
namespace {

constexpr at::ScalarType kElement = at::ScalarType::PAT_SCALAR_TYPE;
constexpr int64_t kHeadDim = PAT_HEAD_DIM;
constexpr int64_t kValueDim = PAT_V_HEAD_DIM;
constexpr int64_t kAlignment = 16;  // bytes per asynchronous copy

void check_launch(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, " failed to launch: ", cudaGetErrorString(error));
}

void check_device(const at::Tensor& tensor, const char* name, const at::Tensor& plan) {
  TORCH_CHECK_VALUE(tensor.device() == plan.device(), name, " must be on ", plan.device(),
                    " like the plan, got ", tensor.device());
}

void check_type(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t dims) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == type && tensor.dim() == dims, name, " must be ", dims,
                    "-D ", type, ", got ", tensor.dim(), "-D ", tensor.scalar_type());
}

void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous, got sizes ", tensor.sizes(),
                    " and strides ", tensor.strides());
}

void check_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " must have shape ", shape, ", got ",
                    tensor.sizes());
}

// [rows, heads, columns] whose rows may lie apart, but whose heads and columns are dense.
void check_rows(const at::Tensor& tensor, const char* name, int64_t heads, int64_t columns) {
  check_type(tensor, name, kElement, 3);
  TORCH_CHECK_VALUE(tensor.size(1) == heads && tensor.size(2) == columns, name,
                    " must have shape [n, ", heads, ", ", columns, "], got ", tensor.sizes());
  const bool dense = tensor.stride(2) == 1 && tensor.stride(1) == columns;
  TORCH_CHECK_VALUE(dense, name, " must have dense heads, got strides ", tensor.strides());
  const int64_t row_bytes = tensor.stride(0) * tensor.element_size();
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  TORCH_CHECK_VALUE(address % kAlignment == 0 && row_bytes % kAlignment == 0, name,
                    " must be aligned to ", kAlignment, " bytes, got address ", address,
                    " and row stride ", row_bytes, " bytes");
}

uint32_t slot_bytes(const at::Tensor& cache, const char* name) {
  const int64_t bytes = cache.stride(0) * cache.element_size();
  TORCH_CHECK_VALUE(bytes > 0 && bytes <= UINT32_MAX, name, " must have a slot stride of at most ",
                    UINT32_MAX, " bytes, got ", bytes);
  return static_cast<uint32_t>(bytes);
}

// Chunks between requests; every row of q must have a 31-bit number of chunks before it.
uint32_t query_stride_chunks(const at::Tensor& q) {
  const int64_t chunks = q.stride(0) * q.element_size() / kAlignment;
  TORCH_CHECK_VALUE(q.size(0) * chunks <= INT32_MAX, "q must span at most ", INT32_MAX, " times ",
                    kAlignment, " bytes, got sizes ", q.sizes(), " and strides ", q.strides());
  return static_cast<uint32_t>(chunks);
}

IndexArray index_array(const at::Tensor& tensor, const char* name, const at::Tensor& plan) {
  check_device(tensor, name, plan);
  const bool is_int64 = tensor.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE((is_int64 || tensor.scalar_type() == at::kInt) && tensor.dim() == 1, name,
                    " must be 1-D int32 or int64, got ", tensor.dim(), "-D ", tensor.scalar_type());
  check_contiguous(tensor, name);
  return {.data = tensor.const_data_ptr(), .is_int64 = is_int64};
}

void check_req_to_token(const at::Tensor& tensor, const at::Tensor& plan) {
  check_device(tensor, "req_to_token", plan);
  check_type(tensor, "req_to_token", at::kInt, 2);
  TORCH_CHECK_VALUE(tensor.stride(1) == 1, "req_to_token must have dense rows, got strides ",
                    tensor.strides());
}

PlanCapacity plan_capacity(at::IntArrayRef entries) {
  TORCH_CHECK_VALUE(entries.size() == kNumPlanSections, "capacity must have ", kNumPlanSections,
                    " entries (PlanCapacity), got ", entries.size());
  for (const int64_t entry : entries) {
    TORCH_CHECK_VALUE(entry >= 0 && entry <= INT32_MAX, "capacity must be 0 to ", INT32_MAX,
                      " entries per section, got ", entries);
  }
  return PlanCapacity::from_entries(entries.data());
}

PlanView plan_view(const at::Tensor& plan, const PlanCapacity& capacity) {
  TORCH_CHECK_VALUE(plan.is_cuda(), "plan must be on a CUDA device, got ", plan.device());
  check_type(plan, "plan", at::kInt, 1);
  check_contiguous(plan, "plan");
  const PlanLayout layout = PlanLayout::of(capacity);
  TORCH_CHECK_VALUE(plan.size(0) >= layout.size, "plan must hold ", layout.size,
                    " entries for its capacity, got ", plan.size(0));
  const int32_t* base = plan.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(base) % kAlignment == 0, "plan must be aligned to ",
                    kAlignment, " bytes, got address ", reinterpret_cast<uintptr_t>(base));
  return PlanView::at(base, layout);
}

// What the host knows of the plan on the device: an int64 tensor on the CPU, written by load_plan.
struct LoadedPlan {
  int64_t stream;  // that used the plan's buffers last, or kNoStream
  int64_t num_requests;
  int64_t group_size;
  int64_t num_merges;
};
constexpr int64_t kNoStream = -1;  // 0 is the default stream

LoadedPlan& loaded_plan(at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), "loaded must be on the CPU, got ", tensor.device());
  check_type(tensor, "loaded", at::kLong, 1);
  check_shape(tensor, "loaded", {sizeof(LoadedPlan) / sizeof(int64_t)});
  check_contiguous(tensor, "loaded");
  return *reinterpret_cast<LoadedPlan*>(tensor.mutable_data_ptr<int64_t>());
}

// Makes `stream` wait for what the last stream has done with the buffers so far. Not in a graph, which is replayed
// on streams unknown here.
void take_over(LoadedPlan& loaded, const c10::cuda::CUDAStream& stream,
               std::initializer_list<const at::Tensor*> buffers) {
  const auto handle = reinterpret_cast<int64_t>(stream.stream());
  if (loaded.stream == handle) return;
  if (loaded.stream != kNoStream) {
    cudaEvent_t event = nullptr;
    check_launch(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    cudaError_t error = cudaEventRecord(event, reinterpret_cast<cudaStream_t>(loaded.stream));
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, event, 0);
    cudaEventDestroy(event);  // once it has happened
    check_launch(error, "waiting for the stream of the plan");
    // So that their memory, should they be freed, is not handed out again before this stream is done with it.
    for (const at::Tensor* buffer : buffers) buffer->record_stream(stream);
  }
  loaded.stream = handle;
}

// Copies the plan from `host`, records the cudaEvent_t `copied` behind that, and gathers the plan's shared slots.
void load_plan(const at::Tensor& host, int64_t copied, at::Tensor& plan, at::IntArrayRef capacity,
               const at::Tensor& req_to_token, const at::Tensor& req_pool_indices,
               at::Tensor& shared_slots, at::Tensor& loaded_tensor) {
  check_req_to_token(req_to_token, plan);
  check_type(shared_slots, "shared_slots", at::kInt, 1);
  check_contiguous(shared_slots, "shared_slots");
  check_device(shared_slots, "shared_slots", plan);
  const GatherParams params{
      .plan = plan_view(plan, plan_capacity(capacity)),
      .req_to_token = req_to_token.const_data_ptr<int32_t>(),
      .req_to_token_stride = req_to_token.stride(0),
      .req_pool_indices = index_array(req_pool_indices, "req_pool_indices", plan),
      .shared_slots = shared_slots.mutable_data_ptr<int32_t>()};
  TORCH_CHECK_VALUE(host.is_cpu(), "host must be on the CPU, got ", host.device());
  check_type(host, "host", at::kInt, 1);
  check_shape(host, "host", plan.sizes());
  check_contiguous(host, "host");
  TORCH_CHECK_VALUE(copied != 0, "copied must be the handle of an event, got 0");
  LoadedPlan& loaded = loaded_plan(loaded_tensor);
  const c10::cuda::CUDAGuard guard(plan.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  take_over(loaded, stream, {&plan, &shared_slots});
  loaded.num_requests = -1;  // none, until all is launched
  void* source = host.data_ptr();
  check_launch(cudaMemcpyAsync(plan.mutable_data_ptr(), source, host.nbytes(),
                               cudaMemcpyHostToDevice, stream),
               "the copy of the plan");
  // So that, should `host` be freed, its memory is not handed out again before it has been read.
  at::getHostAllocator(at::kCUDA)->record_event(source, host.storage().data_ptr().get_context(),
                                                stream.unwrap());
  check_launch(cudaEventRecord(reinterpret_cast<cudaEvent_t>(copied), stream), "the event");
  const auto* header = static_cast<const PlanHeader*>(source);  // the first section
  if (header->num_gather_spans > 0) {
    check_launch(launch_gather_slots(params, stream), "gather_slots");
  }
  loaded.num_requests = header->num_requests;
  loaded.group_size = header->group_size;
  loaded.num_merges = header->num_merges;
}

// What the two kernels of a decode step write.
struct Outputs {
  void* out;
  float* out_lse;  // may be nullptr
  float* partial_out;
  float* partial_lse;
};

Outputs check_outputs(at::Tensor& out, const std::optional<at::Tensor>& out_lse,
                      at::Tensor& partial_out, at::Tensor& partial_lse, const at::Tensor& q,
                      const at::Tensor& plan) {
  const int64_t heads = q.size(1);
  check_rows(out, "out", heads, kValueDim);
  check_shape(out, "out", {q.size(0), heads, kValueDim});
  check_contiguous(out, "out");
  check_device(out, "out", plan);
  check_type(partial_out, "partial_out", at::kFloat, 3);
  check_shape(partial_out, "partial_out", {partial_out.size(0), heads, kValueDim});
  check_contiguous(partial_out, "partial_out");
  check_device(partial_out, "partial_out", plan);
  check_type(partial_lse, "partial_lse", at::kFloat, 2);
  check_shape(partial_lse, "partial_lse", {partial_out.size(0), heads});
  check_contiguous(partial_lse, "partial_lse");
  check_device(partial_lse, "partial_lse", plan);
  if (out_lse.has_value()) {
    check_type(*out_lse, "out_lse", at::kFloat, 2);
    check_shape(*out_lse, "out_lse", {q.size(0), heads});
    check_contiguous(*out_lse, "out_lse");
    check_device(*out_lse, "out_lse", plan);
  }
  return {.out = out.mutable_data_ptr(),
          .out_lse = out_lse.has_value() ? out_lse->mutable_data_ptr<float>() : nullptr,
          .partial_out = partial_out.mutable_data_ptr<float>(),
          .partial_lse = partial_lse.mutable_data_ptr<float>()};
}

SinkArray check_sinks(const std::optional<at::Tensor>& sinks, int64_t heads,
                      const at::Tensor& plan) {
  if (!sinks.has_value()) return {.data = nullptr, .type = SinkType::kFloat32};
  check_device(*sinks, "sinks", plan);
  check_shape(*sinks, "sinks", {heads});
  check_contiguous(*sinks, "sinks");
  switch (sinks->scalar_type()) {
    case at::kFloat:
      return {.data = sinks->const_data_ptr(), .type = SinkType::kFloat32};
    case at::kBFloat16:
      return {.data = sinks->const_data_ptr(), .type = SinkType::kBfloat16};
    case at::kHalf:
      return {.data = sinks->const_data_ptr(), .type = SinkType::kFloat16};
    default:
      TORCH_CHECK_VALUE(false, "sinks must be Float, BFloat16 or Half, got ", sinks->scalar_type());
  }
}

// [n, 2] for n TicketCounters: partials_owner, the counter of launches outside of graphs, and those of graphs.
void check_counters(const at::Tensor& counters, const at::Tensor& plan) {
  check_type(counters, "counters", at::kInt, 2);
  TORCH_CHECK_VALUE(counters.size(0) >= 3 && counters.size(1) == 2,
                    "counters must have shape [n, 2] with n at least 3, got ", counters.sizes());
  check_contiguous(counters, "counters");
  check_device(counters, "counters", plan);
}

// Number of the capture that the stream is in, if it is in one.
std::optional<uint64_t> capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check_launch(cudaStreamGetCaptureInfo(stream, &status, &id), "asking for a capture");
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  return id;
}

void decode(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
            const at::Tensor& plan, at::IntArrayRef entries, const at::Tensor& shared_slots,
            const at::Tensor& req_to_token, const at::Tensor& req_pool_indices,
            const at::Tensor& seq_lens, at::Tensor& out, const std::optional<at::Tensor>& out_lse,
            at::Tensor& partial_out, at::Tensor& partial_lse, at::Tensor& counters,
            at::Tensor& loaded_tensor, double sm_scale, double logit_cap,
            const std::optional<at::Tensor>& sinks) {
  const PlanCapacity capacity = plan_capacity(entries);
  const PlanView view = plan_view(plan, capacity);
  check_type(q, "q", kElement, 3);
  check_type(k_cache, "k_cache", kElement, 3);
  const int64_t num_requests = q.size(0), num_q_heads = q.size(1), num_kv_heads = k_cache.size(1);
  TORCH_CHECK_VALUE(num_kv_heads >= 1 && num_q_heads % num_kv_heads == 0 &&
                        num_q_heads / num_kv_heads <= kMaxGroupSize,
                    "query heads must be 1 to ", kMaxGroupSize, " times the KV heads, got ",
                    num_q_heads, " and ", num_kv_heads);
  check_rows(q, "q", num_q_heads, kHeadDim);
  check_device(q, "q", plan);
  check_rows(k_cache, "k_cache", num_kv_heads, kHeadDim);
  check_device(k_cache, "k_cache", plan);
  check_rows(v_cache, "v_cache", num_kv_heads, kValueDim);
  check_device(v_cache, "v_cache", plan);
  check_type(shared_slots, "shared_slots", at::kInt, 1);
  check_device(shared_slots, "shared_slots", plan);
  check_req_to_token(req_to_token, plan);
  check_counters(counters, plan);
  LoadedPlan& loaded = loaded_plan(loaded_tensor);
  TORCH_CHECK_VALUE(
      loaded.num_requests == num_requests && loaded.group_size == num_q_heads / num_kv_heads,
      "q must have the requests and the group size of the plan, ", loaded.num_requests, " and ",
      loaded.group_size, ", got ", num_requests, " and ", num_q_heads / num_kv_heads);
  const IndexArray rows = index_array(req_pool_indices, "req_pool_indices", plan);
  const IndexArray lengths = index_array(seq_lens, "seq_lens", plan);
  TORCH_CHECK_VALUE(req_pool_indices.size(0) >= num_requests && seq_lens.size(0) >= num_requests,
                    "req_pool_indices and seq_lens must have an entry for each of the ",
                    num_requests, " requests, got ", req_pool_indices.size(0), " and ",
                    seq_lens.size(0));
  TORCH_CHECK_VALUE(sm_scale > 0 && std::isfinite(sm_scale), "sm_scale must be positive, got ",
                    sm_scale);
  TORCH_CHECK_VALUE(logit_cap >= 0 && std::isfinite(logit_cap),
                    "logit_cap must be 0 (none) or positive, got ", logit_cap);
  const SinkArray sink_array = check_sinks(sinks, num_q_heads, plan);
  const Outputs outputs = check_outputs(out, out_lse, partial_out, partial_lse, q, plan);

  const c10::cuda::CUDAGuard guard(plan.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const std::optional<uint64_t> capture = capture_of(stream);
  if (!capture)
    take_over(loaded, stream, {&plan, &shared_slots, &partial_out, &partial_lse, &counters});
  // The first entry is partials_owner, the second the counter of launches outside of graphs.
  auto* const tickets = reinterpret_cast<TicketCounter*>(counters.mutable_data_ptr<int32_t>());
  const int64_t counter = capture ? 2 + *capture % (counters.size(0) - 2) : 1;
  // A graph is replayed with other plans, of as many requests.
  const int64_t max_merges =
      capture ? std::min<int64_t>(capacity.num_merges, num_requests) : loaded.num_merges;

  const DecodeParams params{
      .plan = view,
      .q = q.const_data_ptr(),
      .q_stride_chunks = query_stride_chunks(q),
      .num_requests = static_cast<int32_t>(num_requests),
      .k_cache = k_cache.const_data_ptr(),
      .v_cache = v_cache.const_data_ptr(),
      .k_slot_bytes = slot_bytes(k_cache, "k_cache"),
      .v_slot_bytes = slot_bytes(v_cache, "v_cache"),
      .shared_slots = shared_slots.const_data_ptr<int32_t>(),
      .req_to_token = req_to_token.const_data_ptr<int32_t>(),
      .req_to_token_stride = req_to_token.stride(0),
      .table_width = static_cast<int32_t>(std::min<int64_t>(req_to_token.size(1), INT32_MAX)),
      .launch_tag = static_cast<int32_t>(counter),
      .req_pool_indices = rows,
      .seq_lens = lengths,
      .out = outputs.out,
      .out_lse = outputs.out_lse,
      .partial_out = outputs.partial_out,
      .partial_lse = outputs.partial_lse,
      .tickets = tickets + counter,
      .partials_owner = &tickets[0].num_draws,
      .max_tickets = capacity.num_tickets,
      .max_merges = static_cast<int32_t>(max_merges),
      .num_q_heads = static_cast<int32_t>(num_q_heads),
      .num_kv_heads = static_cast<int32_t>(num_kv_heads),
      .rows = QueryRows::of(static_cast<int32_t>(num_q_heads / num_kv_heads)),
      .logit_scale = LogitScale::of(static_cast<float>(sm_scale), static_cast<float>(logit_cap)),
      .soft_cap = logit_cap > 0,
      .sinks = sink_array};
  check_launch(launch_pack_decode(params, stream), "pack_decode");
  if (max_merges > 0) check_launch(launch_merge_partials(params, stream), "merge_partials");
}

// CTAs of pack_decode that a device runs at the same time.
int64_t num_ctas(at::Device device) {
  TORCH_CHECK_VALUE(device.is_cuda(), "device must be a CUDA device, got ", device);
  const c10::cuda::CUDAGuard guard(device);
  int count = 0;
  check_launch(count_decode_ctas(&count), "counting the CTAs of pack_decode");
  return count;
}

}  // namespace
}  // namespace pat

// Expands PAT_NAMESPACE before torch pastes it into identifiers.
#define PAT_LIBRARY(name, module) TORCH_LIBRARY(name, module)
#define PAT_LIBRARY_IMPL(name, key, module) TORCH_LIBRARY_IMPL(name, key, module)

PAT_LIBRARY(PAT_NAMESPACE, module) {
  module.def(
      "load_plan(Tensor host, int copied, Tensor(a!) plan, int[] capacity, Tensor req_to_token, "
      "Tensor req_pool_indices, Tensor(b!) shared_slots, Tensor(c!) loaded) -> ()");
  module.def(
      "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor plan, int[] capacity, "
      "Tensor shared_slots, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
      "Tensor(a!) out, "
      "Tensor(b!)? out_lse, Tensor(c!) partial_out, Tensor(d!) partial_lse, "
      "Tensor(e!) counters, Tensor(f!) loaded, float sm_scale, float logit_cap, "
      "Tensor? sinks) -> ()");
  module.def("num_ctas(Device device) -> int", &pat::num_ctas);
}

PAT_LIBRARY_IMPL(PAT_NAMESPACE, CUDA, module) {
  module.impl("load_plan", &pat::load_plan);
  module.impl("decode", &pat::decode);
}
