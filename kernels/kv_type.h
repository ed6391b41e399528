// Element type of the KV cache.
#pragma once

namespace pat {

// kAsQueries: the two-byte type of the queries. Numbers of the other types have one byte. They are copied into shared
// memory unconverted. Converter warps (pack_decode/converter.cuh) or consumer warps (pack_decode/mma_body.cuh) convert
// them to fp16.
enum class KvType { kAsQueries, kE4m3, kE5m2 };

}  // namespace pat
