// Type of the numbers in the KV cache.
#pragma once

namespace pat {

// Types except kAsQueries have one byte, and come into shared memory as the cache has them. Conversion to fp16 is in
// pack_decode/mma_body.cuh and pack_decode/converter.cuh.
enum class KvType { kAsQueries, kE4m3, kE5m2 };

}  // namespace pat
