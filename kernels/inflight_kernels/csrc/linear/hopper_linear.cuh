// Shared by the Hopper linear kernels: TMA copies of boxes of a matrix, mbarriers, and wgmma.
// sm_90a only.
#pragma once

#include "cluster.cuh"
#include "eight_bit.cuh"

// Columns of a stage: 128 bytes, the width of a swizzled row in shared memory.
template <typename T>
constexpr int STAGE_DEPTH = 128 / static_cast<int>(sizeof(T));

// The tensor cores accumulate products of e4m3 with some 14 bits of mantissa. After so many stages,
// 256 columns, sums are added to others in float32 (DeepSeek-V3, arXiv:2412.19437, 3.3.2, adds them
// every 128 columns). Those of int8 are integers, which float32 has exactly: below 2^24.
constexpr int PROMOTED_STAGES = 2;

// Bytes of weights that a block requests at once while the preceding kernel still runs: as many as
// keep memory busy. What that kernel reads last, and then x, waits behind all that has been
// requested before. Measured on an H200 (benchmarks/notes.md).
constexpr int EARLY_BYTES = 48 * 1024;

// Stages of so many bytes that are requested at once.
__device__ inline int early_stages(int stage_bytes) { return max(1, EARLY_BYTES / stage_bytes); }

// CUtensorMap: the layout of a matrix in memory, and the box of a copy.
struct alignas(64) TensorMap {
    char opaque[128];
};

// The gate of an MLP (arXiv:2002.05202).
__device__ inline float silu_mul(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// ---------------------------------------------------------------- barriers in shared memory

typedef unsigned long long Barrier;

__device__ inline void init_barrier(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

// Make initialized barriers visible to TMA and, together with a cluster barrier, to the cluster.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrive, and expect so many bytes of copies before the phase completes.
__device__ inline void arrive_expect_tx(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Wait for the completion of the phase with this parity. A new barrier is in phase 0; waiting for
// parity 1 then returns immediately.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---------------------------------------------------------------- copies of boxes

__device__ inline void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copy the box at (row, column) to shared memory, swizzled as in the map; zeros past the matrix.
__device__ inline void tma_load(void* shared, const TensorMap* map, int row, int column,
                                Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// Like tma_load, for values that are used once: evicted first from the L2 cache.
__device__ inline void tma_load_evict_first(void* shared, const TensorMap* map, int row, int column,
                                            Barrier* barrier) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;  // as createpolicy encodes it
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
        : "memory");
}

// The same of a map with three dimensions, from the start of the innermost one.
__device__ inline void tma_load_3d_evict_first(void* shared, const TensorMap* map, int outer,
                                               int middle, Barrier* barrier) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
        "l"(map), "r"(0), "r"(middle), "r"(outer), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
        : "memory");
}

// Copy adjacent bytes to shared memory: a multiple of 16, as both addresses are.
__device__ inline void copy_bytes(void* shared, const void* from, int bytes, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// ---------------------------------------------------------------- wgmma

// What the tensor cores accumulate products of T in.
template <typename T>
struct Accumulator {
    using type = float;
};
template <>
struct Accumulator<Int8> {
    using type = int;
};
template <typename T>
using Sum = typename Accumulator<T>::type;

// Keep the compiler from moving accesses to the registers of a product across this point.
template <int N>
__device__ void fence_operand(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(acc[i])::"memory");
}

template <int N>
__device__ void fence_operand(int (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(acc[i])::"memory");
}

// Required before products, with all of their registers fenced.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Descriptor of a matrix in shared memory with rows of 128 bytes, swizzled in atoms of 8 rows, 1024
// bytes; `next` is from one atom to the next one, 0 to repeat the first. Add 2 for the next 32 bytes
// of each row.
__device__ inline unsigned long long smem_descriptor(const void* shared, int next = 1024) {
    constexpr unsigned long long SWIZZLE_128B = 1ull << 62;
    return SWIZZLE_128B | static_cast<unsigned long long>(next / 16) << 32 | 1ull << 16 |
           (shared_address(shared) & 0x3ffff) >> 4;
}

__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most the PENDING most recent groups of products are in flight.
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// acc[64 x N] = a[64 x 32 bytes] @ b[N x 32 bytes]^T, or += if `add`. Thread t of the warpgroup
// holds, with w = t / 32, g = t % 32 / 4 and q = t % 4, of columns 8j + 2q and 8j + 2q + 1: in
// acc[4j] and acc[4j + 1] row 16w + g, in acc[4j + 2] and acc[4j + 3] row 16w + g + 8.
template <typename T, int N>
__device__ void wgmma(Sum<T> (&acc)[N / 2], unsigned long long a, unsigned long long b, bool add);

// The operands %0 to %<n - 1>, and the accumulators bound to them: C is "+f" or "+r".
#define PRODUCT_ACC_TO_4(C) C(acc[0]), C(acc[1]), C(acc[2]), C(acc[3])
#define PRODUCT_ACC_8(C, i)                                                   \
    C(acc[i]), C(acc[i + 1]), C(acc[i + 2]), C(acc[i + 3]), C(acc[i + 4]), \
        C(acc[i + 5]), C(acc[i + 6]), C(acc[i + 7])
#define PRODUCT_ACC_TO_8(C) PRODUCT_ACC_8(C, 0)
#define PRODUCT_ACC_TO_16(C) PRODUCT_ACC_TO_8(C), PRODUCT_ACC_8(C, 8)
#define PRODUCT_ACC_TO_24(C) PRODUCT_ACC_TO_16(C), PRODUCT_ACC_8(C, 16)
#define PRODUCT_ACC_TO_32(C) PRODUCT_ACC_TO_24(C), PRODUCT_ACC_8(C, 24)
#define PRODUCT_ACC_TO_40(C) PRODUCT_ACC_TO_32(C), PRODUCT_ACC_8(C, 32)
#define PRODUCT_ACC_TO_48(C) PRODUCT_ACC_TO_40(C), PRODUCT_ACC_8(C, 40)
#define PRODUCT_ACC_TO_56(C) PRODUCT_ACC_TO_48(C), PRODUCT_ACC_8(C, 48)
#define PRODUCT_ACC_TO_64(C) PRODUCT_ACC_TO_56(C), PRODUCT_ACC_8(C, 56)
#define PRODUCT_ACC_TO_72(C) PRODUCT_ACC_TO_64(C), PRODUCT_ACC_8(C, 64)
#define PRODUCT_ACC_TO_80(C) PRODUCT_ACC_TO_72(C), PRODUCT_ACC_8(C, 72)
#define PRODUCT_ACC_TO_88(C) PRODUCT_ACC_TO_80(C), PRODUCT_ACC_8(C, 80)
#define PRODUCT_ACC_TO_96(C) PRODUCT_ACC_TO_88(C), PRODUCT_ACC_8(C, 88)
#define PRODUCT_ACC_TO_104(C) PRODUCT_ACC_TO_96(C), PRODUCT_ACC_8(C, 96)
#define PRODUCT_ACC_TO_112(C) PRODUCT_ACC_TO_104(C), PRODUCT_ACC_8(C, 104)
#define PRODUCT_ACC_TO_120(C) PRODUCT_ACC_TO_112(C), PRODUCT_ACC_8(C, 112)
#define PRODUCT_ACC_TO_128(C) PRODUCT_ACC_TO_120(C), PRODUCT_ACC_8(C, 120)
#define PRODUCT_TO_4 "%0, %1, %2, %3"
#define PRODUCT_TO_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PRODUCT_TO_16 PRODUCT_TO_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PRODUCT_TO_24 PRODUCT_TO_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PRODUCT_TO_32 PRODUCT_TO_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PRODUCT_TO_40 PRODUCT_TO_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PRODUCT_TO_48 PRODUCT_TO_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PRODUCT_TO_56 PRODUCT_TO_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PRODUCT_TO_64 PRODUCT_TO_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PRODUCT_TO_72 PRODUCT_TO_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PRODUCT_TO_80 PRODUCT_TO_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PRODUCT_TO_88 PRODUCT_TO_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PRODUCT_TO_96 PRODUCT_TO_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PRODUCT_TO_104 PRODUCT_TO_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PRODUCT_TO_112 PRODUCT_TO_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PRODUCT_TO_120 PRODUCT_TO_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PRODUCT_TO_128 PRODUCT_TO_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// HALF = N / 2; A, B and ADD are HALF, HALF + 1 and HALF + 2. Integers take no flags.
#define PRODUCT_MULTIPLY_AS(T, K, SUM, C, TYPE, FLAGS, N, HALF, A, B, ADD)                   \
    template <>                                                                              \
    __device__ inline void wgmma<T, N>(Sum<T>(&acc)[HALF], unsigned long long a,             \
                                       unsigned long long b, bool add) {                     \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N K "." SUM "." TYPE "." TYPE " {" \
                     PRODUCT_TO_##HALF "}, %" #A ", %" #B ", add" FLAGS ";\n}"               \
                     : PRODUCT_ACC_TO_##HALF(C)                                              \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                          \
    }
#define PRODUCT_MULTIPLY(N, HALF, A, B, ADD)                                                       \
    PRODUCT_MULTIPLY_AS(__nv_bfloat16, "k16", "f32", "+f", "bf16", ", 1, 1, 0, 0", N, HALF, A, B,  \
                        ADD)                                                                       \
    PRODUCT_MULTIPLY_AS(__half, "k16", "f32", "+f", "f16", ", 1, 1, 0, 0", N, HALF, A, B, ADD)     \
    PRODUCT_MULTIPLY_AS(Fp8, "k32", "f32", "+f", "e4m3", ", 1, 1", N, HALF, A, B, ADD)            \
    PRODUCT_MULTIPLY_AS(Int8, "k32", "s32", "+r", "s8", "", N, HALF, A, B, ADD)

PRODUCT_MULTIPLY(8, 4, 4, 5, 6)
PRODUCT_MULTIPLY(16, 8, 8, 9, 10)
PRODUCT_MULTIPLY(32, 16, 16, 17, 18)
PRODUCT_MULTIPLY(48, 24, 24, 25, 26)
PRODUCT_MULTIPLY(64, 32, 32, 33, 34)
PRODUCT_MULTIPLY(80, 40, 40, 41, 42)
PRODUCT_MULTIPLY(96, 48, 48, 49, 50)
PRODUCT_MULTIPLY(112, 56, 56, 57, 58)
PRODUCT_MULTIPLY(128, 64, 64, 65, 66)
PRODUCT_MULTIPLY(144, 72, 72, 73, 74)
PRODUCT_MULTIPLY(160, 80, 80, 81, 82)
PRODUCT_MULTIPLY(192, 96, 96, 97, 98)
PRODUCT_MULTIPLY(224, 112, 112, 113, 114)
PRODUCT_MULTIPLY(256, 128, 128, 129, 130)
#undef PRODUCT_MULTIPLY
#undef PRODUCT_MULTIPLY_AS

// ---------------------------------------------------------------- steps of a pipeline

// Products of consecutive stages of a ring, as they are filled -> the first N / 2 of the sums. `a` and
// `b` are the operands in the ring's first stage. A stage is released while the next one is being
// multiplied, so that there is no bubble.
template <typename In, int N, int STAGE, int STAGES, int SUMS, class Release>
__device__ __forceinline__ void multiply_steps(Sum<In> (&acc)[SUMS], unsigned long long a,
                                               unsigned long long b, Barrier* full, int& slot,
                                               int& parity, int first_step, int last_step,
                                               const Release& release) {
    Sum<In>(&own)[N / 2] = *reinterpret_cast<Sum<In>(*)[N / 2]>(&acc);
    int before = 0;
    for (int step = first_step; step < last_step; step++) {
        barrier_wait(full + slot, parity);
        const int offset = slot * (STAGE * static_cast<int>(sizeof(In)) / 16);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; d++)
            wgmma<In, N>(own, a + offset + 2 * d, b + offset + 2 * d,
                         step != first_step || d != 0);
        wgmma_commit();
        if (step != first_step) {
            wgmma_wait<1>();
            release(before);
        }
        before = slot;
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
    wgmma_wait<0>();
    fence_operand(own);
    release(before);
}
