// Cluster operations for two blocks. sm_90a only.
#pragma once

#include "linear/hopper_linear.cuh"

namespace gemm {

// ---------------------------------------------------------------- clusters

__device__ inline int rank_in_cluster() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of the cluster, without memory ordering.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// ---------------------------------------------------------------- barriers in shared memory

// Arrive at a barrier of a block of the cluster, without releasing memory to the cluster, which
// would cost a fence at each arrival.
__device__ inline void arrive_at(Barrier* barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// ---------------------------------------------------------------- copies of boxes

// tma_load to the same address of both blocks; each block's barrier counts its own bytes.
__device__ inline void tma_load_multicast(void* shared, const TensorMap* map, int row, int column,
                                        Barrier* barrier) {
    constexpr unsigned short BOTH = 3;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(BOTH)
        : "memory");
}

// ---------------------------------------------------------------- registers

// Sets the registers per thread of this warpgroup.
template <int N>
__device__ inline void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ inline void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace gemm
