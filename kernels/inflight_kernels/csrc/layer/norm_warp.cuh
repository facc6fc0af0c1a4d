// RMSNorm of many rows, a warp for each: nothing waits at a barrier of a block.
#pragma once

#include "eight_bit.cuh"

// The sum of each lane's `values` over the warp, as row_sum (norm_row.cuh) adds them: value i over
// all lanes, then these sums. COUNT: a power of two up to 16. Returned to every lane.
//
// A lane keeps half of its values and gives the other half away, so that each sum is that of
// warp_sum with fewer shuffles.
template <int COUNT>
__device__ float sum_of_sums(float (&values)[COUNT]) {
    const int lane = threadIdx.x % 32;
    int distance = 16;
#pragma unroll
    for (int count = COUNT; count > 1; count /= 2, distance /= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < count / 2; i++) {
            const float own = upper ? values[i + count / 2] : values[i];
            const float other = upper ? values[i] : values[i + count / 2];
            values[i] = own + __shfl_xor_sync(FULL_WARP, other, distance);
        }
    }
    float sum = values[0];
#pragma unroll
    for (; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    // Sums of values i and i + COUNT / 2 are in lanes 16 apart, and so on.
#pragma unroll
    for (int apart = 16; apart > 16 / COUNT; apart /= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, apart);
    return sum;
}

// Calls use(column, values) for each vector of T that this lane has of a row, normed.
template <typename T, int VECTORS, class Use>
__device__ __forceinline__ void each_normed(const uint4 (&vectors)[VECTORS], const float* weight,
                                            float scale, int hidden, const Use& use) {
    constexpr int N = VECTOR<T>;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (32 * i + threadIdx.x % 32) * N;
        if (column >= hidden) continue;
        float a[N], w[N];
        load_floats(weight + column, w);
        unpack<T>(vectors[i], a);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] *= scale * w[j];
        use(column, a);
    }
}

// Rows of up to 32 * VECTORS 16-byte vectors of T, the last rows first. Out: T, or Fp8 or Int8 with
// a scale for each row. Results are those of norm_row.
template <typename T, typename Out, int VECTORS>
__device__ __forceinline__ void norm_by_warps(const T* x, const float* weight, Out* out,
                                              float* scales, int num_rows, int hidden, float eps) {
    constexpr int N = VECTOR<T>;
    const int lane = threadIdx.x % 32;
    const int own = num_rows - 1 - (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const long long row = static_cast<long long>(own) * hidden;
    pdl_launch_dependents();
    pdl_wait();
    if (own < 0) return;

    uint4 values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (32 * i + lane) * N;
        values[i] = column < hidden ? load_vector(x + row + column) : make_uint4(0, 0, 0, 0);
    }
    float squares[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[N];
        unpack<T>(values[i], a);
#pragma unroll
        for (int j = 0; j < N; j++) squares[i] += a[j] * a[j];
    }
    const float scale = rsqrtf(sum_of_sums(squares) / hidden + eps);

    if constexpr (SAME<Out, T>) {
        each_normed<T>(values, weight, scale, hidden, [&](int column, const float (&a)[N]) {
            store_vector(out + row + column, pack<T>(a));
        });
    } else {
        unsigned largest = 0;
        each_normed<T>(values, weight, scale, hidden, [&](int, const float (&a)[N]) {
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, magnitude(a[j]));
        });
        const RowScale<Out> quantized(__reduce_max_sync(FULL_WARP, largest));
        if (lane == 0) scales[own] = quantized.scale;
        each_normed<T>(values, weight, scale, hidden, [&](int column, const float (&a)[N]) {
            store_bytes<T>(out + row + column, quantized, a);
        });
    }
}
