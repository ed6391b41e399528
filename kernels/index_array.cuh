// Device access to IndexArray.
#pragma once

#include "decode_params.h"

namespace pat {

__device__ __forceinline__ int64_t load_index(const IndexArray& array, int i) {
  return array.is_int64 ? static_cast<const int64_t*>(array.data)[i]
                        : static_cast<const int32_t*>(array.data)[i];
}

// Like load_index(), but bypasses L1, because the preceding kernel may write the array while this kernel already runs.
__device__ __forceinline__ int64_t load_index_past_l1(const IndexArray& array, int i) {
  return array.is_int64 ? __ldcg(reinterpret_cast<const long long*>(array.data) + i)
                        : int64_t{__ldcg(static_cast<const int32_t*>(array.data) + i)};
}

}  // namespace pat
