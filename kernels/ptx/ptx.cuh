// Inline PTX for asynchronous copies, mbarriers, matrix instructions and fast math. Only this file, fp8.cuh and
// wgmma.cuh contain inline PTX. Each function wraps one instruction and the operands that the instruction needs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace pat::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Without volatile, the compiler would compute values that derive from the lane id before a loop and keep them in
// registers throughout the loop.
__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// --- asynchronous copies ---

// Copies 16 bytes and bypasses L1, because a CTA reads each KV byte once.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The L2 cache policy evict_first, for data that is read once.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global,
                                              uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "l"(policy)
               : "memory");
}

// Copies 16 bytes if `valid`, else writes 16 bytes of zeros; `global` must be a valid address either way.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t shared, const void* global,
                                                      bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Makes writes to shared memory visible to wgmma: this thread's stores, and the asynchronous copies that it has waited
// for.
__device__ __forceinline__ void fence_shared_memory() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

// --- mbarriers ---

// The instruction takes its address from a uniform register. An address that differs between the lanes of a warp would
// become a loop over the lanes, so only one thread of a warp should call this.
__device__ __forceinline__ void barrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}

// Makes the barriers that this thread has initialised visible to TMA copies. Needs compute capability 9.0.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}" ::"r"(barrier)
      : "memory");
}

// Arrives kArrivals times at once. Needs compute capability 9.0.
template <int kArrivals>
__device__ __forceinline__ void barrier_arrive_for(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0], %1;\n"
      "}" ::"r"(barrier),
      "n"(kArrivals)
      : "memory");
}

// If `acts` is true, stores a word to shared memory and then arrives. Uses predicates instead of a branch.
__device__ __forceinline__ void store_and_arrive(uint32_t shared, uint32_t word, uint32_t barrier,
                                                 bool acts) {
  asm volatile(
      "{\n"
      ".reg .pred acts;\n"
      ".reg .b64 state;\n"
      "setp.ne.b32 acts, %3, 0;\n"
      "@acts st.shared.b32 [%0], %1;\n"
      "@acts mbarrier.arrive.shared.b64 state, [%2];\n"
      "}" ::"r"(shared),
      "r"(word), "r"(barrier), "r"(static_cast<int>(acts))
      : "memory");
}

// Makes the barrier count this thread's arrival once all copies that the thread has issued so far are complete. Does
// not wait for them.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase with this parity has completed, then converges the warp. On a new barrier, the phase with
// parity 1 counts as completed.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra finished;\n"  // not .uni: lanes of a warp may see the phase end at different times
      "bra wait;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
  __syncwarp();
}

// Synchronises kThreads threads of the CTA. Id 0 is the barrier of __syncthreads().
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Arrives at a named barrier without waiting for the other threads.
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// --- tensor maps ---

// Makes the barrier's current phase wait for copies of this many bytes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Copies the box at (column, row) of a tensor map, by TMA.
__device__ __forceinline__ void copy_box(uint32_t shared, const void* map, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t shared, const void* map, int column, int row,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// --- registers ---

// Raises or lowers each thread's number of registers to kRegisters. All warps of the warpgroup must call it.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- programmatic dependent launch ---

// Waits until the kernels that this launch depends on have finished. Does nothing on a plain launch.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets dependent kernels start before this kernel ends. A dependent kernel must call wait_for_dependencies() before it
// reads what this kernel writes.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- matrix fragments ---

using Fragment = uint32_t[4];

__device__ __forceinline__ void load_matrices(Fragment& dst, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst[0]), "=r"(dst[1]), "=r"(dst[2]), "=r"(dst[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(Fragment& dst, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst[0]), "=r"(dst[1]), "=r"(dst[2]), "=r"(dst[3])
               : "r"(address)
               : "memory");
}

// Needs compute capability 9.0.
__device__ __forceinline__ void store_matrices(uint32_t address, const Fragment& src) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(src[0]), "r"(src[1]), "r"(src[2]), "r"(src[3])
               : "memory");
}

// acc[16x8] += a[16x16] * b[16x8], fp32 accumulation.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&acc)[4], const Fragment& a, uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&acc)[4], const Fragment& a,
                                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&acc)[4], const Fragment& a,
                                                     uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to T and packs them into one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Unpacks a register of two T into floats, the lower half first.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t packed) {
  return {__half2float(__ushort_as_half(packed & 0xffff)),
          __half2float(__ushort_as_half(packed >> 16))};
}

// --- fast math. Relative error 2^-22 for exp2, 2^-23 for reciprocal, 2^-11 for tanh; absolute 2^-22 for log2 ---

__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace pat::ptx
