// In which type the KV cache has its numbers.
#pragma once

namespace pat {

// What is not kAsQueries has one byte, and comes into shared memory as the cache has it. What converts it to fp16 is in
// pack_decode/mma_body.cuh and pack_decode/converter.cuh.
enum class KvType { kAsQueries, kE4m3, kE5m2 };

}  // namespace pat
