// Bring-up of wide_decode on plans made by hand: checks against float attention, and times it beside pack_decode.
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -I KERNELS -o wide_test wide_test.cu
//   ./wide_test            all steps;   ./wide_test 3        one step
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>
#include <string>

#define PAT_NO_SOFT_CAP
#ifndef __CUDA_ARCH__  // the pass for the host does not see what fp8.cuh has for newer GPUs
#include "kv_type.h"
namespace pat::fp8 {
template <KvType>
__device__ uint32_t round_pair(float, float);
}
#endif
#include "wide_entry.cu"
#include "merge_partials.cuh"

static void check_cuda(cudaError_t e, const char* what, int line) {
  if (e == cudaSuccess) return;
  std::printf("%s, line %d: %s\n", what, line, cudaGetErrorString(e));
  std::exit(1);
}
#define CK(x) check_cuda(x, #x, __LINE__)

namespace pat {
using Element = WideElement;
constexpr int D = PAT_HEAD_DIM;
extern "C" {
__global__ void __launch_bounds__(kDecodeThreads<WideDims>, kCtasPerSm<WideDims>)
    narrow_kernel(const __grid_constant__ DecodeParams params) {
  
  pack_decode<Element, WideDims, false>(params);
}
__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtasPerSm)
    merge_kernel(const __grid_constant__ DecodeParams params) {
  merge_partials<Element, Element, D, false, false>(params);
}
}
__global__ void fill(Element* x, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z = (z ^ (z >> 27)) * 0x94D049BB133111EBull, z ^= z >> 31;
    float u = 0;
    for (int k = 0; k < 4; ++k) u += float((z >> (16 * k)) & 0xffff) / 65536.f - 0.5f;
    x[i] = Element(u * 1.732f);
  }
}
// One CTA of D threads per (request, query head).
__global__ void reference(const Element* q, const Element* k, const Element* v, const int* table, int width,
                          const int* lens, int heads, int group, float scale, float* out, float* lse) {
  const int request = blockIdx.x, head = blockIdx.y, kv_head = head / group, d = threadIdx.x;
  __shared__ float part[4], qs[D];
  qs[d] = float(q[(size_t(request) * heads * group + head) * D + d]);
  float maximum = -INFINITY, sum = 0.f, acc = 0.f;
  for (int t = 0; t < lens[request]; ++t) {
    const size_t row = (size_t(table[size_t(request) * width + t]) * heads + kv_head) * D + d;
    float s = qs[d] * float(k[row]);
    for (int o = 16; o > 0; o /= 2) s += __shfl_xor_sync(~0u, s, o);
    __syncthreads();
    if (d % 32 == 0) part[d / 32] = s;
    __syncthreads();
    s = 0.f;
    for (int w = 0; w < D / 32; ++w) s += part[w];
    s *= scale;
    const float highest = fmaxf(maximum, s), factor = exp2f(maximum - highest), weight = exp2f(s - highest);
    acc = acc * factor + weight * float(v[row]), sum = sum * factor + weight, maximum = highest;
  }
  out[(size_t(request) * heads * group + head) * D + d] = sum > 0.f ? acc / sum : 0.f;
  if (d == 0) lse[size_t(request) * heads * group + head] = sum > 0.f ? (maximum + log2f(sum)) * 0.6931472f : -INFINITY;
}
}  // namespace pat
using namespace pat;

struct Case {
  const char* name;
  int requests, group, heads, shared, tail, wide_pieces, narrow_pieces;  // pieces of the shared range
  bool runs;                                         // slots in a row
  bool ragged;                                       // tails of 0 to 2 * tail tokens, other lengths of the prefix
  bool nan;                                          // NaN in the tail of request 1
};

struct HostPlan {
  PlanHeader header{};
  std::vector<TicketBegin> ticket_begin{{0, 0}};
  std::vector<WorkItem> work_items;
  std::vector<KvSegment> kv_segments;
  std::vector<ItemRequest> item_requests;
  std::vector<GatherSpan> gather_spans;
  std::vector<MergeEntry> merges;
  std::vector<int32_t> buffer;

  PlanLayout finish(int requests, int group, int partials, bool wide) {
    header = {.magic = kPlanMagic, .version = kPlanVersion, .num_requests = requests, .group_size = group};
#define COUNT(name, Entry, count, extra) header.count = int(name.size()) - extra;
    PAT_PLAN_SECTIONS(COUNT)
#undef COUNT
    header.num_partials = partials;
    header.num_kv_tokens = INT32_MAX;
    header.body = wide ? kWideBody : 0;
    const PlanLayout layout = PlanLayout::of(PlanCapacity::of(header));
    buffer.assign(layout.size, 0);
    std::copy_n(reinterpret_cast<int32_t*>(&header), sizeof(header) / 4, buffer.begin() + layout.header);
#define COPY(name, Entry, count, extra) \
  std::copy_n(reinterpret_cast<int32_t*>(name.data()), name.size() * sizeof(Entry) / 4, buffer.begin() + layout.name);
    PAT_PLAN_SECTIONS(COPY)
#undef COPY
    return layout;
  }
};

// Tiles of up to `rows` rows; each piece of the shared range is an item and a ticket of its own, with
// the tails of its share of the requests, in turn over the tile's warpgroups.
HostPlan plan_of(const Case& c, int rows, bool wide, PlanLayout& layout) {
  HostPlan plan;
  const int pieces = wide ? c.wide_pieces : c.narrow_pieces;
  const int most = rows / c.group, tiles = (c.requests + most - 1) / most;
  std::vector<int> first_piece_slot(c.requests);
  int next_partial = 0;
  const bool direct = pieces == 1;
  for (int r = 0; r < c.requests && !direct; ++r) {
    plan.merges.push_back({.request = r, .partial_begin = next_partial, .num_partials = pieces});
    first_piece_slot[r] = next_partial, next_partial += pieces;
  }
  // The rest, shared out evenly, in whole warpgroups: 512 rows are 192 + 192 + 128, 256 are 128 + 128.
  const int step = wide ? 64 / c.group : 1;
  std::vector<int> counts;
  for (int left = c.requests, t = tiles; t > 0; left -= counts.back(), --t) {
    const int even = (left + t - 1) / t;
    counts.push_back(std::min({(even + step - 1) / step * step, most, left}));
  }
  for (int p = 0; p < pieces; ++p) {
    int begin = 0;
    for (const int count : counts) {
      const int from = int(int64_t(c.shared) * p / pieces / 64 * 64);
      const int to = p + 1 == pieces ? c.shared : int(int64_t(c.shared) * (p + 1) / pieces / 64 * 64);
      const int first_segment = int(plan.kv_segments.size());
      plan.kv_segments.push_back({.kv_request = kSharedKv, .kv_begin = from, .kv_end = to,
                                  .requests = KvSegment::interval(0, count)});
      if (c.tail > 0) {
        std::vector<std::vector<int>> of_group(3);
        for (int i = p; i < count; i += pieces) of_group[std::min(i * c.group / 64, 2)].push_back(i);
        for (size_t turn = 0; turn < size_t(count); ++turn) {
          for (auto& group : of_group) {
            if (turn >= group.size()) continue;
            const int i = group[turn];
            plan.kv_segments.push_back({.kv_request = begin + i, .kv_begin = c.shared, .kv_end = kOpenEnd,
                                        .requests = KvSegment::interval(i, i + 1) | KvSegment::kReadOnce});
          }
        }
      }
      const int used = count * c.group;
      plan.work_items.push_back({.tile = wide ? (used - 1) / 64 : used <= 16 ? 0 : used <= 32 ? 1 : 2,
                                 .num_requests = count,
                                 .request_begin = int(plan.item_requests.size()),
                                 .segment_begin = first_segment,
                                 .num_segments = int(plan.kv_segments.size()) - first_segment});
      for (int i = 0; i < count; ++i) {
        plan.item_requests.push_back({begin + i, direct ? kDirectStore : first_piece_slot[begin + i] + p});
      }
      plan.ticket_begin.push_back({int(plan.work_items.size()), int(plan.kv_segments.size())});
      begin += count;
    }
  }
  layout = plan.finish(c.requests, c.group, next_partial, wide);
  return plan;
}

template <typename T>
T* upload(const std::vector<T>& host) {
  T* device;
  CK(cudaMalloc(&device, std::max<size_t>(host.size(), 1) * sizeof(T)));
  CK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                           const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode;
void make_map(TensorMap& map, void* cache, uint64_t row_bytes, uint64_t slots) {
  cuuint64_t dims[] = {row_bytes, slots}, strides[] = {row_bytes};
  cuuint32_t box[] = {128, 32}, steps[] = {1, 1};
  alignas(64) CUtensorMap made;
  if (encode(&made, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, cache, dims, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) std::exit(2);
  std::copy_n(reinterpret_cast<uint8_t*>(&made), sizeof(map), map.opaque);
}

#ifndef TAG
#define TAG "narrow"
#endif
__global__ void before_kernel(int* x) {
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  if (threadIdx.x == 0) x[blockIdx.x] += 1;
}
// Replays of a graph of 32 layers: write, [wide], pack, [wide], merge.
void run_chain(const DecodeParams& p, int narrow_bytes, int merge_grid, int sms, const char* name) {
  cudaStream_t stream;
  CK(cudaStreamCreate(&stream));
  int* scratch;
  CK(cudaMalloc(&scratch, 4096 * 4));
  CK(cudaMemset(scratch, 0, 4096 * 4));
  const int wide_bytes = int(sizeof(WideStorage<WideDims>));
  CK(cudaFuncSetAttribute((const void*)wide_decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wide_bytes));
  const auto launch = [&](auto kernel, int grid, int threads, int bytes, auto... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = bytes, config.stream = stream;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute, config.numAttrs = 1;
    CK(cudaLaunchKernelEx(&config, kernel, args...));
  };
  // 0 none, 1 before pack, 2 behind pack, 3 before write, 4 before pack, nodes off
  const char* names[] = {"no wide", "wide before pack", "wide behind pack", "wide before write", "wide before pack, off"};
  cudaGraphExec_t graphs[5];
  std::vector<float> times[5];
  for (int kind = 0; kind < 5; ++kind) {
    cudaGraph_t graph;
    CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int layer = 0; layer < 32; ++layer) {
      if (kind == 3) launch(wide_decode_kernel, sms, kWideThreads, wide_bytes, p);
      launch(before_kernel, p.num_requests, 256, 0, scratch);
      if (kind == 1 || kind == 4) launch(wide_decode_kernel, sms, kWideThreads, wide_bytes, p);
      launch(narrow_kernel, sms * kCtasPerSm<WideDims>, kDecodeThreads<WideDims>, narrow_bytes, p);
      if (kind == 2) launch(wide_decode_kernel, sms, kWideThreads, wide_bytes, p);
      launch(merge_kernel, std::max(merge_grid, 1), kMergeWarps * 32, 0, p);
    }
    CK(cudaStreamEndCapture(stream, &graph));
    CK(cudaGraphInstantiate(&graphs[kind], graph, 0));
    if (kind == 4) {
      size_t count = 0;
      CK(cudaGraphGetNodes(graph, nullptr, &count));
      std::vector<cudaGraphNode_t> nodes(count);
      CK(cudaGraphGetNodes(graph, nodes.data(), &count));
      for (auto node : nodes) {
        cudaKernelNodeParams params;
        CK(cudaGraphKernelNodeGetParams(node, &params));
        if (params.blockDim.x == kWideThreads) CK(cudaGraphNodeSetEnabled(graphs[kind], node, 0));
      }
    }
  }
  cudaEvent_t e0, e1;
  CK(cudaEventCreate(&e0)), CK(cudaEventCreate(&e1));
  for (int round = 0; round < 15; ++round) {
    for (int kind = 0; kind < 5; ++kind) {
      CK(cudaGraphLaunch(graphs[kind], stream));
      CK(cudaEventRecord(e0, stream));
      for (int i = 0; i < 4; ++i) CK(cudaGraphLaunch(graphs[kind], stream));
      CK(cudaEventRecord(e1, stream)), CK(cudaEventSynchronize(e1));
      float ms;
      CK(cudaEventElapsedTime(&ms, e0, e1));
      times[kind].push_back(ms * 1000 / 4 / 32);
    }
  }
  for (int kind = 0; kind < 5; ++kind) {
    std::sort(times[kind].begin(), times[kind].end());
    std::printf("chain %-28s %-24s %8.2f us a layer (%.2f..%.2f)\n", name, names[kind], times[kind][7], times[kind][1], times[kind][13]);
  }
}

void run(const Case& c, int sms, int which, bool chain) {
  std::mt19937 random(7);
  const int pieces = std::max(c.wide_pieces, c.narrow_pieces);
  const int hq = c.heads * c.group, width = c.shared + 2 * c.tail + 64;
  std::vector<int> lens(c.requests), table(size_t(c.requests) * width), shared_slots(c.shared);
  int slots = 64;
  for (int r = 0; r < c.requests; ++r) {
    lens[r] = c.shared + (c.ragged ? int(random() % (2 * c.tail + 1)) : c.tail);
  }
  const int total = 64 + c.shared + c.requests * (2 * c.tail + 1);
  std::vector<int> order(total);
  for (int i = 0; i < total; ++i) order[i] = i;
  if (!c.runs) std::shuffle(order.begin() + 1, order.end(), random);
  for (int& slot : shared_slots) slot = order[slots++];
  for (int r = 0; r < c.requests; ++r) {
    for (int t = 0; t < lens[r]; ++t) table[size_t(r) * width + t] = t < c.shared ? shared_slots[t] : order[slots++];
  }
  Element *q, *k, *v, *out, *partial;
  float *ref, *ref_lse, *lse, *partial_lse;
  const size_t kv = size_t(total) * c.heads * D, rows = size_t(c.requests) * hq;
  CK(cudaMalloc(&q, rows * D * 2)), CK(cudaMalloc(&k, kv * 2)), CK(cudaMalloc(&v, kv * 2)), CK(cudaMalloc(&out, rows * D * 2));
  CK(cudaMalloc(&partial, rows * pieces * D * 2)), CK(cudaMalloc(&partial_lse, rows * pieces * 4));
  CK(cudaMalloc(&ref, rows * D * 4)), CK(cudaMalloc(&ref_lse, rows * 4)), CK(cudaMalloc(&lse, rows * 4));
  fill<<<512, 256>>>(q, rows * D, 1), fill<<<512, 256>>>(k, kv, 2), fill<<<512, 256>>>(v, kv, 3);
  if (c.nan) {
    const std::vector<uint16_t> bad(c.heads * D, 0x7fc0);
    const int slot = table[size_t(1) * width + lens[1] - 1];
    CK(cudaMemcpy(v + size_t(slot) * c.heads * D, bad.data(), bad.size() * 2, cudaMemcpyHostToDevice));
  }
  int *d_table = upload(table), *d_lens = upload(lens), *d_shared = upload(shared_slots);
  std::vector<int> pool(c.requests);
  for (int r = 0; r < c.requests; ++r) pool[r] = r;
  int* d_pool = upload(pool);
  int* counters = upload(std::vector<int>(4, 0));
  const float sm_scale = 1.f / sqrtf(float(D));
  reference<<<dim3(c.requests, hq), D>>>(q, k, v, d_table, width, d_lens, c.heads, c.group, sm_scale * 1.442695f, ref, ref_lse);
  CK(cudaDeviceSynchronize());
  std::vector<float> want(rows * D), want_lse(rows);
  CK(cudaMemcpy(want.data(), ref, want.size() * 4, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(want_lse.data(), ref_lse, rows * 4, cudaMemcpyDeviceToHost));

  struct Side { PlanLayout layout; HostPlan plan; int* d_plan; DecodeParams p; int bytes, merge_grid; std::vector<float> times; double rel, worst, lse; size_t nan; bool same; bool on; };
  Side sides[2];
  const auto launch = [&](int w) {
    Side& s = sides[w];
    if (w == 0) {
      wide_decode_kernel<<<sms, kWideThreads, s.bytes>>>(s.p);
    } else {
      narrow_kernel<<<sms * kCtasPerSm<WideDims>, kDecodeThreads<WideDims>, s.bytes>>>(s.p);
    }
    if (s.merge_grid > 0) merge_kernel<<<s.merge_grid, kMergeWarps * 32>>>(s.p);
  };
  for (int w = 0; w < 2; ++w) {
    const bool wide = w == 0;
    Side& s = sides[w];
    s.on = which == 2 || which == w;
    if (!s.on) continue;
    s.plan = plan_of(c, wide ? kWideRows : 64, wide, s.layout);
    s.d_plan = upload(s.plan.buffer);
    DecodeParams& p = s.p;
    p = DecodeParams{};
    p.plan = PlanView::at(s.d_plan, s.layout);
    p.q = {q, uint32_t(hq * D * 2 / 16), uint32_t(D * 2 / 16)};
    p.num_requests = c.requests, p.k_cache = k, p.v_cache = v;
    p.k_slot_bytes = p.v_slot_bytes = c.heads * D * 2;
    p.shared_slots = d_shared, p.req_to_token = d_table, p.req_to_token_stride = width, p.table_width = width;
    p.launch_tag = 1, p.req_pool_indices = {d_pool, false}, p.seq_lens = {d_lens, false};
    p.out = out, p.out_lse = lse, p.partial_out = partial, p.partial_lse = partial_lse;
    p.tickets = reinterpret_cast<TicketCounter*>(counters), p.partials_owner = counters + 2;
    p.max_tickets = s.plan.header.num_tickets, p.max_merges = s.plan.header.num_merges;
    p.num_q_heads = hq, p.num_kv_heads = c.heads, p.rows = QueryRows::of(c.group);
    p.logit_scale = LogitScale::of(sm_scale, 0.f), p.v_scale = 1.f;
    p.has_kv_maps = c.runs;
    make_map(p.kv_maps[0], k, size_t(c.heads) * D * 2, total), make_map(p.kv_maps[1], v, size_t(c.heads) * D * 2, total);
    s.bytes = wide ? int(sizeof(WideStorage<WideDims>)) : int(sizeof(SharedStorage<WideDims>));
    auto* kernel = wide ? wide_decode_kernel : narrow_kernel;
    CK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, s.bytes));
    s.merge_grid = std::min<int>(s.plan.header.num_merges * hq, 2 * sms);
    CK(cudaMemset(out, 0xff, rows * D * 2));
    launch(w);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    std::vector<uint16_t> got(rows * D), again(rows * D);
    std::vector<float> got_lse(rows);
    CK(cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost));
    CK(cudaMemcpy(got_lse.data(), lse, rows * 4, cudaMemcpyDeviceToHost));
    launch(w);
    CK(cudaDeviceSynchronize());
    CK(cudaMemcpy(again.data(), out, again.size() * 2, cudaMemcpyDeviceToHost));
    double num = 0, den = 0, worst = 0, worst_lse = 0;
    size_t wrong_nan = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const uint32_t bits = uint32_t(got[i]) << 16;
      float x;
      std::copy_n(reinterpret_cast<const float*>(&bits), 1, &x);
      if (std::isnan(x) != std::isnan(want[i])) ++wrong_nan;
      if (std::isnan(x) || std::isnan(want[i])) continue;
      num += double(x - want[i]) * (x - want[i]), den += double(want[i]) * want[i];
      worst = std::max(worst, double(std::fabs(x - want[i])));
    }
    for (size_t i = 0; i < rows; ++i) worst_lse = std::max(worst_lse, double(std::fabs(got_lse[i] - want_lse[i])));
    s.rel = std::sqrt(num / den), s.worst = worst, s.lse = worst_lse, s.nan = wrong_nan, s.same = got == again;
  }
  cudaEvent_t e0, e1;
  CK(cudaEventCreate(&e0)), CK(cudaEventCreate(&e1));
  for (int round = 0; round < 9; ++round) {
    for (int w = 0; w < 2; ++w) {
      if (!sides[w].on) continue;
      launch(w);
      CK(cudaEventRecord(e0));
      for (int i = 0; i < 6; ++i) launch(w);
      CK(cudaEventRecord(e1)), CK(cudaEventSynchronize(e1));
      float ms;
      CK(cudaEventElapsedTime(&ms, e0, e1));
      sides[w].times.push_back(ms * 1000 / 6);
    }
  }
  double tokens = 0;
  for (int r = 0; r < c.requests; ++r) tokens += lens[r];
  for (int w = 0; w < 2; ++w) {
    Side& s = sides[w];
    if (!s.on) continue;
    std::sort(s.times.begin(), s.times.end());
    std::printf("%-34s %-8s %8.1f us (%.1f..%.1f) %6.0f TFLOP/s  rel %.4f max %.4f lse %.5f nan %zu same %d items %d\n", c.name,
                w == 0 ? "wide" : TAG, s.times[4], s.times[0], s.times[8], 4.0 * D * tokens * hq / s.times[4] / 1e6, s.rel,
                s.worst, s.lse, s.nan, s.same, s.plan.header.num_work_items);
    if (w == 0) {
      long long clock[2];
      CK(cudaMemcpyFromSymbol(clock, g_clock, sizeof(clock)));
      std::printf("    CTA 0: %lld clk, %.1f us, %.2f GHz\n", clock[0], clock[1] / 1e3, double(clock[0]) / clock[1]);
    }
    std::fflush(stdout);
  }
  if (chain) run_chain(sides[1].p, sides[1].bytes, sides[1].merge_grid, sms, c.name);
  for (void* x : {(void*)q, (void*)k, (void*)v, (void*)out, (void*)partial, (void*)partial_lse, (void*)ref, (void*)ref_lse,
                  (void*)lse, (void*)d_table, (void*)d_lens, (void*)d_shared, (void*)d_pool, (void*)counters}) CK(cudaFree(x));
}

int main(int argc, char** argv) {
  cudaDeviceProp prop;
  CK(cudaGetDeviceProperties(&prop, 0));
  const int sms = prop.multiProcessorCount;
  const std::string only = argc > 1 ? argv[1] : "";
  const int which = argc > 2 ? std::atoi(argv[2]) : 2;  // 0 wide, 1 narrow, 2 both
  cudaDriverEntryPointQueryResult found;
  CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &found));
  if (only.empty()) std::printf("%s, %d SMs, wide: %zu bytes\n", prop.name, sms, sizeof(WideStorage<WideDims>));
  // requests, group, heads, shared, tail, pieces: wide, narrow (whole rounds of CTAs on 132 SMs, where that can be)
  const std::vector<std::vector<Case>> steps = {
      {{"1a one prefix, one item", 48, 4, 1, 256, 0, 1, 1, false, false, false},
       {"1b one prefix, slots", 48, 4, 8, 33792, 0, 16, 11, false, false, false},
       {"1c one prefix, runs", 48, 4, 8, 33792, 0, 16, 11, true, false, false},
       {"1d 384 rows, slots", 96, 4, 8, 32768, 0, 8, 11, false, false, false}},
      {{"2a 100 rows, 1000 tokens", 25, 4, 2, 1000, 0, 1, 1, false, false, false},
       {"2b 65 rows of 5", 13, 5, 3, 777, 0, 2, 2, false, false, false},
       {"2c 190 rows of 10, runs", 19, 10, 2, 4097, 0, 3, 3, true, false, false},
       {"2d 1 request", 1, 8, 2, 65, 0, 1, 1, false, false, false}},
      {{"3a tails, one item each", 48, 4, 8, 512, 256, 1, 1, false, false, false},
       {"3b tails, ragged", 40, 4, 2, 700, 130, 1, 1, false, true, false},
       {"3c tails, ragged, runs, 12 heads", 32, 12, 2, 700, 130, 1, 1, true, true, false},
       {"3d NaN in one tail", 48, 4, 2, 700, 130, 1, 1, false, true, true},
       // 264 items of wide, 792 of narrow: two and three whole rounds on 132 SMs
       {"3e tails alone, slots", 1584, 4, 8, 64, 256, 1, 1, false, false, false},
       {"3f tails alone, runs", 1584, 4, 8, 64, 256, 1, 1, true, false, false}},
      {{"4a server: 128 x 8192 + 256", 128, 4, 8, 8192, 256, 5, 4, false, false, false},
       {"4b same, runs", 128, 4, 8, 8192, 256, 5, 4, true, false, false},
       {"4c 128 x 32768 + 256 64/8", 128, 8, 8, 32768, 256, 11, 2, false, false, false},
       {"4d merge, ragged", 37, 6, 3, 3000, 100, 5, 5, false, true, false},
       {"4e same as 4c, runs", 128, 8, 8, 32768, 256, 11, 2, true, false, false},
       {"4f 32 x 32768 + 512 32/8", 32, 4, 8, 32768, 512, 16, 16, false, false, false},
       {"4g 48 x 16384 + 128 32/8", 48, 4, 8, 16384, 128, 16, 11, false, false, false},
       {"4h 256 x 1024 + 128 32/8", 256, 4, 8, 1024, 128, 3, 2, false, false, false}},
      {{"5a 768 rows x 16384, slots", 192, 4, 8, 16384, 0, 4, 11, false, false, false},
       {"5b 768 rows x 49152, slots", 192, 4, 8, 49152, 0, 4, 11, false, false, false},
       {"5c 768 rows x 16384, runs", 192, 4, 8, 16384, 0, 4, 11, true, false, false},
       {"5d 768 rows x 49152, runs", 192, 4, 8, 49152, 0, 4, 11, true, false, false},
       {"5e 192 rows x 1 head x 135168, slots", 48, 4, 1, 135168, 0, 128, 264, false, false, false},
       {"5f 3072 rows x 16384, slots", 768, 4, 8, 16384, 0, 1, 11, false, false, false},
       {"5g 3072 rows x 16384, runs", 768, 4, 8, 16384, 0, 1, 11, true, false, false},
       {"5h 512 rows x 49152, slots", 128, 4, 8, 49152, 0, 4, 11, false, false, false}},
      {{"0a idle: 32 x 512 + 64", 32, 4, 8, 512, 64, 1, 4, false, false, false},
       {"0b idle: 64 x 1024 + 256", 64, 4, 8, 1024, 256, 1, 8, false, false, false},
       {"0c idle: 128 x 0 + 16", 128, 4, 8, 64, 16, 1, 1, false, false, false}}};
  for (size_t s = 0; s < steps.size(); ++s) {
    for (const Case& c : steps[s]) {
      if (std::string(c.name).substr(0, only.size()) == only) run(c, sms, which, c.name[0] == '0');
    }
  }
  return 0;
}
