// Arithmetic of the sampler: Philox, fixed-point scores and their masses, sums over a block.
//
// A score is a token's distance from the most probable one, (top - logit) / temperature, as a
// 32-bit fixed-point number: 5 integer bits, 27 fraction bits. Its mass is exp(-score) in units of
// 2^-40, so tokens 28 or more below have none. After these two roundings everything is in integers:
// sums do not depend on their order, and successive passes over a row agree.
#pragma once

#include "common.cuh"

typedef unsigned long long u64;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LARGEST = 3.402823466e+38f;
#define INFINITE __int_as_float(0x7f800000)  // NVRTC has no constant for it
constexpr float SCORE_ONE = 134217728.0f;  // 2^27
constexpr float MASS_ONE = 1099511627776.0f;  // 2^40

// 2^x, to 2 ulp; results below 2^-126 are 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline unsigned score_of(float logit, float top, float temperature) {
    return __float2uint_rn((top - logit) / temperature * SCORE_ONE);  // saturates
}

__device__ inline float weight_of(unsigned score) {
    return exp2_fast(static_cast<float>(score) * (-LOG2_E / SCORE_ONE));
}

__device__ inline u64 mass_of(unsigned score) {
    return __float2ull_rn(weight_of(score) * MASS_ONE);
}

// Score times mass, in units of 2^-43: the sum over 2^21 tokens fits, as x exp(-x) is below 1/e.
__device__ inline u64 moment_of(unsigned score) {
    return __umul64hi(static_cast<u64>(score) << 32, mass_of(score) << 8);
}

// The mean score of tokens with this mass and moment.
__device__ inline unsigned mean_score(u64 mass, u64 moment) {
    return __double2uint_rn(static_cast<double>(moment) / static_cast<double>(mass) * 0x1p24);
}

// Purpose of a random number.
enum Purpose { DRAW = 0, XTC = 1 };

// The random number in [0, 1) of a seed at a position, times 2^64: the upper 52 bits of two words
// of Philox4x32-10 (Salmon et al., SC 2011).
__device__ inline u64 uniform(u64 seed, u64 position, Purpose purpose) {
    unsigned c0 = static_cast<unsigned>(position), c1 = static_cast<unsigned>(position >> 32);
    unsigned c2 = purpose, c3 = 0;
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
        c0 = static_cast<unsigned>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<unsigned>(p1);
        c2 = static_cast<unsigned>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<unsigned>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (static_cast<u64>(c0) << 32 | c1) >> 12 << 12;
}

// ---------------------------------------------------------------- over a block of THREADS

// Each of these begins and ends with a barrier, so successive calls may use the same `scratch`, of
// WARPS values.

template <typename V, typename Op>
__device__ V block_reduce(V value, V* scratch, Op op) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = op(value, __shfl_xor_sync(FULL_WARP, value, distance));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) value = op(value, scratch[i]);
    __syncthreads();
    return value;
}

template <typename V>
__device__ V block_total(V value, V* scratch) {
    return block_reduce(value, scratch, [](V a, V b) { return a + b; });
}

__device__ inline float block_largest(float value, float* scratch) {
    return block_reduce(value, scratch, [](float a, float b) { return fmaxf(a, b); });
}

// Exclusive prefix sum over threads, and the total.
__device__ inline u64 block_sum_before(u64 value, u64* scratch, u64& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = __shfl_up_sync(FULL_WARP, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u64 before = sum - value;
    total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) before += scratch[i];
        total += scratch[i];
    }
    __syncthreads();
    return before;
}
