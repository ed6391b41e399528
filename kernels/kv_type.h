// In which type the KV cache has its numbers.
#pragma once

namespace pat {

// What is not kAsQueries has one byte, lies in shared memory as in the cache, and is converted to fp16 by the consumers
// (pack_decode/mma_body.cuh, pack_decode/converting_body.cuh).
enum class KvType { kAsQueries, kE4m3, kE5m2 };

}  // namespace pat
