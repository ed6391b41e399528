// Launch facts of a variant's kernels: a constant of the compiled module, which Python reads.
#pragma once

#include <cstdint>

namespace pat {

struct LaunchFacts {
  int32_t decode_threads;
  int32_t decode_shared_bytes;  // dynamic
  int32_t merge_threads;
  int32_t merge_ctas_per_sm;
  int32_t merge_slices;  // rows of merge_partials that a query head of a request has
  int32_t gather_threads;
  int32_t fill_threads;
  int32_t write_threads;
};

}  // namespace pat
