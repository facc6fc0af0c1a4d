// Sums of what a token's experts compute.
#pragma once

#include "common.cuh"

constexpr int MAX_TOP_K = 32;

// Where the rows of a token's experts are, and what these are multiplied with: in shared memory.
struct Parts {
    long long places[MAX_TOP_K];  // of their first values
    float factors[MAX_TOP_K + 1];  // the last of top_k + 1 is that of the shared expert
};

// Rows of experts by token: sum over r of weights[t, r] * rows[positions[t, r]], in this order,
// + weights[t, top_k] * shared[t] unless that is null. One block of threads per token.
template <typename T>
struct ExpertRows {
    const T* rows;
    const int* positions;
    const float* weights;
    const T* shared;
    int width, top_k;

    // By all threads of the block.
    __device__ void find(Parts& parts) const {
        const int token = blockIdx.x;
        if (threadIdx.x <= top_k) {
            parts.factors[threadIdx.x] = load_l2(weights + token * (top_k + 1) + threadIdx.x);
            if (threadIdx.x < top_k)
                parts.places[threadIdx.x] =
                    static_cast<long long>(load_l2(positions + token * top_k + threadIdx.x)) *
                    width;
        }
        __syncthreads();
    }

    // Add the token's to a vector, `place` values from the first token's start.
    __device__ void add(const Parts& parts, long long place, int column,
                        float (&sum)[VECTOR<T>]) const {
        constexpr int N = VECTOR<T>, AT_ONCE = 8;
        for (int from = 0; from < top_k; from += AT_ONCE) {
            uint4 raw[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (from + i < top_k) raw[i] = load_vector(rows + parts.places[from + i] + column);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (from + i >= top_k) continue;
                float values[N];
                unpack<T>(raw[i], values);
                const float factor = parts.factors[from + i];
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += factor * values[j];
            }
        }
        if (shared) {
            float values[N];
            unpack<T>(load_vector(shared + place), values);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += parts.factors[top_k] * values[j];
        }
    }
};
