// Converter warps of pack_decode for one-byte KV on Hopper. They convert the values of each stage to fp16, in place,
// for wgmma. So each value is converted only once per tile, and before the consumers need it. Keys need no conversion
// (query_fp8_terms.cuh).
#pragma once

#include "pack_decode/work_queue.cuh"
#include "ptx/fp8.cuh"

namespace pat {

template <typename Dims>
class Converter {
 public:
  using Storage = SharedStorage<Dims>;

  __device__ Converter(Storage& storage, int warp, int lane)
      : storage_(storage), warp_(warp), lane_(lane) {}

  __device__ __forceinline__ void run() {
    for (;; ring_.advance()) {
      const int stage = ring_.stage;
      ptx::barrier_wait(ptx::shared_address(&storage_.kv_full[stage]), ring_.parity);
      const StageRecord record{__shfl_sync(kFullWarp, storage_.stage_records[stage].packed, 0)};
      if (record.is_end()) return;
      const uint32_t ready = ptx::shared_address(&storage_.kv_ready[stage]);
      if (record.is_for_wgmma()) {
        convert(ptx::shared_address(storage_.kv[stage]));
        ptx::fence_shared_memory();  // also publishes the keys, which other warps have copied
        __syncwarp();
      }
      if (lane_ == 0) ptx::barrier_arrive(ready);
      // If the stage is for a tile on mma.sync, its consumers do not wait for kv_ready. The converters wait in their
      // place, so that no phase of kv_ready completes without a waiter.
      if (!record.is_for_wgmma()) ptx::barrier_wait(ready, ring_.parity);
      // Arrives here last, so that the stage is filled again only after all converters have also arrived at kv_ready.
      // Every lane arrives for its own writes.
      ptx::barrier_arrive(ptx::shared_address(&storage_.kv_empty[stage]));
    }
  }

 private:
  // Converts the values of this warp's half of a stage's tokens.
  __device__ __forceinline__ void convert(uint32_t stage) {
    using Conversion = ValueConversion<Dims::kValue>;
    static_assert(Conversion::kFits);
    const Conversion conversion{.warp = warp_, .lane = lane_};
    uint4 bytes[Conversion::kCopies];
#pragma unroll
    for (int i = 0; i < Conversion::kCopies; ++i) {
      bytes[i] = ptx::load_shared_16(stage + kLandingOffset<Dims> + conversion.source(i));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Conversion::kCopies; ++i) {
      const auto halves = [](uint32_t word) { return fp8::convert<Dims::kKv>(word); };
      const uint2 first = halves(bytes[i].x), second = halves(bytes[i].y);
      const uint2 third = halves(bytes[i].z), fourth = halves(bytes[i].w);
      const uint32_t target = stage + Dims::kKeyBytes + conversion.target(i);
      ptx::store_shared_16(target, make_uint4(first.x, second.x, third.x, fourth.x));
      ptx::store_shared_16(target ^ kChunkBytes, make_uint4(first.y, second.y, third.y, fourth.y));
    }
  }

  Storage& storage_;
  const int warp_;  // index among the converter warps
  const int lane_;
  RingPosition<Storage::kStages> ring_;
};

}  // namespace pat
