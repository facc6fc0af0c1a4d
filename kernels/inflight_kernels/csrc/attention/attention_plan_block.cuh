// What the threads of a plan's only block do together.
#pragma once

#include "common.cuh"

namespace attention {

constexpr int PLAN_THREADS = 1024;

// Inclusive scan over the block's threads; `total` is the sum of all, for every thread.
template <int THREADS>
__device__ __noinline__ int scan(int value, int& total) {
    static_assert(THREADS == 1024, "a warp scans the warps");
    __shared__ int warp_totals[32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const auto scan_warp = [&](int x) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, x, distance);
            if (lane >= distance) x += other;
        }
        return x;
    };
    value = scan_warp(value);
    if (lane == 31) warp_totals[warp] = value;
    __syncthreads();
    const int upto = scan_warp(warp_totals[lane]);
    const int before = __shfl_sync(FULL_WARP, upto, max(warp - 1, 0));
    total = __shfl_sync(FULL_WARP, upto, 31);
    __syncthreads();
    return value + (warp == 0 ? 0 : before);
}

// The last of `count` ascending numbers start(0) = 0, start(1), ... that is at most `wanted`.
template <class Start>
__device__ __forceinline__ int last_at_most(int wanted, int count, const Start& start) {
    int low = 0, high = count;
#pragma unroll 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (start(middle) <= wanted)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The maximum of a number per thread, or 0.
__device__ __forceinline__ int block_max(int number) {
    __shared__ int largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    number = __reduce_max_sync(FULL_WARP, number);
    if (threadIdx.x % 32 == 0) atomicMax(&largest, number);
    __syncthreads();
    const int found = largest;
    __syncthreads();
    return found;
}

}  // namespace attention
