// What a cluster of two blocks shares, and the products of a warpgroup that many tokens take.
// sm_90a only.
#pragma once

#include "hopper_linear.cuh"

namespace dense {

// ---------------------------------------------------------------- clusters

__device__ inline int rank_in_cluster() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Wait for all threads of the cluster. What they wrote need not be seen.
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// ---------------------------------------------------------------- barriers in shared memory

// Arrive at this barrier of a block of the cluster. To release memory to the whole cluster as well
// would cost a fence of all of it at each arrival.
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

// copy_box to this place of both blocks; the barrier of each counts what came to it.
__device__ inline void copy_box_to_both(void* shared, const TensorMap* map, int row, int column,
                                        Barrier* barrier) {
    constexpr unsigned short BOTH = 3;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(BOTH)
        : "memory");
}

// ---------------------------------------------------------------- registers

// Of each thread of this warpgroup, from now on.
template <int N>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---------------------------------------------------------------- products of a warpgroup

__device__ inline void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most PENDING of the youngest groups of products are on their way.
template <int PENDING>
__device__ inline void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// acc[64 x N] = a[64 x 16] @ b[N x 16]^T, or += where `add`. Thread t of the warpgroup holds,
// with w = t / 32, g = t % 32 / 4 and q = t % 4, of columns 8j + 2q and 8j + 2q + 1: in acc[4j] and
// acc[4j + 1] row 16w + g, in acc[4j + 2] and acc[4j + 3] row 16w + g + 8.
template <typename T, int N>
__device__ void multiply(float (&acc)[N / 2], unsigned long long a, unsigned long long b,
                         bool add);

// The registers %0 to %<n - 1>, and the accumulators that they stand for.
#define DENSE_ACC_8(i)                                                                    \
    "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), \
        "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define DENSE_ACC_TO_8 DENSE_ACC_8(0)
#define DENSE_ACC_TO_16 DENSE_ACC_TO_8, DENSE_ACC_8(8)
#define DENSE_ACC_TO_24 DENSE_ACC_TO_16, DENSE_ACC_8(16)
#define DENSE_ACC_TO_32 DENSE_ACC_TO_24, DENSE_ACC_8(24)
#define DENSE_ACC_TO_40 DENSE_ACC_TO_32, DENSE_ACC_8(32)
#define DENSE_ACC_TO_48 DENSE_ACC_TO_40, DENSE_ACC_8(40)
#define DENSE_ACC_TO_56 DENSE_ACC_TO_48, DENSE_ACC_8(48)
#define DENSE_ACC_TO_64 DENSE_ACC_TO_56, DENSE_ACC_8(56)
#define DENSE_ACC_TO_72 DENSE_ACC_TO_64, DENSE_ACC_8(64)
#define DENSE_ACC_TO_80 DENSE_ACC_TO_72, DENSE_ACC_8(72)
#define DENSE_ACC_TO_88 DENSE_ACC_TO_80, DENSE_ACC_8(80)
#define DENSE_ACC_TO_96 DENSE_ACC_TO_88, DENSE_ACC_8(88)
#define DENSE_ACC_TO_104 DENSE_ACC_TO_96, DENSE_ACC_8(96)
#define DENSE_ACC_TO_112 DENSE_ACC_TO_104, DENSE_ACC_8(104)
#define DENSE_ACC_TO_120 DENSE_ACC_TO_112, DENSE_ACC_8(112)
#define DENSE_ACC_TO_128 DENSE_ACC_TO_120, DENSE_ACC_8(120)
#define DENSE_TO_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DENSE_TO_16 DENSE_TO_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DENSE_TO_24 DENSE_TO_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DENSE_TO_32 DENSE_TO_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DENSE_TO_40 DENSE_TO_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define DENSE_TO_48 DENSE_TO_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define DENSE_TO_56 DENSE_TO_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define DENSE_TO_64 DENSE_TO_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define DENSE_TO_72 DENSE_TO_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define DENSE_TO_80 DENSE_TO_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define DENSE_TO_88 DENSE_TO_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define DENSE_TO_96 DENSE_TO_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define DENSE_TO_104 DENSE_TO_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define DENSE_TO_112 DENSE_TO_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define DENSE_TO_120 DENSE_TO_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define DENSE_TO_128 DENSE_TO_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// HALF = N / 2; A, B and ADD are HALF, HALF + 1 and HALF + 2.
#define DENSE_MULTIPLY(T, TYPE, N, HALF, A, B, ADD)                                          \
    template <>                                                                              \
    __device__ inline void multiply<T, N>(float(&acc)[HALF], unsigned long long a,        \
                                             unsigned long long b, bool add) {               \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" \
                     DENSE_TO_##HALF "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n}"              \
                     : DENSE_ACC_TO_##HALF                                                   \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                          \
    }

DENSE_MULTIPLY(__nv_bfloat16, "bf16", 224, 112, 112, 113, 114)
DENSE_MULTIPLY(__nv_bfloat16, "bf16", 256, 128, 128, 129, 130)
DENSE_MULTIPLY(__half, "f16", 224, 112, 112, 113, 114)
DENSE_MULTIPLY(__half, "f16", 256, 128, 128, 129, 130)
#undef DENSE_MULTIPLY

}  // namespace dense
