// Shared by the parts of skinny_gemm.cu: its warps, and copies of weights that are used once.
// sm_90a only.
#pragma once

#include "linear/hopper_linear.cuh"

constexpr int WARPS = 4;    // consumers
constexpr int HELPERS = 4;  // more warps that quantise x, where that is done here, and exit
constexpr int TOKENS = 64;  // of a tile
constexpr int ATOM = 8;     // rows of a swizzled atom

// ---------------------------------------------------------------- barriers in shared memory

// Barrier of the consumers.
__device__ inline void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

// Make this thread's writes to shared memory visible to TMA copies and wgmma.
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- copies of boxes

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
