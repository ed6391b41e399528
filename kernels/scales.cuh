// Scales of the KV cache. Over one-byte KV they may lie on the device: a weight update then changes them under captured
// graphs. Each thread loads them at its start, where nothing waits for them yet.
#pragma once

#include "decode_params.h"

namespace pat {

// Over KV of the queries' type: the host has the scales, and they cost no register.
template <bool kIsFp8>
struct KvScales {
  __device__ __forceinline__ static KvScales load(const DecodeParams&) { return {}; }

  // Scale of the logits, that of the keys included. With a soft-cap, scores are scaled before it.
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
  float key;  // in addition to the host's part in logit_scale
  float values;

  // Must be called after wait_for_dependencies().
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
