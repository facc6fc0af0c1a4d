// Clusters of blocks that read each other's shared memory. Hopper only.
#pragma once

#include "common.cuh"

// Of a kernel that is compiled for other GPUs as well, which do not run it.
#if __CUDA_ARCH__ >= 900
#define CLUSTERS_OF_TWO __cluster_dims__(2, 1, 1)
#else
#define CLUSTERS_OF_TWO
#endif

__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Barrier of all running threads of the cluster; their writes are visible afterwards.
__device__ inline void cluster_sync_release() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The two halves of such a barrier.
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

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

// Read a value from the shared memory of a block of the cluster.
__device__ inline unsigned load_from(const unsigned* place, int rank) {
    unsigned value;
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [there];\n"
        "}"
        : "=r"(value)
        : "r"(shared_address(place)), "r"(rank)
        : "memory");
    return value;
}

__device__ inline float4 load_from(const float4* place, int rank) {
    float4 value;
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
        "}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(shared_address(place)), "r"(rank)
        : "memory");
    return value;
}
