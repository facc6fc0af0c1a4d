// Hopper instructions for attention: mbarriers, TMA copies and wgmma. sm_90a only.
#pragma once


#include "attention/attention_ptx.cuh"
#include "common.cuh"

namespace hopper {

// A tensor map for TMA, encoded by the host.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// ---------------------------------------------------------------- barriers

// An mbarrier: a phase completes when all expected arrivals and bytes have come. Addresses are in
// the shared window.
__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect_tx(unsigned barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Waits for the completion of the phase with this parity. A new barrier is in phase 0; waiting for
// parity 1 then returns immediately.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Named barrier for a group of so many threads.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Makes earlier writes to shared memory by this thread visible to later TMA copies and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- copies

// Copies the box at (0, 0, x, 0, y), contiguous dimension first; zeros outside the tensor.
__device__ __forceinline__ void tma_load(unsigned target, const TensorMap& map, int x, int y,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %3, %4, %3, %5}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(0), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---------------------------------------------------------------- products

// Descriptor of a matrix in shared memory, in atoms of 8 rows x 64 columns, each 1024 bytes and
// aligned to that, with its 16-byte chunks swizzled. The stride is 1024 bytes between atoms of the
// same rows, and ROWS_APART between groups of 8 rows. (`address` + `offset`) is the address of the
// first element.
template <int ROWS_APART>
__device__ __forceinline__ unsigned long long smem_descriptor(unsigned address, int offset) {
    constexpr unsigned COLUMNS_APART = 1024 >> 4 << 16;
    constexpr unsigned SWIZZLE_128 = 1u << 30;
    const unsigned low = (COLUMNS_APART | (address & 0x3ffff) >> 4) + (offset >> 4);
    return static_cast<unsigned long long>(SWIZZLE_128 | ROWS_APART >> 4) << 32 | low;
}

// Offset of a 16-byte chunk of a row in such an atom.
__device__ __forceinline__ int swizzle(int row, int chunk) {
    return row * 128 + ((chunk ^ row) << 4);
}

// Required before the first wgmma, and after other instructions wrote its registers.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the PENDING most recent groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of registers across this point.
template <int N>
__device__ __forceinline__ void fence_operand(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int N>
__device__ __forceinline__ void fence_operand(unsigned (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

#define ATTENTION_8(c, i)                                                                     \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define ATTENTION_32(c, i) \
    ATTENTION_8(c, i), ATTENTION_8(c, i + 8), ATTENTION_8(c, i + 16), ATTENTION_8(c, i + 24)
#define ATTENTION_0_TO_31                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTENTION_32_TO_63                                                                        \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c [64, N] = a [64, 16] @ b [16, N], or += if `add`. a is in registers, four per lane, as for
// mma.m16n8k16; b is in shared memory, and is contracted over its rows, or its columns if
// TRANSPOSED.
#define ATTENTION_MULTIPLY_128(T)                                                            \
    asm volatile(                                                                            \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                     \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." T "." T " {" ATTENTION_0_TO_31 ", "   \
        ATTENTION_32_TO_63 "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"                \
        : ATTENTION_32(c, 0), ATTENTION_32(c, 32)                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),    \
          "n"(TRANSPOSED ? 0 : 1))
#define ATTENTION_MULTIPLY_64(T)                                                             \
    asm volatile(                                                                            \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                     \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." T "." T " {" ATTENTION_0_TO_31         \
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"                                   \
        : ATTENTION_32(c, 0)                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),    \
          "n"(TRANSPOSED ? 0 : 1))

template <typename T, bool TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&c)[64], const unsigned* a, unsigned long long b,
                                         bool add) {
    if constexpr (SAME<T, __half>)
        ATTENTION_MULTIPLY_128("f16");
    else
        ATTENTION_MULTIPLY_128("bf16");
}

template <typename T, bool TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&c)[32], const unsigned* a, unsigned long long b,
                                         bool add) {
    if constexpr (SAME<T, __half>)
        ATTENTION_MULTIPLY_64("f16");
    else
        ATTENTION_MULTIPLY_64("bf16");
}

#undef ATTENTION_MULTIPLY_64
#undef ATTENTION_MULTIPLY_128
#undef ATTENTION_32_TO_63
#undef ATTENTION_0_TO_31
#undef ATTENTION_32
#undef ATTENTION_8

// ---------------------------------------------------------------- registers

// Sets the registers per thread of this warpgroup.
template <int N>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace hopper
