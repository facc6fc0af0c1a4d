// What linear layers on Hopper share: bulk copies of boxes of a matrix, the barriers that they
// complete on, and the frame of warpgroup products. sm_90a only.
#pragma once

#include "common.cuh"

// CUtensorMap: how a matrix lies in memory, and the box of it that a copy takes.
struct alignas(64) TensorMap {
    char opaque[128];
};

__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------- barriers in shared memory

typedef unsigned long long Barrier;

__device__ inline void init_barrier(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

// Make initialized barriers known to the copy engine and, with a barrier of it, to the cluster.
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrive, and let the phase not end before copies have brought so many bytes.
__device__ inline void arrive_expecting(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Wait for the end of the phase of this parity; a fresh barrier is in phase 0, after a phase 1.
__device__ inline void wait_for(Barrier* barrier, int parity) {
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

__device__ inline void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Bring the box at (row, column) to shared memory, swizzled as the map says; zeros past the matrix.
__device__ inline void copy_box(void* shared, const TensorMap* map, int row, int column,
                                Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// ---------------------------------------------------------------- products of a warpgroup

// Have the registers of a product at rest here: nothing that is done to them moves past.
template <int N>
__device__ void pin(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(acc[i])::"memory");
}

// Before products, with all of their registers pinned.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// A matrix in shared memory whose rows are 64 16-bit values, swizzled in units of 8 rows, 1024
// bytes. Add 2 for the next 16 columns.
__device__ inline unsigned long long describe(const void* shared) {
    constexpr unsigned long long SWIZZLE_128B = 1ull << 62, NEXT_UNIT = 1024 / 16;
    return SWIZZLE_128B | NEXT_UNIT << 32 | 1ull << 16 | (shared_address(shared) & 0x3ffff) >> 4;
}
