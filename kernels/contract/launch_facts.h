// What the host must know to launch the kernels of a compiled module. Python reads these facts from a constant in the
// module.
#pragma once

#include <cstdint>

namespace pat {

struct LaunchFacts {
  int32_t decode_threads;
  int32_t decode_shared_bytes;  // dynamic
  int32_t merge_threads;
  int32_t merge_ctas_per_sm;
  int32_t merge_slices;  // merge_partials cuts an output row into this many rows
  int32_t gather_threads;
  int32_t fill_threads;
  int32_t write_threads;
};

}  // namespace pat
