// Which items a CTA executes: tickets, drawn until none is left.
#pragma once

#include "pat/decode_params.h"
#include "pat/item_source.cuh"
#include "pat/work_queue.cuh"

namespace pat {

// Its first item is loaded with it, so that work begins one load earlier. The further ones are [next, end).
struct Ticket {
  PlannedItem first;
  int next;  // the first that has not been taken yet
  int end;
  int kv_head;

  __device__ static Ticket none() { return {}; }
  __device__ bool is_none() const { return first.head.y == 0; }  // every item has requests
};

// A producer warp's view. The K producer draws, shortly before the present ticket ends: any earlier, and a ticket would
// wait for its CTA. It hands on what it drew to the V producer, so that both walk the same items.
template <typename Storage, bool kDraws>
class TicketQueue {
 public:
  __device__ TicketQueue(const DecodeParams& params, Storage& storage, int lane)
      : params_(params), storage_(storage), lane_(lane) {}

  // The first draw is the CTA's number, so that a small plan starts without waiting for the counter.
  __device__ __forceinline__ Ticket first() {
    const int draw = blockIdx.x;
    if (draw / params_.num_kv_heads >= params_.max_tickets) return Ticket::none();
    const Ticket ticket = load(draw);
    // Loaded beside the ticket, not before it: what lies behind the plan's tickets is read, but not used.
    num_draws_ = params_.plan.header->num_tickets * params_.num_kv_heads;
    return draw < num_draws_ ? ticket : Ticket::none();
  }

  // Has the next draw on its way, once per ticket.
  __device__ __forceinline__ void draw_ahead() {
    if (!kDraws || is_drawn_ || all_drawn_at_once()) return;
    if (lane_ == 0) drawn_ = atomicAdd(params_.num_draws, 1);
    is_drawn_ = true;
  }

  // The next ticket; none if all have been drawn.
  __device__ __forceinline__ Ticket draw() {
    const int draw = next_draw();
    return draw < num_draws_ ? load(draw) : Ticket::none();
  }

 private:
  __device__ __forceinline__ Ticket load(int draw) const {
    const int ticket = draw / params_.num_kv_heads;
    const int32_t* further_begin = params_.plan.further_begin + ticket;
    return {.first = PlannedItem::load(params_, ticket),
            .next = further_begin[0],
            .end = further_begin[1],
            .kv_head = draw % params_.num_kv_heads};
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
  int num_draws_ = 0;  // tickets times KV heads
  int drawn_ = 0;      // the counter's answer, in lane 0 of the K producer
  bool is_drawn_ = false;
  uint32_t handed_on_ = 0;  // draws from the K producer to the V producer so far
};

}  // namespace pat
