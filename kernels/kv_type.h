// In which type the KV cache has its numbers.
#pragma once

namespace pat {

// What is not kAsQueries has one byte, and is converted to the type of the queries on its way into shared memory
// (pack_decode/kv_stages.cuh).
enum class KvType { kAsQueries, kE4m3, kE5m2 };

}  // namespace pat
