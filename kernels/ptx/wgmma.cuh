// Warpgroup matrix instructions of Hopper (sm_90a). They multiply 64 rows at once, and read the right-hand side from
// shared memory once for all four warps.
//
// A left-hand side in registers has the layout of ptx::Fragment. Accumulators have the layout of mma.m16n8k16; warp w
// of the warpgroup holds rows 16 w to 16 w + 15.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_type.h"
#include "ptx/ptx.cuh"

namespace pat::wgmma {

// A matrix in the 128-byte swizzle. The descriptor of a part of it is the matrix's descriptor plus an offset. For keys
// (contiguous along k), kStrideBytes is the distance between groups of 8 rows along n, and kLeadingBytes is unused. For
// values (contiguous along n), kStrideBytes is the distance between groups of 8 rows along k, and kLeadingBytes is the
// distance between panels of 64 columns along n.
template <uint32_t kLeadingBytes, uint32_t kStrideBytes>
struct Operand {
  uint32_t low;

  __device__ __forceinline__ explicit Operand(uint32_t address)
      : low((address >> 4) + (kLeadingBytes >> 4 << 16)) {}

  // Descriptor of the part that begins `offset` bytes after the start.
  __device__ __forceinline__ uint64_t at(uint32_t offset) const {
    constexpr uint32_t kSwizzle128 = 1u << 30;
    return uint64_t{kSwizzle128 | kStrideBytes >> 4} << 32 | (low + (offset >> 4));
  }
};

// Orders earlier register writes before the multiplications that follow.
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of all multiplications issued since the previous commit().
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the latest kGroups groups are still running.
template <int kGroups>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this point. Emits no instruction.
template <int kTiles>
__device__ __forceinline__ void tie(float (&acc)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[tile][i])::"memory");
  }
}

// Returns the same address, but hides this from the compiler. The compiler then computes derived addresses again
// instead of keeping them in registers.
__device__ __forceinline__ uint32_t computed_again(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

// PAT_ACCUMULATOR_n: the registers of an accumulator of n tiles, as asm operands. PAT_PLACES_n: the placeholders of
// these operands, from %0 on.
#define PAT_TILE(acc, i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define PAT_TILES_4(acc, i) \
  PAT_TILE(acc, i), PAT_TILE(acc, (i) + 1), PAT_TILE(acc, (i) + 2), PAT_TILE(acc, (i) + 3)
#define PAT_ACCUMULATOR_4(acc) PAT_TILES_4(acc, 0)
#define PAT_ACCUMULATOR_8(acc) PAT_TILES_4(acc, 0), PAT_TILES_4(acc, 4)
#define PAT_ACCUMULATOR_16(acc) PAT_ACCUMULATOR_8(acc), PAT_TILES_4(acc, 8), PAT_TILES_4(acc, 12)
#define PAT_ACCUMULATOR_32(acc)                                                              \
  PAT_ACCUMULATOR_16(acc), PAT_TILES_4(acc, 16), PAT_TILES_4(acc, 20), PAT_TILES_4(acc, 24), \
      PAT_TILES_4(acc, 28)
#define PAT_PLACES_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PAT_PLACES_8 \
  PAT_PLACES_4       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PAT_PLACES_16                                                                \
  PAT_PLACES_8                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PAT_PLACES_32                                                                    \
  PAT_PLACES_16                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"     \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109"     \
  ", %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123" \
  ", %124, %125, %126, %127"

// acc[64x32] (+)= a * b, where b has 32 keys and as many columns as one instruction multiplies. `flags`: the
// instruction's last operands.
#define PAT_MULTIPLY_KEYS(instruction, flags)                       \
  asm volatile(                                                     \
      "{\n"                                                         \
      ".reg .pred accumulate;\n"                                    \
      "setp.ne.b32 accumulate, %21, 0;\n"                           \
      "wgmma.mma_async.sync.aligned." instruction " {" PAT_PLACES_4 \
      "}, {%16, %17, %18, %19}, %20, accumulate, " flags            \
      ";\n"                                                         \
      "}"                                                           \
      : PAT_ACCUMULATOR_4(acc)                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))

// acc[64x32] (+)= a[64x16] * b[16x32], both of type T.
template <typename T>
__device__ __forceinline__ void multiply_keys(float (&acc)[4][4], const ptx::Fragment& a,
                                              uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_KEYS("m64n32k16.f32.f16.f16", "1, 1, 0");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_KEYS("m64n32k16.f32.bf16.bf16", "1, 1, 0");
  }
}

// acc[64 x keys] (+)= a[64x16] * b[16 x keys], both of type T and from shared memory. `left`, `right`, `predicate`: asm
// placeholders of the operands.
#define PAT_MULTIPLY_SHARED_KEYS(type, keys, tiles, left, right, predicate)                     \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred accumulate;\n"                                                                \
      "setp.ne.b32 accumulate, " predicate                                                      \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" keys "k16.f32." type "." type " {" PAT_PLACES_##tiles \
      "}, " left ", " right                                                                     \
      ", accumulate, 1, 1, 0, 0;\n"                                                             \
      "}"                                                                                       \
      : PAT_ACCUMULATOR_##tiles(acc)                                                            \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define PAT_MULTIPLY_SHARED_KEYS_32(type) \
  PAT_MULTIPLY_SHARED_KEYS(type, "32", 4, "%16", "%17", "%18")
#define PAT_MULTIPLY_SHARED_KEYS_64(type) \
  PAT_MULTIPLY_SHARED_KEYS(type, "64", 8, "%32", "%33", "%34")

template <typename T>
__device__ __forceinline__ void multiply_shared_keys(float (&acc)[4][4], uint64_t a, uint64_t b,
                                                     bool accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_SHARED_KEYS_32("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_SHARED_KEYS_32("bf16");
  }
}

template <typename T>
__device__ __forceinline__ void multiply_shared_keys(float (&acc)[8][4], uint64_t a, uint64_t b,
                                                     bool accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_SHARED_KEYS_64("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_SHARED_KEYS_64("bf16");
  }
}

// acc[64x32] (+)= a[64x32] * b[32x32], where a is e4m3, and b is e4m3 or e5m2. From one instruction to the next, the
// hardware keeps only 13 mantissa bits of the sums.
template <KvType kType>
__device__ __forceinline__ void multiply_byte_keys(float (&acc)[4][4], const ptx::Fragment& a,
                                                   uint64_t b, bool accumulate) {
  if constexpr (kType == KvType::kE4m3) {
    PAT_MULTIPLY_KEYS("m64n32k32.f32.e4m3.e4m3", "1, 1");
  } else {
    static_assert(kType == KvType::kE5m2);
    PAT_MULTIPLY_KEYS("m64n32k32.f32.e4m3.e5m2", "1, 1");
  }
}

// acc[64 x columns] += a[64x16] * b[16 x columns], where b is the values of 16 tokens. `left`, `right`: asm
// placeholders of the operands.
#define PAT_MULTIPLY_VALUES(type, columns, tiles, left, right)                                     \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" PAT_PLACES_##tiles \
      "}, {" left "}, " right                                                                      \
      ", 1, 1, 1, 1;\n"                                                                            \
      "}"                                                                                          \
      : PAT_ACCUMULATOR_##tiles(acc)                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PAT_MULTIPLY_VALUES_64(type) PAT_MULTIPLY_VALUES(type, "64", 8, "%32, %33, %34, %35", "%36")
#define PAT_MULTIPLY_VALUES_128(type) \
  PAT_MULTIPLY_VALUES(type, "128", 16, "%64, %65, %66, %67", "%68")
#define PAT_MULTIPLY_VALUES_256(type) \
  PAT_MULTIPLY_VALUES(type, "256", 32, "%128, %129, %130, %131", "%132")

template <typename T>
__device__ __forceinline__ void multiply_values(float (&acc)[8][4], const ptx::Fragment& a,
                                                uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_VALUES_64("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_VALUES_64("bf16");
  }
}

template <typename T>
__device__ __forceinline__ void multiply_values(float (&acc)[16][4], const ptx::Fragment& a,
                                                uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_VALUES_128("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_VALUES_128("bf16");
  }
}

template <typename T>
__device__ __forceinline__ void multiply_values(float (&acc)[32][4], const ptx::Fragment& a,
                                                uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_VALUES_256("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_VALUES_256("bf16");
  }
}

// acc[64x256] += a[64x16] * b[16x256], both of type T and from shared memory.
#define PAT_MULTIPLY_SHARED_VALUES(type)                                              \
  asm volatile(                                                                       \
      "{\n"                                                                           \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" PAT_PLACES_32 \
      "}, %128, %129, 1, 1, 1, 0, 1;\n"                                               \
      "}"                                                                             \
      : PAT_ACCUMULATOR_32(acc)                                                       \
      : "l"(a), "l"(b))

template <typename T>
__device__ __forceinline__ void multiply_shared_values(float (&acc)[32][4], uint64_t a,
                                                       uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PAT_MULTIPLY_SHARED_VALUES("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    PAT_MULTIPLY_SHARED_VALUES("bf16");
  }
}

#undef PAT_MULTIPLY_SHARED_VALUES
#undef PAT_MULTIPLY_VALUES_256
#undef PAT_MULTIPLY_VALUES_128
#undef PAT_MULTIPLY_VALUES_64
#undef PAT_MULTIPLY_VALUES
#undef PAT_MULTIPLY_SHARED_KEYS_64
#undef PAT_MULTIPLY_SHARED_KEYS_32
#undef PAT_MULTIPLY_SHARED_KEYS
#undef PAT_MULTIPLY_KEYS
#undef PAT_PLACES_32
#undef PAT_PLACES_16
#undef PAT_PLACES_8
#undef PAT_PLACES_4
#undef PAT_ACCUMULATOR_32
#undef PAT_ACCUMULATOR_16
#undef PAT_ACCUMULATOR_8
#undef PAT_ACCUMULATOR_4
#undef PAT_TILES_4
#undef PAT_TILE

}  // namespace pat::wgmma
