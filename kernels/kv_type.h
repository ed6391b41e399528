// Element type of the KV cache.
#pragma once

namespace pat {

// All types but kAsQueries have one byte. They are copied into shared memory unconverted; pack_decode/mma_body.cuh and
// pack_decode/converter.cuh convert them to fp16.
enum class KvType { kAsQueries, kE4m3, kE5m2 };

}  // namespace pat
