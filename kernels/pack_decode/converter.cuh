// What converter warps do: they make the values of each stage fp16, in place, for wgmma. Keys are multiplied as they are
// (query_terms.cuh). So a number is converted once, by warps that nobody waits for: they are as many stages ahead of the
// consumers as the copies are.
#pragma once

#include "pack_decode/work_queue.cuh"
#include "ptx/fp8.cuh"

namespace pat {

template <typename Dims>
class Converter {
 public:
  using Storage = SharedStorage<Dims>;

  __device__ Converter(Storage& storage, int warp, uint32_t lane)
      : storage_(storage), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void run() {
    for (;; ring_.advance()) {
      const int stage = ring_.stage;
      ptx::barrier_wait(ptx::shared_address(&storage_.kv_full[stage]), ring_.parity);
      const StageRecord record{__shfl_sync(kFullWarp, storage_.stage_records[stage].packed, 0)};
      if (record.is_end()) return;
      if (record.is_for_wgmma()) {
        convert(ptx::shared_address(storage_.kv[stage]));
        ptx::fence_shared_writes();  // and for the keys, which others have copied
        __syncwarp();
      }
      if (lane_ == 0) {
        ptx::barrier_arrive(ptx::shared_address(&storage_.kv_ready[stage]));
        ptx::barrier_arrive(ptx::shared_address(&storage_.kv_empty[stage]));
      }
    }
  }

 private:
  // This warp's half of a stage's tokens. What a token becomes lies where it was, and in the panels before. The columns of
  // every 16 get an order in which a lane has four that touch in its accumulators.
  __device__ __forceinline__ void convert(uint32_t stage) {
    constexpr int kChunks = Dims::kValue / 16;
    constexpr int kTokens = kStageTokens / kConverterWarps;
    constexpr int kCopies = kTokens * kChunks / 32;
    static_assert(32 % kChunks == 0 && kTokens * kChunks % 32 == 0);
    const uint32_t chunk = lane_ % kChunks;
    // The second panel's tokens are swapped in pairs: lanes that write at the same time meet in no bank.
    const uint32_t first_token = warp_ * kTokens + (lane_ / kChunks ^ chunk / 4 % 2);
    uint4 words[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      words[i] = ptx::load_shared_16(
          stage + kLandingOffset<Dims> +
          swizzled_offset(kStageTokens, first_token + i * (32 / kChunks), chunk));
    }
    __syncwarp();
    const auto to_halves = [](uint32_t word) { return fp8::convert<Dims::kKv>(word); };
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint2 first = to_halves(words[i].x), second = to_halves(words[i].y);
      const uint2 third = to_halves(words[i].z), fourth = to_halves(words[i].w);
      const uint32_t target =
          stage + Dims::kKeyBytes +
          swizzled_offset(kStageTokens, first_token + i * (32 / kChunks), 2 * chunk);
      ptx::store_shared_16(target, make_uint4(first.x, second.x, third.x, fourth.x));
      ptx::store_shared_16(target ^ kChunkBytes, make_uint4(first.y, second.y, third.y, fourth.y));
    }
  }

  Storage& storage_;
  const int warp_;  // of the converters
  const uint32_t lane_;
  RingPosition<Storage::kStages> ring_;
};

}  // namespace pat
