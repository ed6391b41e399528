// Which items a CTA executes: tickets, drawn until none is left, as batches that a warp's lanes hold one item each of.
#pragma once

#include "decode_params.h"
#include "pack_decode/work_queue.cuh"

namespace pat {

// Up to 32 neighbouring items of one ticket. count 0: there are no more.
struct ItemBatch {
  int first_item;
  int count;
  int ticket_end;  // end of the ticket's items
  int kv_head;
};

// A producer warp's view. The K producer draws, shortly before the present ticket ends: any earlier, and a ticket would
// wait for its CTA. It hands on what it drew to the V producer, so that both walk the same items.
template <typename Storage, bool kDraws>
class TicketQueue {
 public:
  __device__ TicketQueue(const DecodeParams& params, Storage& storage, int lane)
      : params_(params), storage_(storage), lane_(lane) {}

  // The first draw is the CTA's number, so that a small plan starts without waiting for the counter.
  __device__ __forceinline__ ItemBatch first() {
    const ItemBatch batch = batch_of(blockIdx.x);
    // Loaded beside the ticket, not before it: what lies behind the plan's tickets is read, but not used.
    const PlanHeader& header = *params_.plan.header;
    const int4 identity = *reinterpret_cast<const int4*>(&header);  // its first four fields
    num_draws_ = header.num_tickets * params_.num_kv_heads;
    if (identity.x != kPlanMagic || identity.y != kPlanVersion ||
        identity.z != params_.num_requests || identity.w != params_.rows.group_size) {
      __trap();  // no plan, or one of another batch than this graph was captured for
    }
    return static_cast<int>(blockIdx.x) < num_draws_ ? batch : none();
  }

  // Has the next draw on its way, once per ticket.
  __device__ __forceinline__ void draw_ahead() {
    if (!kDraws || is_drawn_ || all_drawn_at_once()) return;
    if (lane_ == 0) drawn_ = atomicAdd(&params_.tickets->num_draws, 1);
    is_drawn_ = true;
  }

  // stages: what the warp is filling meanwhile.
  template <typename Stages>
  __device__ __forceinline__ ItemBatch after(const ItemBatch& batch, Stages& stages) {
    const int next = batch.first_item + batch.count;
    if (next < batch.ticket_end) {
      return {next, min(32, batch.ticket_end - next), batch.ticket_end, batch.kv_head};
    }
    const int draw = next_draw(stages);
    return draw < num_draws_ ? batch_of(draw) : none();
  }

  // Once the K producer has drawn its last. That of the last CTA puts the counter back to zero.
  __device__ __forceinline__ void end() {
    if (all_drawn_at_once() || lane_ != 0) return;
    __threadfence();
    // Wraps around to 0 at the last CTA.
    if (atomicInc(&params_.tickets->num_ended, gridDim.x - 1) == gridDim.x - 1) {
      __threadfence();
      atomicExch(&params_.tickets->num_draws, 0);
    }
  }

 private:
  __device__ static ItemBatch none() { return {0, 0, 0, 0}; }

  __device__ __forceinline__ ItemBatch batch_of(int draw) const {
    const int ticket = max(min(draw / params_.num_kv_heads, params_.max_tickets - 1), 0);
    const int begin = params_.plan.ticket_begin[ticket];
    const int end = params_.plan.ticket_begin[ticket + 1];
    return {begin, min(32, end - begin), end, draw % params_.num_kv_heads};
  }

  __device__ __forceinline__ bool all_drawn_at_once() const {
    return num_draws_ <= static_cast<int>(gridDim.x);
  }

  template <typename Stages>
  __device__ __forceinline__ int next_draw(Stages& stages) {
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
      stages.wait(empty, parity ^ 1);
      if (lane_ == 0) place = draw;
      __syncwarp();
      ptx::barrier_arrive(full);
    } else {
      stages.wait(full, parity);
      draw = place;
      ptx::barrier_arrive(empty);
    }
    return draw;
  }

  const DecodeParams& params_;
  Storage& storage_;
  const int lane_;
  int num_draws_ = 0;  // tickets times KV heads
  int drawn_ = 0;      // the counter's answer, in lane 0 of the K producer
  bool is_drawn_ = false;
  uint32_t handed_on_ = 0;  // draws from the K producer to the V producer so far
};

}  // namespace pat
