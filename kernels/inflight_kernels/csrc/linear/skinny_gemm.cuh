// Shared by the parts of skinny_gemm.cu: its warps, copies of weights that are used once, and cluster
// operations for two blocks. sm_90a only.
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

// ---------------------------------------------------------------- clusters of two blocks

// Write to an address in the shared memory of a block of the cluster.
__device__ inline void send(float4* place, int rank, const float4& value) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n"
        "}" ::"r"(shared_address(place)),
        "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
        : "memory");
}

__device__ inline void send(float2* place, int rank, const float2& value) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v2.f32 [there], {%2, %3};\n"
        "}" ::"r"(shared_address(place)),
        "r"(rank), "f"(value.x), "f"(value.y)
        : "memory");
}

