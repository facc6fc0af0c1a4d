// PTX instructions for attention. mma and ldmatrix are warp-wide; the layouts of fragments are
// those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, bypassing registers and L1. Zeros if not `valid`;
// then the source is not read.
__device__ __forceinline__ void copy_async(unsigned target, const void* source, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(target), "l"(__cvta_generic_to_global(source)), "r"(bytes)
                 : "memory");
}

// Copies 16 bytes that are read once, or zeros if not `valid`: evicted first from the L2 cache.
__device__ __forceinline__ void copy_once_async_if(bool wanted, unsigned target, const void* source,
                                                   bool valid) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;  // as createpolicy encodes it
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %3, 0;\n"
        "@wanted cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %4;\n"
        "}"
        :
        : "r"(target), "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0),
          "r"(static_cast<int>(wanted)), "l"(EVICT_FIRST)
        : "memory");
}

// Adds 1 and returns the previous value. The block's writes before its last barrier are visible to
// a thread that observes the increment, and to its block after a barrier. One fence by one thread
// replaces two by all threads.
__device__ __forceinline__ int count_arrival(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return before;
}

// Reads a counter; what happened before an increment that it includes is visible as for
// `count_arrival`.
__device__ __forceinline__ int load_acquired(const int* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return value;
}

// Copies `bytes` of 16, the others become zero; predicated on `wanted`, without a branch.
__device__ __forceinline__ void copy_part_async_if(bool wanted, unsigned target, const void* source,
                                                   int bytes) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %3, 0;\n"
        "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n"
        "}"
        :
        : "r"(target), "l"(__cvta_generic_to_global(source)), "r"(bytes),
          "r"(static_cast<int>(wanted))
        : "memory");
}

// Loads 16 bytes that no kernel writes and that are used once: not kept in L1, and evicted first
// from the L2 cache.
__device__ __forceinline__ uint4 load_once(const void* address) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;  // as createpolicy encodes it
    uint4 value;
    asm volatile(
        "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(__cvta_generic_to_global(address)), "l"(EVICT_FIRST));
    return value;
}

// Copies 16 bytes that are used once: evicted first from the L2 cache.
__device__ __forceinline__ void copy_once_if(bool wanted, unsigned target, const void* source) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;  // as createpolicy encodes it
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %3, 0;\n"
        "@wanted cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n"
        "}"
        :
        : "r"(target), "l"(__cvta_generic_to_global(source)), "l"(EVICT_FIRST),
          "r"(static_cast<int>(wanted))
        : "memory");
}

// The same of 16 bytes, or zeros if not `valid`.
__device__ __forceinline__ void copy_async_if(bool wanted, unsigned target, const void* source,
                                              bool valid) {
    copy_part_async_if(wanted, target, source, valid ? 16 : 0);
}

// Loads another block's data, bypassing L1; if not `wanted`, `other` in the first element and
// zeros.
__device__ __forceinline__ float2 load_if(bool wanted, const float2* address, float other = 0.0f) {
    float2 value = make_float2(other, 0.0f);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %3, 0;\n"
        "@wanted ld.global.cg.v2.f32 {%0, %1}, [%2];\n"
        "}"
        : "+f"(value.x), "+f"(value.y)
        : "l"(__cvta_generic_to_global(address)), "r"(static_cast<int>(wanted))
        : "memory");
    return value;
}

__device__ __forceinline__ float4 load_if(bool wanted, const float4* address) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
        : "l"(__cvta_generic_to_global(address)), "r"(static_cast<int>(wanted))
        : "memory");
    return value;
}

// Commits a group of this thread's copies; a group may be empty.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the `PENDING` most recent groups of this thread are in flight.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements; lane l addresses row l % 8 of matrix l / 8 and
// receives the elements (l / 4, 2 * (l % 4)) and the next one of each matrix.
__device__ __forceinline__ void load_matrices(unsigned (&out)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&out)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Stores four such matrices, which the lanes have and address likewise. Hopper only.
__device__ __forceinline__ void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c,
                                               unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements, distributed over the lanes as by load_matrices.
__device__ __forceinline__ unsigned transposed(unsigned word) {
    unsigned out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
    return out;
}

// c [16, 8] += a [16, 16] @ b [16, 8], in float32.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                            unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as a pair of T, `low` in the lower half.
template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <>
__device__ __forceinline__ unsigned pack<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// The inverse of `pack`.
template <typename T>
__device__ __forceinline__ float2 unpack(unsigned word);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(unsigned word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// 2^x; 0 for -inf.
__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ptx
