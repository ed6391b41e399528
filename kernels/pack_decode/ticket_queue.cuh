// Draws tickets, which hold the items that a CTA executes, until none is left.
#pragma once

#include "decode_params.h"
#include "pack_decode/work_queue.cuh"

namespace pat {

// The items of a ticket and their segments, for one KV head.
struct TicketRange {
  int first_item;
  int end_item;
  int first_segment;
  int end_segment;
  int kv_head;

  __device__ static TicketRange none() { return {0, 0, 0, 0, 0}; }
  __device__ __forceinline__ bool has_items() const { return first_item < end_item; }
};

// The tickets of a CTA, as a producer warp gets them. The K producer draws shortly before the current ticket ends. If
// it drew earlier, the drawn ticket could wait for this CTA while another CTA is idle. The K producer passes each draw
// on to the V producer, so that both walk the same items.
template <typename Storage, bool kDraws>
class TicketQueue {
 public:
  __device__ TicketQueue(const DecodeParams& params, Storage& storage, int lane)
      : params_(params), storage_(storage), lane_(lane) {}

  // Returns the first ticket. Its draw is the block index, so that a CTA starts without waiting for the counter.
  __device__ __forceinline__ TicketRange first() {
    const TicketRange range = range_of(blockIdx.x);
    // Loads the ticket before it checks in the header whether there is such a ticket, so that neither load waits for
    // the other. If there is none, `range` holds arbitrary data and is not used.
    const PlanHeader& header = *params_.plan.header;
    const int4 identity = *reinterpret_cast<const int4*>(&header);  // the first four fields
    num_draws_ = header.num_tickets * params_.num_kv_heads;
    num_kv_tokens_ = header.num_kv_tokens;
    if (identity.x != kPlanMagic || identity.y != kPlanVersion ||
        identity.z != params_.num_requests || identity.w != params_.rows.group_size) {
      __trap();  // not a plan, or a plan for another batch size or group size
    }
    return static_cast<int>(blockIdx.x) < num_draws_ ? range : TicketRange::none();
  }

  // KV tokens that all items of the plan read, counted for one KV head.
  __device__ __forceinline__ int32_t num_kv_tokens() const { return num_kv_tokens_; }

  // Starts the next draw, if it has not started yet.
  __device__ __forceinline__ void draw_ahead() {
    if (!kDraws || is_drawn_ || all_drawn_at_once()) return;
    if (lane_ == 0) drawn_ = atomicAdd(&params_.tickets->num_draws, 1);
    is_drawn_ = true;
  }

  // Returns the next ticket, which is empty if none is left.
  __device__ __forceinline__ TicketRange next() {
    const int draw = next_draw();
    return draw < num_draws_ ? range_of(draw) : TicketRange::none();
  }

  // The K producer calls this after its last draw. The last CTA that gets here resets the counter to zero.
  __device__ __forceinline__ void end() {
    if (all_drawn_at_once() || lane_ != 0) return;
    __threadfence();
    // atomicInc wraps num_ended around to 0 at the last CTA.
    if (atomicInc(&params_.tickets->num_ended, gridDim.x - 1) == gridDim.x - 1) {
      __threadfence();
      atomicExch(&params_.tickets->num_draws, 0);
    }
  }

 private:
  __device__ __forceinline__ TicketRange range_of(int draw) const {
    const int ticket = max(min(draw / params_.num_kv_heads, params_.max_tickets - 1), 0);
    const int2* const ends = reinterpret_cast<const int2*>(params_.plan.ticket_begin + ticket);
    const int2 begin = ends[0], end = ends[1];
    return {begin.x, end.x, begin.y, end.y, draw % params_.num_kv_heads};
  }

  __device__ __forceinline__ bool all_drawn_at_once() const {
    return num_draws_ <= static_cast<int>(gridDim.x);
  }

  __device__ __forceinline__ int next_draw() {
    if (all_drawn_at_once()) return num_draws_;
    int32_t& place = storage_.drawn[handed_on_ % kDrawsAhead];
    const uint32_t full = ptx::shared_address(&storage_.drawn_full[handed_on_ % kDrawsAhead]);
    const uint32_t empty = ptx::shared_address(&storage_.drawn_empty[handed_on_ % kDrawsAhead]);
    const uint32_t parity = handed_on_ / kDrawsAhead & 1;
    ++handed_on_;
    int draw;
    if constexpr (kDraws) {
      draw_ahead();
      is_drawn_ = false;
      draw = static_cast<int>(gridDim.x) + __shfl_sync(kFullWarp, drawn_, 0);
      ptx::barrier_wait(empty, parity ^ 1);
      if (lane_ == 0) place = draw;
      __syncwarp();
      ptx::barrier_arrive(full);
    } else {
      ptx::barrier_wait(full, parity);
      draw = place;
      ptx::barrier_arrive(empty);
    }
    return draw;
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int lane_;
  int num_draws_ = 0;  // draws of the plan: tickets times KV heads
  int drawn_ = 0;      // what the counter gave; only in lane 0 of the K producer
  bool is_drawn_ = false;
  int32_t num_kv_tokens_ = 0;
  uint32_t handed_on_ = 0;  // draws passed from the K producer to the V producer so far
};

}  // namespace pat
