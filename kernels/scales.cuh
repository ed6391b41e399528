// Scales of the KV cache. Scales of one-byte KV may be in device memory, because a weight update can change them after
// graphs have been captured. Threads load them early, long before they need them.
#pragma once

#include "decode_params.h"

namespace pat {

// For KV of the queries' type. The host knows the scales, so the kernel reads them from `params`, and they take no
// registers.
template <bool kIsFp8>
struct KvScales {
  __device__ __forceinline__ static KvScales load(const DecodeParams&) { return {}; }

  // Scale of the logits, which includes the scale of the keys. With a soft-cap, the key scale applies before tanh.
  template <bool kSoftCap>
  __device__ __forceinline__ const LogitScale& logit(const DecodeParams& params) const {
    return params.logit_scale;
  }
  __device__ __forceinline__ float value(const DecodeParams& params) const {
    return params.v_scale;
  }
};

template <>
struct KvScales<true> {
  float key;  // a factor in addition to params.logit_scale
  float values;

  // Call it after wait_for_dependencies(), because a preceding kernel may write the scales.
  __device__ __forceinline__ static KvScales load(const DecodeParams& params) {
    return {params.k_scale_on_device == nullptr ? 1.f : *params.k_scale_on_device,
            params.v_scale_on_device == nullptr ? params.v_scale : *params.v_scale_on_device};
  }

  template <bool kSoftCap>
  __device__ __forceinline__ LogitScale logit(const DecodeParams& params) const {
    LogitScale scale = params.logit_scale;
    (kSoftCap ? scale.inner : scale.outer) *= key;
    return scale;
  }
  __device__ __forceinline__ float value(const DecodeParams&) const { return values; }
};

}  // namespace pat
