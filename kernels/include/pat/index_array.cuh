// Device access to IndexArray.
#pragma once

#include "pat/decode_params.h"

namespace pat {

// An entry, which is not negative and below 2^31: of an int64, the low half. One load and no branch either way, so
// that nothing waits before the entry is used.
__device__ __forceinline__ int32_t load_index(const IndexArray& array, int i) {
  return static_cast<const int32_t*>(array.data)[array.is_int64 ? 2 * int64_t{i} : int64_t{i}];
}

}  // namespace pat
