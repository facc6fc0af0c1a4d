// Norms for layers that RMSNorm with a fused addition does not cover: LayerNorm, norms and scales of
// what is added to the residual stream, norms over all heads at once. A block per row, as in norm.cu.
#include "common.cuh"

enum Flags { ADDS = 1, CENTERED = 2, POST_NORM = 4, POST_BIAS = 8, NORM = 16, BIAS = 32 };

// Normalise a row of `width` values, VECTORS * N a thread; columns beyond it are not touched.
// CENTERED subtracts the mean, as LayerNorm does.
template <int VECTORS, int N>
__device__ void normalize(float (&a)[VECTORS][N], const float* weight, const float* bias, int width,
                          float eps, bool centered, float (&partial)[2][32]) {
    float mean = 0.0f;
    if (centered) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if ((i * blockDim.x + threadIdx.x) * N < width)
#pragma unroll
                for (int j = 0; j < N; j++) sum += a[i][j];
        mean = block_sum(sum, partial[0]) / width;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if ((i * blockDim.x + threadIdx.x) * N < width)
#pragma unroll
            for (int j = 0; j < N; j++) squares += (a[i][j] - mean) * (a[i][j] - mean);
    const float scale = rsqrtf(block_sum(squares, partial[1]) / width + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < width) {
            float w[N], b[N] = {};
            load_floats(weight + column, w);
            if (bias != nullptr) load_floats(bias + column, b);
#pragma unroll
            for (int j = 0; j < N; j++) a[i][j] = (a[i][j] - mean) * scale * w[j] + b[j];
        }
    }
}

// total = [total +] scale * [norm of] x, and out = [norm of] total; what is in brackets as the flags
// say. The stream `total` is in float32.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(512)
    add_norm(const T* x, float* total, T* out, const float* post_weight, const float* post_bias,
             const float* weight, const float* bias, int hidden, float eps, float scale,
             int flags) {
    constexpr int N = VECTOR<T>;
    __shared__ float partial[2][2][32];
    const long long row = static_cast<long long>(blockIdx.x) * hidden;
    const bool centered = flags & CENTERED;
    pdl_wait();
    pdl_launch_dependents();

    float a[VECTORS][N];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) unpack<T>(load_vector(x + row + column), a[i]);
    }
    if (flags & POST_NORM)
        normalize(a, post_weight, flags & POST_BIAS ? post_bias : nullptr, hidden, eps, centered,
                  partial[0]);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) {
            float sum[N] = {};
            if (flags & ADDS) load_floats(total + row + column, sum);
#pragma unroll
            for (int j = 0; j < N; j++) a[i][j] = sum[j] + scale * a[i][j];
#pragma unroll
            for (int j = 0; j < N; j += 4)
                store_vector(total + row + column + j,
                             pack<float>(*reinterpret_cast<float(*)[4]>(a[i] + j)));
        }
    }
    if (flags & NORM)
        normalize(a, weight, flags & BIAS ? bias : nullptr, hidden, eps, centered, partial[1]);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < hidden) store_vector(out + row + column, pack<T>(a[i]));
    }
}

// RMSNorm of `width` columns from `first` on, in place, in rows of `stride` values.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(512)
    norm_columns(T* x, const float* weight, int stride, int first, int width, float eps) {
    constexpr int N = VECTOR<T>;
    __shared__ float partial[2][32];
    T* const row = x + static_cast<long long>(blockIdx.x) * stride + first;
    pdl_wait();
    pdl_launch_dependents();

    float a[VECTORS][N];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < width) unpack<T>(load_vector(row + column), a[i]);
    }
    normalize(a, weight, nullptr, width, eps, false, partial);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * N;
        if (column < width) store_vector(row + column, pack<T>(a[i]));
    }
}
