// Shared by the parts of skinny_gemm.cu. sm_90a only.
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
