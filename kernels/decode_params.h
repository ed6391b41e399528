// Parameters of each kernel: addresses, strides and scalars that stay the same between graph replays.
// Everything that changes from step to step lies in the buffers. Shapes are given as comments; D is head_dim of keys
// and queries, Dv that of values, Hq = num_kv_heads * group_size.
#pragma once

#include <cstdint>

#include "contract/plan_format.h"

namespace pat {

// One-dimensional index tensor that may be int32 or int64: SGLang gives int64, other users int32.
struct IndexArray {
  const void* data;
  bool is_int64;
};

// One attention sink per query head, in the type that the model has.
enum class SinkType : int32_t { kFloat32, kBfloat16, kFloat16 };
struct SinkArray {
  const void* data;  // [Hq], nullptr: none
  SinkType type;
};

// Query row of a work item -> request of the item and query head of the group, without a division.
struct QueryRows {
  int32_t group_size;
  int32_t reciprocal;  // 2^16 / group_size, rounded up: exact for rows < 64 and groups <= 64

  static constexpr QueryRows of(int32_t group_size) {
    return {group_size, (65536 + group_size - 1) / group_size};
  }
};

// Queries, or some of their columns, each row aligned to 16 bytes.
struct QueryArray {
  const void* data;
  uint32_t row_chunks;   // 16-byte chunks between requests
  uint32_t head_chunks;  // between heads
};

// Score q.k -> logit in the base-2 domain: s * outer, or with soft-cap tanh(s * inner) * outer.
struct LogitScale {
  float inner;
  float outer;

  // logit_cap 0: none.
  static constexpr LogitScale of(float sm_scale, float logit_cap) {
    constexpr float kLog2E = 1.4426950408889634f;
    if (logit_cap == 0.f) return {1.f, sm_scale * kLog2E};
    return {sm_scale / logit_cap, logit_cap * kLog2E};
  }
};

struct GatherParams {
  PlanView plan;
  const int32_t* req_to_token;  // [num_rows, req_to_token_stride]
  int64_t req_to_token_stride;  // in elements
  IndexArray req_pool_indices;  // [num_requests]
  int32_t* shared_slots;        // [num_shared_slots], written
};

struct FillParams {
  const int32_t* cuts;          // [num_requests], where a row begins, if the cut is in its window
  const int32_t* req_to_token;  // [num_rows, req_to_token_stride]
  int64_t req_to_token_stride;  // in elements
  IndexArray req_pool_indices;  // [num_requests]
  IndexArray seq_lens;          // [num_requests]
  IndexArray slot_map;          // from slots of req_to_token to the layers'; nullptr: the same
  int32_t num_requests;
  int32_t window;     // the most tokens of a row
  bool chunked;       // a row begins at a multiple of `window`
  int32_t* rows;      // [num_requests, window], written
  int32_t* row_lens;  // [num_requests], written
};

// How write_kv scales keys or values, in their type, before it rounds them to one byte: not at all, by a multiplication
// (as torch divides by a number of the host), or by a division (as torch divides by a tensor of the device).
enum class ScaleUse : int32_t { kNone, kMultiply, kDivide };

// Keys or values of new tokens, and the cache that they go to. D: their head_dim. Latent attention has one KV head, and
// its rows are split: one NewRows has the first Dv columns. The other has the remaining columns, and its `cache` is
// where they begin in the cache.
struct NewRows {
  const void* source;    // [num_tokens, num_kv_heads, D]
  int64_t token_stride;  // in elements
  int64_t head_stride;
  void* cache;         // [num_slots, num_kv_heads, D]
  int64_t slot_bytes;  // bytes between slots
  const float* scale;  // nullptr with ScaleUse::kNone
  ScaleUse scale_use;  // kNone if the cache has the type of the source
};

// The slot of SGLang's padding: never written.
inline constexpr int64_t kPaddingSlot = 0;

// Parameters of write_kv. The width of its grid is num_tokens.
struct WriteParams {
  NewRows rows[2];   // keys, values
  IndexArray slots;  // [num_tokens]
  int64_t num_slots;
  int32_t num_kv_heads;
  uint32_t overflow;  // the byte that numbers beyond the largest one become (fp8_rounding.h)
};

// Counts the draws of tickets. There is one counter for each captured graph, and one for all launches outside of
// graphs, which follow one another. pack_decode finds its counter at zero and leaves it at zero.
struct TicketCounter {
  int32_t num_draws;   // tickets drawn beyond the first of each CTA
  uint32_t num_ended;  // CTAs that draw no more
};

// A CUtensorMap. It describes the rows of all slots, one slot after the other, in boxes of 32 slots and 128 bytes,
// under the swizzle of shared memory.
struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

// Parameters of both kernels of a decode step.
struct DecodeParams {
  PlanView plan;
  QueryArray q;  // [num_requests, Hq, D], heads dense; in latent attention, the first Dv columns
  QueryArray q_rope;      // in latent attention, the other columns
  int32_t num_requests;   // must equal the plan's
  const void* k_cache;    // [num_slots, num_kv_heads, D]
  const void* v_cache;    // [num_slots, num_kv_heads, Dv]
  uint32_t k_slot_bytes;  // bytes between slots
  uint32_t v_slot_bytes;
  const int32_t* shared_slots;  // [num_shared_slots]
  const int32_t* req_to_token;  // [num_rows, table_width]
  int64_t req_to_token_stride;  // in elements
  int32_t table_width;          // caps the lengths that are read from seq_lens
  int32_t launch_tag;  // what the launches of one graph, and no others, write to partials_owner
  IndexArray req_pool_indices;  // [num_requests]
  IndexArray seq_lens;          // [num_requests]
  void* out;                    // [num_requests, Hq, Dv]
  float* out_lse;               // [num_requests, Hq], may be nullptr
  void* partial_out;            // [num_partials, Hq, Dv], normalised, in ComputeType
  float* partial_lse;           // [num_partials, Hq], natural log
  TicketCounter* tickets;
  int32_t* partials_owner;  // tag of the launch that wrote the partials last
  int32_t max_tickets;      // capacity of the plan
  // The most merges of any plan that this launch may find. It bounds the grid of merge_partials.
  int32_t max_merges;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  QueryRows rows;
  LogitScale logit_scale;  // includes the scale of the keys in the cache, if the host has it
  float v_scale;           // of the values in the cache, if the host has it
  SinkArray sinks;
  bool has_kv_maps;
  TensorMap kv_maps[2];  // keys, values
  // Over one-byte KV: scales of the keys and of the values that lie on the device, where a weight update may change
  // them under a captured graph. nullptr: the host has the scale.
  const float* k_scale_on_device;
  const float* v_scale_on_device;
};

}  // namespace pat
