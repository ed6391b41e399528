// Parameters of each kernel: addresses, strides and scalars that stay the same between graph replays. Everything that
// changes from step to step lies in the buffers at these addresses. In the comments, D is the head_dim of keys and
// queries, Dv the head_dim of values, and Hq = num_kv_heads * group_size.
#pragma once

#include <cstdint>

#include "contract/plan_format.h"

namespace pat {

// A one-dimensional tensor of int32 or int64 indices. SGLang passes int64, other users pass int32.
struct IndexArray {
  const void* data;
  bool is_int64;
};

// Element type of the attention sinks. The kernels read the model's own tensor, whatever its type.
enum class SinkType : int32_t { kFloat32, kBfloat16, kFloat16 };
struct SinkArray {
  const void* data;  // [Hq], or nullptr for no sinks
  SinkType type;
};

// Finds the request and the query head of a work item's query row, without a division.
struct QueryRows {
  int32_t group_size;
  int32_t reciprocal;  // 2^16 / group_size, rounded up: exact for row < 64, group_size <= 64

  static constexpr QueryRows of(int32_t group_size) {
    return {group_size, (65536 + group_size - 1) / group_size};
  }
};

// The queries, or a range of their columns. Each row is aligned to 16 bytes.
struct QueryArray {
  const void* data;
  uint32_t row_chunks;   // 16-byte chunks from one request to the next
  uint32_t head_chunks;  // 16-byte chunks from one head to the next
};

// Turns a score s = q.k into a base-2 logit: s * outer or, with a soft-cap, tanh(s * inner) * outer.
struct LogitScale {
  float inner;
  float outer;

  // logit_cap: 0 for no soft-cap.
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
  int32_t* shared_slots;        // [num_shared_slots], output
};

struct FillParams {
  const int32_t* cuts;          // [num_requests], position that a row begins with, if in its window
  const int32_t* req_to_token;  // [num_rows, table_width]
  int64_t req_to_token_stride;  // in elements
  int32_t table_width;          // caps the lengths that are read from seq_lens
  IndexArray req_pool_indices;  // [num_requests]
  IndexArray seq_lens;          // [num_requests]
  IndexArray slot_map;          // maps req_to_token's slots to the layers' slots; nullptr: identity
  int32_t num_requests;
  int32_t window;     // tokens that one row of `rows` has room for
  bool chunked;       // windows are fixed: [i * window, (i + 1) * window)
  int32_t* rows;      // [num_requests, window], output
  int32_t* row_lens;  // [num_requests], output
};

// How write_kv scales keys or values before it rounds them to one byte. It scales as torch does, in the type of the
// unrounded numbers: to divide by a host number, torch multiplies by the number's inverse; to divide by a device
// tensor, torch really divides.
enum class ScaleUse : int32_t { kNone, kMultiply, kDivide };

// Keys or values of new tokens, and the cache that they go to. D: their head_dim. In latent attention, the first
// NewRows has the first Dv columns of each row. The second NewRows has the remaining columns, and its `cache` points to
// the first of these.
struct NewRows {
  const void* source;    // [num_tokens, num_kv_heads, D]
  int64_t token_stride;  // in elements
  int64_t head_stride;
  void* cache;         // [num_slots, num_kv_heads, D]
  int64_t slot_bytes;  // bytes from one slot to the next
  const float* scale;  // nullptr if scale_use is kNone
  ScaleUse scale_use;  // kNone if the cache and the source have the same type
};

// The slot that SGLang gives to padding tokens. write_kv never writes to it.
inline constexpr int64_t kPaddingSlot = 0;

// Parameters of write_kv. The width of its grid is num_tokens.
struct WriteParams {
  NewRows rows[2];   // keys, values
  IndexArray slots;  // [num_tokens]
  int64_t num_slots;
  int32_t num_kv_heads;
  uint32_t overflow;  // the byte for numbers that are too large (fp8_rounding.h)
};

// Counts the tickets that CTAs draw. Each captured graph has its own counter. All launches outside of graphs share one
// counter, which is safe because they run one after the other. pack_decode expects the counter to be zero, and resets
// it to zero at its end.
struct TicketCounter {
  int32_t num_draws;   // tickets drawn so far, without the first ticket of each CTA
  uint32_t num_ended;  // CTAs that have made their last draw
};

// A CUtensorMap over the KV of all slots, one row per slot. A box is 32 slots by 128 bytes, in the 128-byte swizzle.
struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

// Parameters of pack_decode and merge_partials, the two kernels of a decode step.
struct DecodeParams {
  PlanView plan;
  // [num_requests, Hq, D], where a request's heads follow one another without a gap. In latent attention, `q` has only
  // the first Dv columns, and its heads may be any distance apart.
  QueryArray q;
  QueryArray q_rope;      // the remaining D - Dv columns in latent attention
  int32_t num_requests;   // must equal num_requests of the plan
  const void* k_cache;    // [num_slots, num_kv_heads, D]
  const void* v_cache;    // [num_slots, num_kv_heads, Dv]
  uint32_t k_slot_bytes;  // bytes from one slot to the next
  uint32_t v_slot_bytes;
  const int32_t* shared_slots;  // [num_shared_slots]
  const int32_t* req_to_token;  // [num_rows, table_width]
  int64_t req_to_token_stride;  // in elements
  int32_t table_width;          // upper bound for lengths from seq_lens
  int32_t launch_tag;           // one value per graph; written to partials_owner
  IndexArray req_pool_indices;  // [num_requests]
  IndexArray seq_lens;          // [num_requests]
  void* out;                    // [num_requests, Hq, Dv]
  float* out_lse;               // [num_requests, Hq], or nullptr
  void* partial_out;            // [num_partials, Hq, Dv], normalised, in ComputeType
  float* partial_lse;           // [num_partials, Hq], natural log
  TicketCounter* tickets;
  int32_t* partials_owner;  // launch_tag of the launch that last wrote the partials
  int32_t max_tickets;      // tickets for which the plan buffer has room
  // Upper bound on the merges of any plan that this launch may find. It sets the grid of merge_partials.
  int32_t max_merges;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  QueryRows rows;
  LogitScale logit_scale;  // includes the KV cache's key scale, if the host knows it
  float v_scale;           // the KV cache's value scale, if the host knows it
  SinkArray sinks;
  bool has_kv_maps;
  TensorMap kv_maps[2];  // keys, values
  // Scales of one-byte keys and values in device memory, where a weight update may change them after a graph has been
  // captured. nullptr: the host knows the scale.
  const float* k_scale_on_device;
  const float* v_scale_on_device;
};

}  // namespace pat
