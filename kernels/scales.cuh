// Scales of the KV cache. Over one-byte KV they may lie on the device: a weight update then changes them under captured
// graphs. They are read where they are used, from the L1, and take no register in between.
#pragma once

#include "decode_params.h"

namespace pat {

// Scale of the keys that the host does not have; 1 if it has it.
__device__ __forceinline__ float key_scale_on_device(const DecodeParams& params) {
  return params.k_scale_on_device == nullptr ? 1.f : *params.k_scale_on_device;
}

// Scale of the logits, that of the keys included. With a soft-cap, scores are scaled before it.
template <bool kOneByte, bool kSoftCap>
__device__ __forceinline__ decltype(auto) logit_scale(const DecodeParams& params) {
  if constexpr (kOneByte) {
    LogitScale scale = params.logit_scale;
    (kSoftCap ? scale.inner : scale.outer) *= key_scale_on_device(params);
    return scale;
  } else {
    return (params.logit_scale);
  }
}

// Scale of the values.
template <bool kOneByte>
__device__ __forceinline__ float value_scale(const DecodeParams& params) {
  if constexpr (kOneByte) {
    if (params.v_scale_on_device != nullptr) return *params.v_scale_on_device;
  }
  return params.v_scale;
}

}  // namespace pat
